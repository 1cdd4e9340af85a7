"""Dropout in all its forms: what is dropped, what is kept and how it is scaled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor, nn

F = nn.functional
N = 1 << 15


def test_elements() -> None:
    a = F.dropout(Tensor.ones(N), 0.3).numpy()
    assert set(np.unique(a)) == {0.0, np.float32(1 / 0.7)} and abs((a == 0).mean() - 0.3) < 0.02
    x = Tensor.ones(4)
    assert F.dropout(x, 0.5, training=False) is x and F.dropout(x, 0.0) is x and F.dropout(x, 1.0).tolist() == [0] * 4
    with pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
        F.dropout(x, 1.5)


def test_the_method_follows_the_mode() -> None:
    x = Tensor.ones(64)
    assert (x.dropout(0.5).numpy() == 1).all()
    with Tensor.train():
        assert (x.dropout(0.5).numpy() == 0).any()


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (F.dropout1d, (16, 32, 3)),
        (F.dropout2d, (16, 32, 3, 2)),
        (F.dropout3d, (16, 32, 2, 2, 2)),
        (F.dropout2d, (64, 3, 3)),
    ],
)
def test_whole_channels(f: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    x = Tensor.ones(*shape)
    a = f(x, 0.5).numpy()
    rows = a.reshape(-1, int(np.prod(shape[-(len(shape) - 2) if len(shape) != 3 or f is F.dropout1d else -2 :])))
    assert all(len(set(r)) == 1 for r in rows.tolist()) and 0.2 < (rows[:, 0] == 0).mean() < 0.8
    with pytest.raises(ValueError, match="needs"):
        f(Tensor.ones(3), 0.5)


def test_in_place_and_gradient() -> None:
    x = Tensor.ones(32).contiguous().realize()
    y = F.dropout(x, 0.5, inplace=True)
    assert y is x and (x.numpy() == 0).any()
    w = Tensor(np.full(64, 2.0, np.float32), requires_grad=True)
    out = F.dropout(w, 0.25)
    out.sum().backward()
    assert w.grad is not None
    np.testing.assert_allclose(w.grad.numpy(), out.numpy() / 2, rtol=1e-6)


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = Tensor.randn(N)
    for y in (
        F.alpha_dropout(x, 0.3, training=True),
        F.feature_alpha_dropout(x.reshape(N // 2, 2, 1), 0.3, training=True),
    ):
        a = y.numpy()
        assert abs(a.mean()) < 0.05 and abs(a.std() - 1) < 0.05 and not np.array_equal(a, x.numpy())
    assert F.alpha_dropout(x, 0.3) is x


def test_gumbel_softmax() -> None:
    logits = Tensor(np.log(np.float32([[0.1, 0.6, 0.3]] * 4000)), requires_grad=True)
    hard = F.gumbel_softmax(logits, hard=True)
    a = hard.numpy()
    assert ((a == 0) | (a == 1)).all() and (a.sum(1) == 1).all() and np.abs(a.mean(0) - [0.1, 0.6, 0.3]).max() < 0.03
    (hard * Tensor([1.0, 2.0, 3.0])).sum().backward()
    assert logits.grad is not None and np.abs(logits.grad.numpy()).max() > 0  # the gradient of the soft sample
    soft = F.gumbel_softmax(logits, tau=0.5).numpy()
    np.testing.assert_allclose(soft.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("relu_", ()),
        ("leaky_relu_", (0.2,)),
        ("elu_", (0.7,)),
        ("selu_", ()),
        ("celu_", (1.3,)),
        ("hardtanh_", (-0.5, 0.5)),
        ("threshold_", (0.1, 3.0)),
        ("rrelu_", ()),
    ],
)
def test_activations_in_place(name: str, args: tuple[float, ...]) -> None:
    a = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    x = Tensor(a).realize()
    view = x[1]
    want = getattr(F, name[:-1])(Tensor(a), *args).numpy()
    assert getattr(F, name)(x, *args) is x
    np.testing.assert_array_equal(x.numpy(), want)
    np.testing.assert_array_equal(view.numpy(), want[1])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    rng = np.random.default_rng(0)
    table, index = rng.normal(size=(7, 3)).astype(np.float32), np.array([1, 2, 4, 5, 4, 0])
    f = {"sum": np.sum, "mean": np.mean, "max": np.max}[mode]
    w = Tensor(table, requires_grad=True)
    bags = F.embedding_bag(Tensor(index), w, Tensor(np.array([0, 2, 5])), mode=mode)
    np.testing.assert_allclose(
        bags.numpy(), np.stack([f(table[index[a:b]], axis=0) for a, b in ((0, 2), (2, 5), (5, 6))]), rtol=1e-5
    )
    rows = F.embedding_bag(Tensor(index.reshape(2, 3)), w, mode=mode)
    np.testing.assert_allclose(rows.numpy(), f(table[index.reshape(2, 3)], axis=1), rtol=1e-5)
    bags.sum().backward()
    assert w.grad is not None and w.grad.numpy()[3].tolist() == [0, 0, 0]
    empty = F.embedding_bag(Tensor(index[:0]), w, Tensor(np.array([0, 0])), mode=mode)
    assert empty.tolist() == [[0.0] * 3] * 2  # one for each bag, though all are empty
