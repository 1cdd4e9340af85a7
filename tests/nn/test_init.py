"""Initialisers by their moments and bounds, and what `nn.utils` does to parameters and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, nn
from manygrad.nn import init, utils


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(Tensor.zeros(*shape))


def test_gains_and_fans() -> None:
    assert (
        init.calculate_gain("relu") == math.sqrt(2)
        and init.calculate_gain("conv2d") == 1
        and init.calculate_gain("tanh") == 5 / 3
    )
    assert init.calculate_gain("leaky_relu", 0.2) == math.sqrt(2 / 1.04)
    with pytest.raises(ValueError, match="does not know 'gelu'"):
        init.calculate_gain("gelu")
    with pytest.raises(ValueError, match="needs at least 2 dims"):
        init.xavier_uniform_(weight(3))
    with pytest.raises(ValueError, match='mode is "fan_in" or "fan_out"'):
        init.kaiming_normal_(weight(3, 3), mode="fan")


@pytest.mark.parametrize("fill, std, bound", [
    (lambda w: init.uniform_(w, -2, 4), 6 / math.sqrt(12), None), (lambda w: init.normal_(w, 1, 0.5), 0.5, None),
    (lambda w: init.xavier_uniform_(w), math.sqrt(2 / 500), math.sqrt(6 / 500)),
    (lambda w: init.xavier_normal_(w, 2.0), 2 * math.sqrt(2 / 500), None),
    (lambda w: init.kaiming_uniform_(w, a=1), math.sqrt(1 / 300), math.sqrt(3 / 300)),
    (lambda w: init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"), math.sqrt(2 / 200), None),
    (lambda w: init.trunc_normal_(w, 0, 1, -2, 2), 0.8796, 2.0), (lambda w: init.trunc_normal_(w, 0, 0.02), 0.02, None),
])  # fmt: skip
def test_spread(fill, std, bound) -> None:  # type: ignore[no-untyped-def]
    w = weight(200, 300)
    assert fill(w) is w and isinstance(w, nn.Parameter) and w.requires_grad
    a = w.numpy()
    assert a.std() == pytest.approx(std, rel=0.03) and (
        bound is None or 0.99 * bound < np.abs(a).max() <= bound * 1.00001
    )


def test_exact_ones() -> None:
    np.testing.assert_array_equal(init.eye_(weight(2, 3)).numpy(), np.eye(2, 3, dtype=np.float32))
    assert (
        init.ones_(weight(2)).tolist() == [1, 1]
        and init.zeros_(weight(2)).tolist() == [0, 0]
        and init.constant_(weight(2), 0.25).tolist() == [0.25, 0.25]
    )
    conv = nn.Conv1d(2, 4, 3, padding=1, groups=2, bias=False)
    assert init.dirac_(conv.weight, 2).tolist() == [[[0, 1, 0]], [[0, 0, 0]], [[0, 1, 0]], [[0, 0, 0]]]
    s = init.sparse_(weight(10, 7), 0.25).numpy()
    assert ((s == 0).sum(0) == 3).all()
    for shape in ((5, 3), (3, 5), (4, 2, 2), (4, 4)):
        a = init.orthogonal_(weight(*shape), gain=2.0).numpy().reshape(shape[0], -1)
        g = a @ a.T if a.shape[0] <= a.shape[1] else a.T @ a
        np.testing.assert_allclose(g, 4 * np.eye(len(g)), atol=2e-5)


def test_quantile_of_the_normal_distribution() -> None:
    x = np.array([-3.5, -2.0, -1.0, -0.1, 0.0, 0.5, 1.7, 3.0])
    u = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
    np.testing.assert_allclose(init._normal_quantile(Tensor(u)).numpy(), x, rtol=2e-9, atol=2e-9)


def test_filling_what_is_stored_and_sharded() -> None:
    w = weight(6, 2).shard_(("CPU:0", "CPU:1"), 0).realize()
    before = w.uop
    init.ones_(w).realize()
    assert w.numpy().sum() == 12 and w.device == ("CPU:0", "CPU:1") and before is not None


# *** utils ***


def gradients(shard: bool = False) -> tuple[list[nn.Parameter], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(s).astype(np.float32) for s in ((3, 4), (5,), ())]
    params = [nn.Parameter(Tensor.zeros(*g.shape)) for g in grads]
    for p, g in zip(params, grads):
        t = Tensor(g)
        if shard:
            names = ("CPU:0", "CPU:1")
            p.shard_(names, 0 if g.ndim else None)
            t = t.shard(names, 0 if g.ndim else None)
        p.grad = t
    return params, grads


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3.5, math.inf])
def test_clip_grad_norm(p: float, shard: bool) -> None:
    params, grads = gradients(shard)
    flat = np.concatenate([g.ravel() for g in grads])
    want = np.abs(flat).max() if p == math.inf else (np.abs(flat) ** p).sum() ** (1 / p)
    assert utils.clip_grad_norm_(params, 0.5, p).item() == pytest.approx(want, rel=1e-5)
    for q, g in zip(params, grads):
        np.testing.assert_allclose(q.grad.numpy(), g * (0.5 / (want + 1e-6)), rtol=1e-5)  # type: ignore[union-attr]
    params, grads = gradients(shard)
    utils.clip_grad_norm_(params, 1e6, p)
    np.testing.assert_array_equal(params[0].grad.numpy(), grads[0])  # type: ignore[union-attr]


@pytest.mark.parametrize("shard", [False, True])
def test_clip_grad_norm_of_orders_that_are_no_powers(shard: bool) -> None:
    """-inf: the smallest of all; 0: as in PyTorch the number of gradients that are not all 0."""
    for p, total in ((-math.inf, 0.25), (0, 2.0), (-1, 1 / (12 / 3 + 5 / 0.25))):
        params, _ = gradients(shard)
        for q, row in zip(params, ([[3.0] * 4] * 3, [0.25] * 5, 0.0)):
            q.grad.assign(Tensor(row).shard(q.device, 0 if q.ndim else None) if shard else Tensor(row))  # type: ignore[union-attr]
        some = params if p == 0 else params[:2]
        assert utils.clip_grad_norm_(some, 0.125, p).item() == pytest.approx(total, rel=1e-6)
        factor = min(1.0, 0.125 / (total + 1e-6))
        np.testing.assert_allclose(params[1].grad.numpy(), [0.25 * factor] * 5, rtol=1e-6)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="not nan"):
        utils.clip_grad_norm_(params, 1.0, math.nan)
    with pytest.raises(ValueError, match="max_norm must not be negative, got -1.0"):
        utils.clip_grad_norm_(params, -1.0)
    with pytest.raises(ValueError, match="clip_value must not be negative, got -1"):
        utils.clip_grad_value_(params, -1)


def test_clip_grad_value_and_nonfinite() -> None:
    params, grads = gradients()
    params.append(weight(2))
    utils.clip_grad_value_(params, 0.3)
    np.testing.assert_allclose(params[0].grad.numpy(), grads[0].clip(-0.3, 0.3))  # type: ignore[union-attr]
    params[1].grad = Tensor([math.inf] * 5)
    with pytest.raises(RuntimeError, match="norm of order 2.0 is inf"):
        utils.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_clipping_inside_a_captured_step() -> None:
    layer = nn.Linear(3, 1, bias=False)
    optimiser = nn.optim.SGD(list(layer.parameters()), lr=1.0)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        optimiser.zero_grad()
        layer(x).sum().backward()
        norm = utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimiser.step()
        return norm

    for k in (1.0, 2.0, 3.0, 4.0):
        before = layer.weight.numpy()
        assert step(Tensor(np.full((1, 3), k, np.float32))).item() == pytest.approx(k * math.sqrt(3), rel=1e-6)
        np.testing.assert_allclose(before - layer.weight.numpy(), 1 / math.sqrt(3), rtol=1e-4)


def test_parameters_as_a_vector() -> None:
    layer = nn.Linear(2, 3)
    vector = utils.parameters_to_vector(layer.parameters())
    assert vector.shape == (9,)
    utils.vector_to_parameters(Tensor(np.arange(9, dtype=np.float32)), layer.parameters())
    assert layer.weight.tolist() == [[0, 1], [2, 3], [4, 5]] and layer.bias.tolist() == [6, 7, 8]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"have 9 elements, the vector has shape \(3,\)"):
        utils.vector_to_parameters(Tensor.zeros(3), layer.parameters())


def test_padded_sequences() -> None:
    rows = [Tensor(np.full((n, 2), n, np.float32)) for n in (1, 3, 2)]
    out = utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    assert out.shape == (3, 3, 2) and out.numpy()[0, :, 0].tolist() == [1, -1, -1]
    assert utils.rnn.pad_sequence(rows).shape == (3, 3, 2) and utils.rnn.pad_sequence(rows, True, 0.0, "left").numpy()[
        0, :, 0
    ].tolist() == [0, 0, 1]
    assert [r.shape[0] for r in utils.rnn.unpad_sequence(out, [1, 3, 2], batch_first=True)] == [1, 3, 2]
    with pytest.raises(ValueError, match="all dims after the first must be equal"):
        utils.rnn.pad_sequence([rows[0], Tensor.zeros(2, 3)])
