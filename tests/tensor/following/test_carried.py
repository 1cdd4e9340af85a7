"""Values that a loop carries from step to step, and loops without an ending: nothing grows with the steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, nn, no_grad
from manygrad.nn import functional as F
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.deferred.endings import MOST_UNREAD
from manygrad.tensor.deferred.trace import THREAD
from manygrad.tensor.environment import FOLLOW
from manygrad.tensor.storage import LIVE
from tests.tensor.following.loops import Counts, Training, array, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")


def grown(step: Callable[[int], object], steps: int = 60, few: int = 3) -> dict[str, int]:
    """By how much things are more after this many steps than after a fifth of them, where it is more than a few."""

    def sizes() -> dict[str, int]:
        trace = THREAD.trace
        held = [*trace.external.tensors, *trace.put_off]
        return {"tensors": len(LIVE), "held": len([x for x in held if x is not None]), "nodes": trace.tree.root.size()}

    before: dict[str, int] = {}
    for i in range(steps):
        if i == steps // 5:
            before = sizes()
        step(i)
    return {k: n - before[k] for k, n in sizes().items() if n > before[k] + few}


def test_a_loop_that_computes_by_a_captured_step_alone() -> None:
    """Its reads are of what is stored, and end nothing."""
    double = TinyJit(lambda x: (x * 2).realize())

    def step(i: int) -> None:
        assert double(Tensor(array(4, seed=i)).reshape(2, 2)).tolist() == (array(4, seed=i) * 2).reshape(2, 2).tolist()

    assert grown(step) == {}


def test_a_sum_of_losses(counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        loop, total, average = Training(nn.ReLU()), 0, Tensor.zeros(())
        for i in range(12):
            loss = loop.step(i)
            total = total + loss.detach()
            average = average * 0.9 + loss.detach() * 0.1
        assert counts.captures == 0 or counts.replays >= 4
        return [total.numpy(), average.numpy()]

    same(run)


@pytest.mark.parametrize("reads", [1, 7])
def test_a_running_value_of_which_another_is_read(counts: Counts, reads: int) -> None:
    state, want = Tensor.zeros(6).realize(), np.zeros(6, np.float32)

    def step(i: int) -> None:
        nonlocal state, want
        x = array(6, seed=i)
        state = (state + Tensor(x)).relu()
        want = np.maximum(want + x, 0)
        if i % reads == reads - 1:
            np.testing.assert_allclose(state.sum().item(), want.sum(), rtol=1e-5)

    assert grown(step, 240, few=2 * MOST_UNREAD) == {}  # (it goes on until as many values were made)
    assert len(THREAD.trace.values) < 2 * MOST_UNREAD
    np.testing.assert_array_equal(state.numpy(), want)
    assert counts.replays >= 10


def test_weights_that_are_new_tensors_in_each_step() -> None:
    """(No replay: each is another leaf. But each step computes its own alone.)"""
    w, want = Tensor.ones(3).realize().requires_grad_(), np.ones(3, np.float32)

    def step(i: int) -> None:
        nonlocal w, want
        x = array(3, seed=i)
        y = (w * Tensor(x)).sum()
        y.backward()
        assert w.grad is not None and y.item() < 1e9
        w = (w - w.grad * 0.5).detach().requires_grad_()
        want = want - x * np.float32(0.5)

    assert grown(step) == {}
    assert len(w.uop.toposort()) < 50
    np.testing.assert_allclose(w.numpy(), want, rtol=1e-5)


def test_a_thread_that_makes_tensors_for_another_one_keeps_none() -> None:
    made: queue.Queue[Tensor] = queue.Queue(2)
    held: list[int] = []

    def make() -> None:
        for i in range(200):
            made.put(Tensor(array(50, seed=i)) * 2)
        held.append(sum(t is not None for t in THREAD.trace.external.tensors))

    thread = threading.Thread(target=make)
    thread.start()
    for i in range(200):
        np.testing.assert_array_equal(made.get(timeout=60).numpy(), array(50, seed=i) * 2)
    thread.join(60)
    assert held and held[0] <= 4


def test_state_that_calls_write_is_seen_where_its_calls_are_made_as_they_come() -> None:
    """What a trace has let go may still be written by a later call of it."""

    def run() -> list[np.ndarray]:
        x, found = Tensor(array(4)).realize(), []
        for i in range(6):
            y = x + Tensor(array(4, seed=i))
            x.assign(y * 0.5)
            found.append(x.sum().numpy())
        return [*found, x.numpy()]

    same(run)


def test_what_is_large_stays_lazy(no_collection: None) -> None:
    count = Tensor.arange(1 << 24)  # 64 MiB, if it were stored
    for i in range(6):
        before = GlobalCounters.mem_used
        more = count + 1
        assert more[i : i + 3].sum().item() == 3 * i + 6
        assert GlobalCounters.mem_used - before < 1 << 24


def test_a_value_with_a_gradient_keeps_it() -> None:
    """It is not stored for a step that reads it: the gradient flows through it."""

    def run() -> list[np.ndarray]:
        w, found = Tensor(array(3)).realize().requires_grad_(), []
        for i in range(5):
            h = w * Tensor(array(3, seed=i))
            found.append(h.sum().numpy())
            (h * h).sum().backward()
            assert w.grad is not None
            found.append(w.grad.numpy())
            w.grad = None
        return found

    same(run)


def test_values_that_a_frame_holds_while_metrics_are_read() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def run() -> list[np.ndarray]:
        hits, found = 0, []
        for i in range(40):
            with no_grad():
                logits = model(Tensor(array(5, 4, seed=i)))
            predicted = logits.argmax(1)
            hits = hits + (predicted == Tensor(np.arange(5) % 3)).sum()
            found += [logits.max().numpy(), logits.numpy()]
        return [*found, hits.numpy()]

    same(run)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_noise_that_a_frame_holds_while_the_loss_is_read_before_backward(steps: int) -> None:
    """It is stored by the read, and so is the note of what was drawn: the masks of a dropout stay."""

    def run() -> list[np.ndarray]:
        loop = Training(nn.Dropout(0.5))
        found = []
        with Tensor.train():
            for i in range(steps):
                x = Tensor(array(5, 4, seed=i))
                noisy = x + x.randn_like() * 0.1
                loss = loop.model(noisy).square().mean()
                found.append(loss.numpy())
                loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return [*found, *loop.state()]

    same(run)


@pytest.mark.parametrize("read", ["loss", "weights", "mean", "view"])
def test_a_mean_of_the_weights_beside(read: str, counts: Counts) -> None:
    """It is written after the step, and what is read then is from before that, or it. Nothing else ends the step."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        means = [p.detach().clone() for p in loop.model.parameters()]
        view = means[0].view(-1) if read == "view" else means[0]
        for i in range(12):
            loss = loop.step(i)
            with no_grad():
                for mean, p in zip(means, loop.model.parameters()):
                    mean.mul_(0.9).add_(p, alpha=0.1)
            told = {"loss": loss, "weights": loop.model[0].weight, "mean": means[1], "view": view[2:4]}[read]
            found.append(told.numpy())
        return [*found, *loop.state(), *(m.numpy() for m in means)]

    same(run)
    assert read != "loss" or (counts.replays >= 6 and counts.flushes <= 3)


def test_writes_whose_memory_nobody_reads() -> None:
    """Something else is read in each step: what is put off does not grow with the steps."""
    x, y = Tensor(np.zeros(4)).realize(), Tensor([1.0]).realize()

    def step(i: int) -> None:
        x.add_(1)
        assert y.item() == 1.0

    assert grown(step, 3000, few=600) == {}
    assert x.tolist() == [3000.0] * 4


def test_a_loss_that_is_read_before_and_after_the_weights_are_written(counts: Counts) -> None:
    """The second read is of what is stored, and the next step reads what was written."""

    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        for i in range(12):
            loss = F.cross_entropy(loop.model(Tensor(array(5, 4, seed=i))), Tensor(np.arange(5) % 3))
            found.append(loss.numpy())
            loss.backward()
            with no_grad():
                for p in loop.model.parameters():
                    p -= p.grad * (0.1 / (i + 1))
                    p.grad = None
            found.append(loss.numpy())
        return [*found, *loop.state()]

    same(run)
    assert counts.replays >= 5
