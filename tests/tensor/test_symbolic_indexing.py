"""Slices, places, gradients and orders along a dim whose size a Variable says are those of the numbers it is bound to,
at every value of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, Variable
from manygrad.nn import functional as F

ROWS = 8
X = np.random.default_rng(3).permutation(np.arange(1, 3 * ROWS + 1, dtype=np.float32)).reshape(ROWS, 3)
BOUNDS = (None, -9, -3, -1, 0, 1, 2, 5, 9)
VALUES = (1, 2, 3, 6, 8)


def rows(n: int, least: int = 1) -> Tensor:
    return Tensor(X)[: Variable("v", least, ROWS).bind(n)]


def padded(t: Tensor, values: np.ndarray) -> None:
    """The rows of `t`, as many as `values` has, and nothing behind them."""
    place = Tensor.arange(ROWS + 1).reshape(-1, 1)
    mine = Tensor.arange(t.shape[0]).reshape(1, -1)
    got = (place.eq(mine).float() @ t).numpy()
    np.testing.assert_array_equal(got[: len(values)], values)
    assert not got[len(values) :].any()


@pytest.mark.parametrize("begin", BOUNDS)
@pytest.mark.parametrize("end", BOUNDS)
def test_a_slice_is_python_s(begin: int | None, end: int | None) -> None:
    """Negative bounds count from the end, and what is beyond either end is cut off: no element before the tensor is
    read, and none behind the part."""
    step = TinyJit(lambda v: Tensor(X).realize()[:v][begin:end].sum(0).realize())
    for n in VALUES:
        want = X[:n][begin:end]
        np.testing.assert_array_equal(rows(n)[begin:end].sum(0).numpy(), want.sum(0))
        np.testing.assert_array_equal(step(Variable("v", 1, ROWS).bind(n)).numpy(), want.sum(0))
    padded(rows(6)[begin:end], X[:6][begin:end])


def test_sizes_that_are_known() -> None:
    assert rows(6, least=3)[-2:].shape == (2, 3)
    assert rows(6, least=3)[-3:-1].shape == (2, 3)
    assert rows(6, least=3)[1:3].shape == (2, 3)
    assert not isinstance(rows(6)[-2:].shape[0], int)  # of one row it is one


def test_bounds_with_variables() -> None:
    v, w = Variable("v", 1, ROWS).bind(5), Variable("w", 0, ROWS).bind(7)
    t = Tensor(X)
    np.testing.assert_array_equal(t[:v][: v // 2].sum(0).numpy(), X[:2].sum(0))
    np.testing.assert_array_equal(t[:v][v // 2 :].sum(0).numpy(), X[2:5].sum(0))
    np.testing.assert_array_equal(t[:v][:w].sum(0).numpy(), X[:5].sum(0))  # w is beyond the end
    np.testing.assert_array_equal(t[:v][w:].sum(0).numpy(), np.zeros(3))
    np.testing.assert_array_equal(t[w:v].sum(0).numpy(), np.zeros(3))
    np.testing.assert_array_equal(t[:v][v - 1].numpy(), X[4])


def test_a_place_that_may_be_outside_is_an_error() -> None:
    t = rows(6)
    np.testing.assert_array_equal(t[-1].numpy(), X[5])
    np.testing.assert_array_equal(t[0].numpy(), X[0])
    np.testing.assert_array_equal(rows(6, least=3)[-3].numpy(), X[3])
    for i in (5, -2):
        with pytest.raises(IndexError, match=f"index {i} can be outside dim 0 of shape .*v=6.* narrow their ranges"):
            t[i]
    with pytest.raises(IndexError, match="can be outside"):
        t[Variable("w", 0, ROWS - 1).bind(2)]


@pytest.mark.parametrize("n", VALUES)
def test_orders_positions_and_joins(n: int) -> None:
    x, t = X[:n], rows(n)
    assert t.argmax().item() == x.argmax() and t.argmin().item() == x.argmin()
    assert t.T.argmax().item() == x.T.argmax()
    padded(t.sort(0).values, np.sort(x, 0))
    padded(t.sort(0, descending=True).indices.float(), np.argsort(-x, 0))
    np.testing.assert_array_equal(t.repeat(2, 3).sum(0).numpy(), np.tile(x, (2, 3)).sum(0))
    np.testing.assert_array_equal(t.T.repeat(1, 2).sum(1).numpy(), 2 * x.sum(0))
    np.testing.assert_array_equal(Tensor.cat(t, Tensor(X)[:2], t).sum(0).numpy(), 2 * x.sum(0) + X[:2].sum(0))
    assert Tensor.cat(t, Tensor(X)[n:]).sum().item() == X.sum()
    flat = Tensor.cat(t[:, 0], Tensor(X)[n:, 1])
    assert flat.sum().item() == x[:, 0].sum() + X[n:, 1].sum()
    assert Tensor.cat(t[:, 0], Tensor([7.0, 8.0])).sum().item() == x[:, 0].sum() + 15
    np.testing.assert_array_equal(
        (t.flatten() * Tensor.arange(3 * t.shape[0])).sum().numpy(), x.ravel() @ np.arange(3 * n)
    )
    np.testing.assert_array_equal(F.pad(t, (0, 0, 2, 1)).cumsum(0).amax(0).numpy(), x.sum(0))


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda t: t * t,
    "inner slice": lambda t: t[-3:-1] * t[-3:-1],
    "tail": lambda t: t[1:].square(),
    "sorted": lambda t: t.sort(0).values * Tensor.arange(t.shape[0]).reshape(-1, 1),
    "repeated": lambda t: t.repeat(2, 1).square(),
    "joined": lambda t: Tensor.cat(t, t.square(), 3 * t),
    "flipped": lambda t: t.flip(0).cumsum(0),
    "largest": lambda t: t.amax(0),
    "row": lambda t: t[-1] * t[0],
    "softmax": lambda t: t.softmax(0) * t,
    "flat": lambda t: t.flatten().square(),
    "product": lambda t: t.T @ t,
}


@pytest.mark.parametrize("n", VALUES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_through_parts(name: str, n: int) -> None:
    """Those of the part that is cut to a number; zeros elsewhere."""
    f = GRADIENTS[name]
    symbolic, fixed = Tensor(X, requires_grad=True), Tensor(X, requires_grad=True)
    f(symbolic[: Variable("v", 1, ROWS).bind(n)]).sum().backward()
    result = f(fixed[:n])
    if result.numel():
        result.sum().backward()
    want = fixed.grad.numpy() if result.numel() else np.zeros_like(X)
    np.testing.assert_allclose(symbolic.grad.numpy(), want, rtol=1e-6, atol=1e-6)
