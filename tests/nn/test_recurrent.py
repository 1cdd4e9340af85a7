"""RNN, LSTM and GRU against the formulas, step by step in NumPy, forward; gradients against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from tests.tensor.oracle import numbers

RNG = np.random.default_rng(0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def numpy_step(
    mode: str, x: np.ndarray, h: np.ndarray, c: np.ndarray, w: dict[str, Any], end: str
) -> tuple[np.ndarray, np.ndarray]:
    bias = lambda k: w.get(f"bias_{k}{end}", 0.0)  # noqa: E731
    a, b = x @ w[f"weight_ih{end}"].T + bias("ih"), h @ w[f"weight_hh{end}"].T + bias("hh")
    if mode == "LSTM":
        i, f, g, o = np.split(a + b, 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        return (h @ w[f"weight_hr{end}"].T if f"weight_hr{end}" in w else h), c
    if mode == "GRU":
        (r, z, n), (rh, zh, nh) = np.split(a, 3, -1), np.split(b, 3, -1)
        n = np.tanh(n + sigmoid(r + rh) * nh)
        z = sigmoid(z + zh)
        return (1 - z) * n + z * h, c
    return (np.tanh(a + b) if mode == "RNN_TANH" else np.maximum(a + b, 0)), c


def numpy_rnn(layer: nn.RNNBase, x: np.ndarray, w: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(T, B, I) -> outputs and last h, from zero states."""
    last = []
    for number in range(layer.num_layers):
        outs = []
        for end in [f"_l{number}", f"_l{number}_reverse"][: 1 + layer.bidirectional]:
            h, c = (
                np.zeros((x.shape[1], layer.proj_size or layer.hidden_size)),
                np.zeros((x.shape[1], layer.hidden_size)),
            )
            out = np.zeros((len(x), *h.shape))
            for t in reversed(range(len(x))) if end.endswith("reverse") else range(len(x)):
                h, c = numpy_step(layer.mode, x[t], h, c, w, end)
                out[t] = h
            outs.append(out)
            last.append(h)
        x = np.concatenate(outs, -1)
    return x, np.stack(last)


LAYERS = {
    "rnn": lambda: nn.RNN(3, 4, 2, bidirectional=True),
    "relu": lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False),
    "lstm": lambda: nn.LSTM(3, 4, 2),
    "lstm both ways": lambda: nn.LSTM(3, 4, bidirectional=True),
    "projected": lambda: nn.LSTM(3, 4, 2, proj_size=2),
    "gru": lambda: nn.GRU(3, 4, 2, bidirectional=True),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("devices", [1, 2])
def test_forward_and_gradient(name: str, devices: int) -> None:
    layer = LAYERS[name]().double()
    x = numbers(RNG, "float64", (4, 3, 3), -1, 1)
    w = {k: t.numpy() for k, t in layer.state_dict().items()}
    names = tuple(f"CPU:{i}" for i in range(devices))
    t = Tensor(x)
    if devices > 1:
        layer.to(names)
        t = t.shard(names, 1)
    out, state = layer(t)
    weight = numbers(RNG, "float64", out.shape)
    (out * (Tensor(weight) if devices == 1 else Tensor(weight).shard(names, 1))).sum().backward()
    out.realize(*(state if layer.mode == "LSTM" else [state]), *(p.grad for p in layer.parameters()))
    want, last = numpy_rnn(layer, x, w)
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose((state[0] if layer.mode == "LSTM" else state).numpy(), last, rtol=1e-10, atol=1e-12)
    for k, p in layer.named_parameters():
        at = np.unravel_index(RNG.integers(w[k].size), w[k].shape)
        ends = []
        for h in (1e-6, -1e-6):
            moved = {**w, k: w[k].copy()}
            moved[k][at] += h
            ends.append((numpy_rnn(layer, x, moved)[0] * weight).sum())
        assert p.grad is not None
        np.testing.assert_allclose(p.grad.numpy()[at], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6, err_msg=k)


@pytest.mark.parametrize("cell, layer", [(nn.RNNCell, nn.RNN), (nn.LSTMCell, nn.LSTM), (nn.GRUCell, nn.GRU)])
def test_cells_and_shapes(cell: Any, layer: Any) -> None:
    """A cell stepped along a sequence is the layer; batch_first, no batch and given states say the same."""
    one, whole = cell(3, 4), layer(3, 4)
    whole.load_state_dict({f"{k}_l0": t for k, t in one.state_dict().items()})
    x = Tensor(numbers(RNG, "float32", (5, 2, 3)))
    state = None
    for t in range(5):
        state = one(x[t], state)
    out, last = whole(x)
    h, want = (state[0], last[0]) if layer is nn.LSTM else (state, last)
    np.testing.assert_allclose(h.numpy(), want.numpy()[0], rtol=1e-5, atol=1e-6)
    whole.batch_first = True
    np.testing.assert_allclose(whole(x.transpose(0, 1))[0].numpy(), out.transpose(0, 1).numpy(), rtol=1e-6)
    whole.batch_first = False
    np.testing.assert_allclose(whole(x[:, 1])[0].numpy(), out[:, 1].numpy(), rtol=1e-5, atol=1e-6)
    _, middle = whole(x[:2])
    np.testing.assert_allclose(whole(x[2:], middle)[0].numpy(), out[2:].numpy(), rtol=1e-5, atol=1e-6)
    single = one(x[0, 0])
    assert (single[0] if layer is nn.LSTM else single).shape == (4,)


def test_errors() -> None:
    with pytest.raises(ValueError, match="the last of 3, not shape"):
        nn.LSTM(3, 4)(Tensor.zeros(5, 2, 7))
    with pytest.raises(ValueError, match=r"a first state has shape \(2, 4\), this input needs \(1, 2, 4\)"):
        nn.GRU(3, 4)(Tensor.zeros(5, 2, 3), Tensor.zeros(2, 4))
    with pytest.raises(ValueError, match="the sequence is empty"):
        nn.GRU(3, 4)(Tensor.zeros(0, 2, 3))
    with pytest.raises(ValueError, match="proj_size is for LSTM"):
        nn.RNNBase("GRU", 3, 4, proj_size=2)
    with pytest.raises(ValueError, match='nonlinearity is "tanh" or "relu"'):
        nn.RNN(3, 4, nonlinearity="gelu")
    for bad in ({"bias": 1}, {"batch_first": 0}, {"bidirectional": "no"}):
        with pytest.raises(TypeError, match="is True or False, not"):
            nn.GRU(3, 4, **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_size must be positive, got 0"):
        nn.LSTM(0, 4)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize("shape", [(1, 4), (4,), (2, 5), (1, 1, 2, 4)])
def test_a_state_that_would_be_broadcast_is_refused(cell: Any, shape: tuple[int, ...]) -> None:
    state = Tensor.zeros(*shape)
    with pytest.raises(ValueError, match=r"a state has shape .*, this input needs \(2, 4\)"):
        cell(3, 4)(Tensor.zeros(2, 3), (Tensor.zeros(2, 4), state) if cell is nn.LSTMCell else state)
