"""What happens between two steps, or in the middle of one, is seen: loaded weights, writes, threads, errors."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, TinyJit, nn, no_grad
from manygrad.errors import LostValue
from manygrad.nn import functional as F
from manygrad.tensor.deferred.calls import Making
from manygrad.tensor.deferred.trace import THREAD
from manygrad.tensor.environment import FOLLOW
from manygrad.tensor.uop import Ops
from tests.tensor.following.loops import Training, array, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")


def test_weights_that_are_loaded_replaced_or_written_are_seen() -> None:
    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        saved = {k: t.detach().clone().realize() for k, t in loop.model.state_dict().items()}
        for i in range(24):
            if i == 6:
                loop.model.load_state_dict(saved)
            if i == 10:
                loop.model[0].weight.detach().assign(Tensor(array(8, 4, seed=9)))
            if i == 14:
                loop.model[2].weight.data = Tensor(array(3, 8, seed=8))
            if i == 17:
                loop.model[2].weight.requires_grad_(False)
            if i == 20:
                loop.optimizer.param_groups[0]["lr"] = 0.5
            if i == 22:
                loop.optimizer.param_groups[0]["betas"] = (0.5, 0.5)
            found.append(np.array(loop.step(i).item()))
        return [*found, *loop.state()]

    same(run)


def test_who_writes_to_what_is_read_has_it_read_first() -> None:
    def run() -> list[np.ndarray]:
        found = []
        for i in range(6):
            w = Tensor(array(3, seed=i)).realize()
            y = w * 2
            w.add_(1)
            z = w * 2
            w[0] = 7.0
            found += [y.numpy(), z.numpy(), w.numpy()]
        return found

    same(run)


def test_another_thread_reads_what_is_put_off() -> None:
    def run() -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for i in range(5):
            x = Tensor(array(4, seed=i))
            y = (x * 2 + Tensor.rand(4)).relu()
            t = threading.Thread(target=lambda y=y: found.append((y + 1).numpy()))
            t.start()
            t.join(60)
            found.append(y.numpy())
        return found

    Tensor.manual_seed(1)
    with Context(FOLLOW=0):
        want = run()
    Tensor.manual_seed(1)
    for a, b in zip(run(), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_that_fails_and_goes_on() -> None:
    def run() -> list[np.ndarray]:
        loop = Training(nn.ReLU())
        found = []
        for i in range(12):
            loss = loop.step(i)
            if i % 3 == 2:
                with pytest.raises((ValueError, RuntimeError)):
                    F.mse_loss(loop.model(Tensor(array(5, 4))), Tensor(array(2, 7)))
                with pytest.raises(ZeroDivisionError):
                    y = loop.model(Tensor(array(5, 4))).sum()
                    y * (1 / 0)
            found.append(loss.numpy())
        return [*found, *loop.state()]

    same(run)


def test_a_tiny_jit_and_a_plain_loop_take_turns() -> None:
    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        step = TinyJit(lambda x: loop.model(x).sum())
        for i in range(10):
            found.append(loop.step(i).numpy())
            found.append(step(Tensor(array(5, 4, seed=i)) * 2).numpy())
        return found

    same(run)


def test_a_changed_external_tensor_that_was_not_noticed_is_an_error() -> None:
    w = Tensor(array(3)).realize()
    for i in range(4):
        y = w * 3
        if i < 3:
            y.numpy()
    w.uop = Tensor(array(3, seed=1)).realize().uop  # as nobody may
    with pytest.raises(RuntimeError, match="FOLLOW=0"):
        y.numpy()


def test_errors_name_the_line_of_this_call() -> None:
    """Calls that are alike on two lines are two, in a replay, too."""
    t, first = Tensor(array(6)).realize(), test_errors_name_the_line_of_this_call.__code__.co_firstlineno
    uses = [
        lambda i: t[i] * 2,
        lambda i: t[i] * 2,
    ]
    for k in range(8):
        line, bad = first + 4 + k % 2, k >= 6
        index = Tensor(np.array([0, 6 if bad else 5]))
        if not bad:
            uses[k % 2](index).numpy()
            continue
        with pytest.raises(IndexError, match=rf"index 6 .*test_changes.py:{line}\)"):
            uses[k % 2](index).numpy()


def test_an_alias_of_what_a_step_writes_shows_what_was_written() -> None:
    """The same calls on tensors that share memory, and on such that do not."""

    def run() -> list[np.ndarray]:
        w, found = Tensor(array(4)).realize(), []
        others = [Tensor(array(4, seed=i)).realize() for i in range(12)]
        for i, other in enumerate(others):
            x = w.detach() if i in (5, 9) else other.detach()
            x = x if i in (5, 9) else Tensor(x.numpy())
            with no_grad():
                w.add_(1)
            found += [(x * 2).numpy(), w.numpy()]
        return found

    same(run)


def test_another_optimiser_of_the_same_parameters_has_its_own_state() -> None:
    """Also one that stands where a dead one stood."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        for _ in range(4):
            loop.optimizer = nn.optim.Adam(loop.model.parameters(), lr=0.01)
            gc.collect()
            found += [loop.step(i).numpy() for i in range(5)]
        return [*found, *loop.state()]

    same(run)


@pytest.mark.parametrize("read", [True, False])
def test_an_error_of_calls_that_are_put_off_is_told_as_it_is(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made once: what is lost with them makes no calls of this trace, which would make them again."""
    tried = []

    def fails(making: Making, calls: Any, wanted: Any = ()) -> None:
        tried.append(calls)
        raise ArithmeticError("planted")

    for fail in (False, False, True):
        y = Tensor(array(3)) * 2
        z = y + 1
        if not fail:
            z.sum().item()
            continue
        monkeypatch.setattr(Making, "make", fails)
        with pytest.raises(ArithmeticError, match="planted"):
            _ = z.sum().item() if read else y.uop
        with pytest.raises(LostValue, match=r"shape \(3,\) has no value: its computation failed with .*planted"):
            z.tolist()
    assert len(tried) == 1


def test_a_weight_that_another_thread_computes_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is evaluated by threads before anybody has computed its weights."""
    found: list[np.ndarray] = []
    for i in range(3):
        w = Tensor.rand(3).requires_grad_() if i else Tensor(array(3)).realize().requires_grad_()
        y = (w.detach() * Tensor(array(3, seed=i))).sum()
        trace = THREAD.trace
        if i == 2:  # (its realize has looked for calls that are put off before there were any)
            monkeypatch.setattr(trace, "is_busy", True)
            thread = threading.Thread(target=w.realize)
            thread.start()
            thread.join(60)
            monkeypatch.setattr(trace, "is_busy", False)
            assert w.uop.op is Ops.BUFFER
        found.append(y.numpy())
        np.testing.assert_allclose(found[-1], (w.numpy() * array(3, seed=i)).sum(), rtol=1e-6)


def test_whether_a_value_has_a_gradient_after_parameters_were_written() -> None:
    """What was computed from them before does not depend on them any more, whatever earlier steps said of it."""

    def run() -> list[np.ndarray]:
        Tensor.manual_seed(0)
        first, last = nn.Linear(3, 4), nn.Linear(4, 1)
        optimizer = nn.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
        found = []
        for i in range(8):
            optimizer.zero_grad()
            hidden = first(Tensor(array(4, 3, seed=i)))
            loss = last(hidden).square().mean()
            if i >= 6:
                with no_grad():
                    first.bias.detach().assign(first.bias.detach() + 0.125)
            found.append(np.array(hidden.requires_grad))
            if hidden.requires_grad:
                loss.backward()
                optimizer.step()
        return found

    same(run)
