"""`@function` and memory: arguments and values from outside that are views, and what is written through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, autograd, function, no_grad

OVERLAPPING: dict[
    str, Callable[[Any, Tensor, Tensor, Tensor], tuple[Any, tuple[Tensor, ...]]]
] = {  # (decorator, w, w[0], w.detach()) -> function, arguments
    "writes the whole, reads a part from outside": lambda wrap, w, row, d: (
        wrap(lambda w: (w.assign(w + 1), row * 2)[1]),
        (w,),
    ),
    "writes a part, reads the whole from outside": lambda wrap, w, row, d: (
        wrap(lambda r: (r.assign(r + 1), w * 2)[1]),
        (row,),
    ),
    "writes the whole from outside, reads a part": lambda wrap, w, row, d: (
        wrap(lambda r: (w.assign(w + 1), r * 2)[1]),
        (row,),
    ),
    "writes a part from outside, reads the whole": lambda wrap, w, row, d: (
        wrap(lambda x: (row.assign(row + 1), x * 2)[1]),
        (w,),
    ),
    "writes both": lambda wrap, w, row, d: (wrap(lambda w: (row.fill_(5), w.assign(w + 1), row * 2)[2]), (w,)),
    "both are arguments": lambda wrap, w, row, d: (wrap(lambda w, r: (w.assign(w + 1), r * 2)[1]), (w, row)),
    "both are arguments, the part is written": lambda wrap, w, row, d: (
        wrap(lambda w, r: (r.assign(r + 1), w * 2)[1]),
        (w, row),
    ),
    "detached": lambda wrap, w, row, d: (wrap(lambda w: (w.assign(w + 1), d * 2)[1]), (w,)),
    "nothing is written": lambda wrap, w, row, d: (wrap(lambda w: w + row), (w,)),
}


@pytest.mark.parametrize("realized", [True, False])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_arguments_that_are_views_of_what_is_written(name: str, realized: bool) -> None:
    """The same as without `@function`, also after calls with tensors that do not overlap."""
    seen = []
    for wrap in (lambda f: f, function):
        for apart_first in (False, True):
            w = Tensor(np.arange(4.0).reshape(2, 2)) + 0
            w = w.realize() if realized else w
            row = w[0]
            f, args = OVERLAPPING[name](wrap, w, row, w.detach())
            others = tuple(Tensor(a.numpy() * 3).realize() for a in args)
            got = [f(*others).tolist()] if apart_first else []
            got += [f(*args).tolist() for _ in range(2)]
            got += [f(*others).tolist(), f(*args).tolist(), w.tolist(), row.tolist(), *(o.tolist() for o in others)]
            seen.append(got)
    assert seen[:2] == seen[2:]


@pytest.mark.parametrize(
    "wrap",
    [function, lambda f: lambda *args: autograd.checkpoint(f, *args), lambda f: function(function(f))],
    ids=["function", "checkpoint", "nested"],
)
def test_a_gradient_that_nobody_asks_for_may_be_unknown(wrap: Any) -> None:
    """igamma has none to its first argument: an error only where that one is trained."""
    a, x = Tensor([0.5, 1.5]).realize(), Tensor([1.0, 2.0], requires_grad=True)
    f = wrap(lambda a, x: (a * 1.0).igamma(x * 1.0))
    f(a, x).sum().backward()
    want = Tensor([0.5, 1.5]).igamma(y := Tensor([1.0, 2.0])).sum().gradient(y)[0].numpy()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), want, rtol=1e-6)
    trained = Tensor([0.5, 1.5], requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"igamma\(a, x\) has no gradient to a \(shape .*\.py:\d+\); detach"):
        f(trained, x).sum().backward()


def test_a_view_from_outside_that_is_written_between_calls() -> None:
    """Its base is no tensor any more, or an argument of the function around: what waits to be written there is read."""
    whole = Tensor(np.zeros(4)).realize()
    row = whole[1:2]
    del whole
    x = Tensor(np.ones(1)).realize()
    f = function(lambda x: x + row)
    assert f(x).tolist() == [1]
    row.add_(1)
    seen = f(x)
    row.add_(1)
    assert (seen.tolist(), f(x).tolist()) == ([2], [3])

    state = Tensor(np.zeros((2, 2))).realize()
    second = state[1:2]
    inner = function(lambda p, q: (second + p).contiguous())
    outer = function(lambda p, q: (state.assign(state * 0.5 + q + 1), inner(p, q))[1])
    assert [outer(state, x).tolist() for _ in range(2)] == [[[4, 4]] * 2, [[6, 6]] * 2]


@pytest.mark.parametrize("writer", [None, "inner", "outer"])
def test_a_view_from_outside_of_what_an_outer_function_was_given(writer: str | None) -> None:
    """Inside the outer function its argument is apart from views of it;
    a trace made there is of no use where they share memory."""
    state, w = Tensor(np.arange(4.0).reshape(2, 2)).realize(), Tensor(np.ones((2, 2))).realize()
    w.requires_grad = True
    row, detached = state[1:2], state.detach()

    def halve(name: str, q: Tensor) -> None:
        if writer == name:
            state.assign(state * 0.5 + q.detach())

    @function
    def inner(p: Tensor, q: Tensor) -> Tensor:
        halve("inner", q)
        return row + q * 0.5

    @function
    def outer(p: Tensor, q: Tensor) -> Tensor:
        halve("outer", q)
        return inner(q if writer == "inner" else detached, q)

    for _ in range(2):
        state.assign(Tensor(np.arange(4.0).reshape(2, 2)))
        out = outer(state, w * 2)
        assert out.tolist() == ([[4, 4.5]] * 2 if writer else [[3, 4]] * 2)
        assert state.tolist() == ([[2, 2.5], [3, 3.5]] if writer else [[0, 1], [2, 3]])


def test_a_constant_that_is_assigned_an_equal_one() -> None:
    """Two tensors of zeros are one node: that one was copied to the other shows once they differ."""
    a, b = Tensor.zeros(2), Tensor.zeros(2)

    @function
    def step(x: Tensor) -> Tensor:
        a.assign(a + 5)
        a.copy_(b)
        b.fill_(1)
        return x + 1

    seen = []
    for n in range(3):
        assert step(Tensor([float(n)])).tolist() == [n + 1]
        seen.append((a.tolist(), b.tolist()))
    assert seen == [([0, 0], [1, 1]), ([1, 1], [1, 1]), ([1, 1], [1, 1])]


@pytest.mark.parametrize("axis", [None, 0])
def test_what_is_made_and_written_inside_is_no_state(axis: int | None) -> None:
    """Noting an assignment keeps nothing alive: a temporary dies with the trace that made it, and one trace serves."""
    w = Tensor(np.ones((4, 6), np.float32))
    w = w if axis is None else w.shard(("CPU:0", "CPU:1"), axis)
    w.fill_(0)
    traced = 0

    @function
    def step(x: Tensor) -> Tensor:
        nonlocal traced
        traced += 1
        copy = w.clone()
        copy.fill_(2)
        copy[0] = 5
        return x + copy.sum().to(x.device)

    with no_grad():
        for n in range(4):
            assert step(Tensor([float(n)])).tolist() == [n + 66.0]
    assert traced == 1 and w.numpy().tolist() == [[0.0] * 6] * 4


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("realized", [False, True])
def test_views_from_outside_whose_whole_is_gone(axis: int | None, realized: bool) -> None:
    """They share storage that no tensor has as its value: what is written to one shows in the other,
    inside the function, too."""
    whole = Tensor(np.arange(24, dtype=np.float32).reshape(4, 6))
    whole = whole if axis is None else whole.shard(("CPU:0", "CPU:1"), axis)
    bits = (whole.realize() if realized else whole).view("int32")
    del whole
    row = bits[0]

    @function
    def clear(x: Tensor) -> Tensor:
        with no_grad():
            bits.fill_(0)
            row[0].fill_(7)
        return x + 1

    for n in range(3):
        assert clear(Tensor([float(n)])).tolist() == [n + 1.0]
    assert bits.numpy().tolist() == [[7, 0, 0, 0, 0, 0], *[[0] * 6] * 3] and row.numpy().tolist() == [7, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("realized", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_view_that_is_updated_in_place_and_does_not_lie_in_one_piece(
    axis: int | None, realized: bool, given: bool
) -> None:
    """Its copy is the argument, its memory what is written: the same node is both. (The copy was written, once.)"""
    for cut in ((slice(None), slice(0, 1)), (slice(1, 3), slice(2, 5)), (slice(None, None, 2), 1), (slice(1, None),)):
        want = np.arange(24, dtype=np.float32).reshape(4, 6)
        whole = Tensor(want.copy())
        whole = whole if axis is None else whole.shard(("CPU:0", "CPU:1"), axis)
        whole = whole.realize() if realized else whole
        view = whole[cut]
        beside = view[:1]

        @function
        def outside(x: Tensor, view: Tensor = view) -> Tensor:
            view.assign(view * 2 + 1)
            return x + 1

        @function
        def update(x: Tensor, view: Tensor) -> Tensor:
            view.assign(view * 2 + 1)
            return x + 1

        for n in range(4):
            x = Tensor([float(n)]).realize()
            y = update(x, view) if given else outside(x)
            want[cut] = want[cut] * 2 + 1
            assert y.tolist() == [n + 1.0]
            np.testing.assert_array_equal(view.numpy(), want[cut])
            np.testing.assert_array_equal(beside.numpy(), want[cut][:1])
            np.testing.assert_array_equal(whole.numpy(), want)
