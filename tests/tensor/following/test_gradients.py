"""Gradients of a loop that is replayed: added to, held, set by hand, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, nn, no_grad
from manygrad.nn import functional as F
from manygrad.runtime.jit.results import ResultMemory
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import Counts, Training, array, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")


def test_gradients_that_are_added_to_while_they_are_put_off() -> None:
    """After a read the next forward pass is another trace, whose gradients are added to those of the first; and who
    holds a gradient holds the one that the step takes."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.Tanh()), []
        first = loop.model[0].weight
        for i in range(12):
            x, y = Tensor(array(5, 4, seed=i)), Tensor(array(5, 3))
            loop.optimizer.zero_grad()
            loss = F.mse_loss(loop.model(x), y)
            found.append(np.array(loss.item()))
            loss.backward()
            held = first.grad
            assert held is not None
            if i % 3 == 2:
                F.mse_loss(loop.model(x), y * 2).backward()
                found.append(held.numpy())
            if i % 4 == 3:
                held *= 0.5
            assert first.grad is held
            loop.optimizer.step()
        return [*found, *loop.state()]

    same(run)


def test_gradients_of_a_replayed_loop_lie_where_the_last_ones_lay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody holds them after `zero_grad()`, though they are views of one memory: no step makes new memory for them."""
    loop, left = Training(nn.ReLU()), []
    leave = ResultMemory.leave
    monkeypatch.setattr(ResultMemory, "leave", lambda memory: [left.append(memory), leave(memory)])
    for i in range(12):
        loop.step(i).item()
        if i == 5:
            left.clear()
    assert not left


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gradient_of_ones_own(read: bool, drop: bool, by_hand: bool) -> None:
    """What is set after backward() stays, whether what backward() made was dropped, or its loss read, before."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        first = loop.model[0].weight
        for i in range(8):
            loop.optimizer.zero_grad()
            loss = F.mse_loss(loop.model(Tensor(array(5, 4, seed=i))), Tensor(array(5, 3)))
            loss.backward()
            if read:
                found.append(loss.numpy())
            if drop:
                first.grad = None
            first.grad = Tensor(array(8, 4, seed=i + 20))
            if by_hand:
                with no_grad():
                    for p in loop.model.parameters():
                        p -= p.grad * 0.1
            else:
                loop.optimizer.step()
            found += [loss.numpy(), first.grad.numpy()]
        return [*found, *loop.state()]

    same(run)


@pytest.mark.parametrize("how", ["rand", "full", "set"])
def test_tensors_to_train_that_are_made_in_each_step(how: str) -> None:
    def leaf() -> Tensor:
        if how == "set":
            return Tensor.rand(3).requires_grad_()
        return Tensor.rand(3, requires_grad=True) if how == "rand" else Tensor.full((3,), 2.0, requires_grad=True)

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(5)
        found = []
        for i in range(6):
            noise = Tensor.rand(3)
            w = leaf()
            y = (w * w * (noise + Tensor(array(3, seed=i)))).sum()
            y.backward()
            assert w.requires_grad and not y.detach().requires_grad and w.grad is not None
            found += [w.grad.numpy(), w.numpy(), y.numpy(), Tensor.rand(2).numpy()]
        return found

    same(run)


@pytest.mark.parametrize("how", ["rand", "full", "set"])
def test_a_step_of_tensors_made_by_hand_is_replayed(counts: Counts, how: str) -> None:
    """They are values of no step, though this thread has made them, and nothing was read since."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(5)
        if how == "set":
            w = Tensor.rand(3).requires_grad_()
        else:
            w = Tensor.rand(3, requires_grad=True) if how == "rand" else Tensor.full((3,), 2.0, requires_grad=True)
        found = []
        for i in range(9):
            y = (w * Tensor(array(3, seed=i))).square().sum()
            y.backward()
            with no_grad():
                w -= w.grad * 0.1
            w.grad = None
            found.append(y.numpy())
        return [*found, w.numpy()]

    same(run)
    assert counts.replays >= 5
