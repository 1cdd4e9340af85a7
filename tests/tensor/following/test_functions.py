"""Loops with functions that have a backward of their own: they are replayed, and what backward reads is followed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.autograd import Function
from manygrad.nn import functional as F
from manygrad.tensor.deferred.counts import MANY
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import Counts, Training, array, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
STEPS = 12
SLOPE = 0.5
SHIFT = Tensor(np.full(8, 0.25, np.float32))


class Straight(Function):
    """The sign, through which gradients go as they come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by = by
        return x * x * by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x * (2 * ctx.by * SLOPE), None


class Pair(Function):
    """Two outputs, one of which has no gradient, and one that is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        e, where = x.exp(), x > 0
        ctx.save_for_backward(e, where)
        ctx.mark_non_differentiable(where)
        return e, x * 3, where

    @staticmethod
    def backward(ctx: Any, of_exp: Tensor, of_triple: Tensor, _: Tensor) -> Tensor:
        e, where = ctx.saved_tensors
        return of_exp * e + of_triple * 3 * where


class Shifted(Function):
    """It reads a tensor that is none of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + SHIFT


def pair(x: Tensor, i: int) -> Tensor:
    e, triple, where = Pair.apply(x)
    return (e + triple).tanh() * where


def slope(x: Tensor, i: int) -> Tensor:
    global SLOPE
    SLOPE = 0.5 if i < 8 else 0.25
    return Scaled.apply(x, 2.0).tanh()


CALLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "straight": lambda x, i: Straight.apply(x),
    "saved": lambda x, i: Scaled.apply(x, 2.0).tanh(),
    "an attribute that changes": lambda x, i: Scaled.apply(x, 1.0 + i // 6).tanh(),
    "several outputs": pair,
    "a global that changes": slope,
    "a tensor from outside": lambda x, i: Shifted.apply(x).tanh(),
    "twice": lambda x, i: Scaled.apply(Scaled.apply(x, 2.0).tanh(), 3.0).tanh(),
}
AS_IT_COMES = {"a tensor from outside"}


def run(name: str) -> list[np.ndarray]:
    loop = Training(nn.ReLU())
    first, last = loop.model[0], loop.model[2]
    found = []
    for i in range(STEPS):
        x, y = Tensor(array(5, 4, seed=i)), Tensor(np.arange(5) % 3)
        loop.optimizer.zero_grad()
        loss = F.cross_entropy(last(CALLS[name](first(x), i)), y)
        loss.backward()
        loop.optimizer.step()
        found.append(np.array(loss.item()))
    return [*found, *loop.state()]


@pytest.mark.parametrize("name", CALLS)
def test_a_loop_with_a_function(name: str, counts: Counts) -> None:
    same(lambda: run(name))
    if name in AS_IT_COMES:
        assert counts.replays == 0
    else:
        assert counts.replays >= 7  # (a change of a number is recorded anew)


def test_a_second_derivative_sees_what_was_saved() -> None:
    def both() -> list[np.ndarray]:
        found = []
        for i in range(6):
            x = Tensor(array(4, seed=i), requires_grad=True)
            (g,) = Scaled.apply(x, 2.0).sum().gradient(x)
            (second,) = g.square().sum().gradient(x)
            found += [g.numpy(), second.numpy()]
        return found

    same(both)


def test_what_backward_sets_is_there_the_next_time() -> None:
    class Counting(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.calls = 0
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ctx.calls += 1
            return grad * ctx.calls

    x = Tensor(array(3), requires_grad=True)
    y = Counting.apply(x).sum()
    for n in (1, 2):
        y.backward()
        assert x.grad is not None and np.all(x.grad.numpy() == n * (n + 1) / 2)


def test_a_training_that_is_never_replayed_is_told_of_once() -> None:
    loop = Training(nn.ReLU())
    loop.model[0].register_forward_hook(lambda m, args, out: out.register_hook(lambda g: g * 0.5) and None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(MANY - 1):
            loop.step(i)
        assert not told
        for i in range(5):
            loop.step(i)
    (one,) = told
    assert "a hook is registered (test_functions.py:" in str(one.message) and one.filename.endswith("loops.py")


def test_of_a_training_that_is_replayed_nothing_is_told() -> None:
    loop = Training(nn.ReLU())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(MANY + 16):
            loop.step(i, rows=5 + (i == MANY))
