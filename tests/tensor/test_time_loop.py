"""scan against NumPy, and to the bit against the loop in Python that it stands for: forward, backward, captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from manygrad import Context, GlobalCounters, Tensor, TinyJit, dtypes, nn, scan

RNG = np.random.default_rng(0)
XS = RNG.standard_normal((7, 3, 4)).astype(np.float32)
W = RNG.standard_normal((4, 4)).astype(np.float32) * 0.5
H = RNG.standard_normal((3, 4)).astype(np.float32)


def step(w: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def one(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (h @ w + x).tanh()
        return h, h * h + x

    return one


def in_python(f: Any, h: Tensor, xs: Tensor, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """What scan is, written out."""
    order = list(range(xs.shape[0]))
    ys = {}
    for t in reversed(order) if reverse else order:
        h, ys[t] = f(h, xs[t])
        h = h.contiguous()
    return h, ys[0].stack(*[ys[t] for t in order[1:]])


def numbers(loop: Callable[..., tuple[Tensor, Tensor]], reverse: bool) -> list[np.ndarray]:
    w, h, xs = (Tensor(a, requires_grad=True) for a in (W, H, XS))
    last, ys = loop(step(w), h, xs, reverse=reverse)
    ((last * 2).sum() + (ys * ys).sum()).backward()
    return [t.numpy() for t in (last, ys, w.grad, h.grad, xs.grad) if t is not None]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("follow", [0, 1])
def test_as_numpy_and_to_the_bit_as_in_python(reverse: bool, follow: int) -> None:
    with Context(FOLLOW=follow):
        found, want = numbers(scan, reverse), numbers(in_python, reverse)
    assert len(found) == 5
    for a, b in zip(found, want):
        np.testing.assert_array_equal(a, b)
    h, ys = H.astype(np.float64), np.zeros(XS.shape)
    for t in reversed(range(7)) if reverse else range(7):
        h = np.tanh(h @ W + XS[t])
        ys[t] = h * h + XS[t]
    np.testing.assert_allclose(found[0], h, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[1], ys, rtol=1e-4, atol=1e-6)


def test_gradients_as_differences() -> None:
    w, h, xs = (a.astype(np.float64) for a in (W, H, XS))

    def value(w: np.ndarray) -> float:
        last, ys = scan(step(Tensor(w)), Tensor(h), Tensor(xs))
        return float((last.sum() + (ys * ys).sum()).item())

    t = Tensor(w, requires_grad=True)
    last, ys = scan(step(t), Tensor(h), Tensor(xs))
    (last.sum() + (ys * ys).sum()).backward()
    assert t.grad is not None
    for at in ((0, 0), (1, 3), (2, 2)):
        ends = []
        for e in (1e-6, -1e-6):
            moved = w.copy()
            moved[at] += e
            ends.append(value(moved))
        np.testing.assert_allclose(t.grad.numpy()[at], (ends[0] - ends[1]) / 2e-6, rtol=1e-5)


def trained(wrap: Callable[[Any], Any]) -> list[np.ndarray]:
    """Ten steps of training through a scan."""
    w, h = Tensor(W, requires_grad=True), Tensor(H)
    optimizer = nn.optim.Adam([w], lr=0.01)

    def train(xs: Tensor) -> Tensor:
        optimizer.zero_grad()
        last, ys = scan(step(w), h, xs)
        loss = (ys - last).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    train = wrap(train)
    return [*(np.array(train(Tensor(XS + i)).item()) for i in range(10)), w.numpy()]


def test_captured_and_followed_loops_give_the_same_bits() -> None:
    with Context(FOLLOW=0):
        want = trained(lambda f: f)
    for wrap in (lambda f: f, TinyJit):
        for a, b in zip(trained(wrap), want, strict=True):
            np.testing.assert_array_equal(a, b)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def test_structures() -> None:
    """Carries, inputs and results in tuples, named tuples and dicts, with None among them."""

    def f(c: dict[str, Any], x: tuple[Any, ...]) -> tuple[Any, Any]:
        (a, (b,)), none = x
        assert none is None
        c = {"none": None, "n": c["n"] + 1, "pair": Pair(c["pair"].a + a, c["pair"].b * 2)}
        return c, [c["pair"].a, {"sum": a + b}, None, 3]

    a, b = Tensor(np.arange(5.0)), Tensor(np.arange(10).reshape(5, 2))
    init = {"pair": Pair(Tensor(np.array(1.0)), Tensor([1, 2])), "n": 0, "none": None}
    last, (sums, ys, none, threes) = scan(f, init, ((a, (b,)), None))
    assert last["none"] is None and none is None
    assert type(last["pair"]) is Pair
    assert (last["pair"].a.item(), last["n"].item()) == (11.0, 5)
    np.testing.assert_array_equal(last["pair"].b.numpy(), [32, 64])
    np.testing.assert_array_equal(sums.numpy(), [1, 2, 4, 7, 11])
    np.testing.assert_array_equal(ys["sum"].numpy(), np.arange(5.0)[:, None] + np.arange(10).reshape(5, 2))
    np.testing.assert_array_equal(threes.numpy(), [3] * 5)


def test_without_inputs_and_of_one_or_no_step() -> None:
    def double(c: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        return c * 2, c

    last, ys = scan(double, 1, length=6)
    assert (last.item(), ys.tolist(), ys.dtype) == (64, [1, 2, 4, 8, 16, 32], dtypes.int64)
    assert scan(double, 1, length=6, reverse=True)[1].tolist() == [32, 16, 8, 4, 2, 1]
    last, ys = scan(double, 3, length=1)
    assert (last.item(), ys.tolist()) == (6, [3])
    last, ys = scan(step(Tensor(W)), Tensor(H), Tensor(XS[:0]))
    np.testing.assert_array_equal(last.numpy(), H)
    assert ys.shape == (0, 3, 4) and ys.numpy().shape == (0, 3, 4)


def test_a_long_sequence_needs_no_kernel_of_its_own_length() -> None:
    """Each step runs what the first one runs: twice the steps are twice the kernels, and none is new."""

    def counted(n: int) -> int:
        xs = Tensor(RNG.standard_normal((n, 3, 4)).astype(np.float32)).realize()
        w, h = Tensor(W).realize(), Tensor(H).realize()
        before = GlobalCounters.kernel_count
        last, ys = scan(step(w), h, xs)
        last.realize(ys)
        return GlobalCounters.kernel_count - before

    short, long = counted(32), counted(64)
    assert long - short <= 3 * 32


def test_errors() -> None:
    xs = Tensor(XS)
    grows = lambda c, x: (c.cat(x), x)  # noqa: E731
    with pytest.raises(ValueError, match=r"tensor 0 of the carry has shape \(3, 4\), and f returned \(6, 4\)"):
        scan(grows, Tensor(H), xs)
    with pytest.raises(TypeError, match="tensor 0 of the carry is int64, and f returned float32: have init be float32"):
        scan(lambda c, x: (c + x.sum(), None), 0, xs)
    with pytest.raises(ValueError, match=r"given the carry \(float32\[3, 4\], None\), and returned float32\[3, 4\]"):
        scan(lambda c, x: (c[0], None), (Tensor(H), None), xs)
    with pytest.raises(TypeError, match=r"f must return a pair \(carry, y\), not Tensor"):
        scan(lambda c, x: c, Tensor(H), xs)
    with pytest.raises(ValueError, match=r"are one size, not \[6, 7\]"):
        scan(step(Tensor(W)), Tensor(H), xs, length=6)
    with pytest.raises(ValueError, match="without xs pass length="):
        scan(lambda c, x: (c, c), Tensor(H))
    with pytest.raises(ValueError, match="needs a first dim"):
        scan(lambda c, x: (c, c), Tensor(H), Tensor(1.0))
    with pytest.raises(TypeError, match="a carry and y hold Tensors, numbers and None, not ndarray"):
        scan(lambda c, x: (c, c), H, xs)
    seen: list[int] = []

    def changes(c: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        seen.append(1)
        return c, (x if len(seen) < 3 else x[0])

    with pytest.raises(ValueError, match=r"f gives y float32\[4\] in step 2, and float32\[3, 4\] in the first"):
        scan(changes, Tensor(H), xs)
