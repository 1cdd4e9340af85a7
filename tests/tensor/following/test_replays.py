"""What of a plain loop is replayed, what that costs, and what it holds."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from manygrad import Context, Tensor, nn, no_grad
from manygrad.autograd import checkpoint
from manygrad.nn import functional as F
from manygrad.runtime.storage import STORAGE
from manygrad.tensor.deferred import tree
from manygrad.tensor.deferred.tensors import DeferredTensor
from manygrad.tensor.deferred.trace import PUT_OFF, THREAD
from manygrad.tensor.environment import FOLLOW
from tests.tensor.following.loops import LAYERS, Counts, Training, array, losses, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")


@pytest.mark.parametrize("name", LAYERS)
def test_a_training_loop_is_replayed_from_its_fourth_step_on(name: str, counts: Counts) -> None:
    loop = Training(*LAYERS[name]())
    for i in range(4):
        loop.step(i)
    before = counts.replays, counts.flushes
    for i in range(6):
        loop.step(i).item()
    assert (counts.replays - before[0], counts.flushes - before[1]) == (6, 0)
    same(lambda: losses(lambda: Training(*LAYERS[name]())))


def test_what_a_followed_call_costs() -> None:
    """Python functions that run for one call of a method with one argument: it is what a step of many of them takes."""

    def relus() -> Tensor:
        t = x
        for _ in range(20):
            t = t.relu()
        return t

    x, calls = Tensor(array(4)), 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    for _ in range(4):
        relus().numpy()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        t = relus()
    finally:
        sys.setprofile(before)
    assert isinstance(t, DeferredTensor)
    assert calls <= 20 * 7 + 20


def test_results_that_are_kept_are_the_callers(counts: Counts) -> None:
    loop = Training(nn.ReLU())
    kept = [loop.step(i) for i in range(10)]
    with Context(FOLLOW=0):
        other = Training(nn.ReLU())
        want = [other.step(i).item() for i in range(10)]
    assert [t.item() for t in kept] == want
    assert counts.replays >= 5


def test_evaluation_between_steps(counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        loop, found = Training(nn.BatchNorm1d(8)), []
        for _ in range(5):
            loop.model.train()
            for i in range(4):
                loop.step(i)
            loop.model.eval()
            with no_grad():
                for i in range(3):
                    out = loop.model(Tensor(array(7, 4, seed=i)))
                    right = (out.argmax(1) == Tensor(np.arange(7) % 3)).float().mean()
                    found += [np.array(right.item()), out.numpy()]
        return [*found, *loop.state()]

    same(run)
    assert counts.replays >= 15


def test_a_deferred_tensor_answers_without_being_made(counts: Counts) -> None:
    x = Tensor(array(4, 6)).realize()
    make = lambda: x.reshape(2, 12).relu()  # noqa: E731
    for _ in range(3):
        make().numpy()
    y = make()
    assert type(y) is DeferredTensor and isinstance(y, Tensor)
    before = counts.flushes
    assert (y.shape, y.ndim, y.dtype.name, y.device, y.numel(), len(y)) == ((2, 12), 2, "float32", x.device, 24, 2)
    assert counts.flushes == before
    assert y.uop.op is not None and type(y) is Tensor and counts.flushes == before + 1


def test_nothing_of_a_model_stays_after_it() -> None:
    loop = Training(nn.ReLU())
    for i in range(6):
        loop.step(i).item()
    weight, memory = weakref.ref(loop.model[0].weight), weakref.ref(STORAGE[loop.optimizer.flats[0].flat.uop])
    del loop
    gc.collect()
    assert weight() is None and memory() is None
    THREAD.trace.flush("a test")
    assert not PUT_OFF


def test_captures_hold_no_more_memory_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many shapes those that were used last stay, however large one is."""
    x = Tensor(array(1000, 50)).realize()
    monkeypatch.setattr(tree, "MOST_BYTES", 200_000)
    for rows in (200, 400, 600, 800, 1000):
        for _ in range(3):
            (x[:rows] @ x[:50] + 1).softmax(0).sum(0).numpy()
        mine = THREAD.trace.tree
        assert mine.nbytes() <= 200_000 or len(mine.captures) == 1


def test_a_tensor_that_is_unpacked_is_followed(counts: Counts) -> None:
    """Its end is known by its length: no index is tried that is out of range."""

    def run() -> list[np.ndarray]:
        found = []
        for i in range(8):
            q, k = Tensor(array(2, 3, seed=i)) * 2
            found.append((q + sum(k)).numpy())
        return found

    same(run)
    assert counts.replays == 6 and counts.captures == 1


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_checkpoints_and_hooks_of_modules_are_followed(drop: bool, read: bool, counts: Counts) -> None:
    """Their Python runs in each step, and the calls that it makes are put off."""

    def run(counted: Counts | None = None) -> list[np.ndarray]:
        Tensor.manual_seed(1)
        block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.3 if drop else 0.0))
        loop, seen, found = Training(nn.Tanh()), [0], []
        loop.optimizer.add_param_group({"params": list(block.parameters())})

        def double(_: Any, __: Any, out: Tensor) -> Tensor:
            seen[0] += 1
            return out * 2

        block[0].register_forward_hook(double)
        for i in range(14):
            if counted is not None and i == 8:
                counted.replays = counted.captures = counted.flushes = 0
            x, y = Tensor(array(5, 4, seed=i)), Tensor(np.arange(5) % 3)
            loop.optimizer.zero_grad()
            h = loop.model[1](loop.model[0](x))
            h = h + checkpoint(block, h) + checkpoint(block, h.relu())
            loss = F.cross_entropy(loop.model[2](h), y)
            if read:
                found.append(loss.numpy())
            loss.backward()
            loop.optimizer.step()
            found.append(loss.numpy())
        assert seen[0] == 28
        if counted is not None:
            assert counted.replays >= 6 and (counted.captures, counted.flushes) == (0, 0)
        return [*found, *loop.state(), *(p.numpy() for p in block.parameters())]

    same(run)
    run(counts)


def test_a_step_that_is_given_the_loss_as_a_closure(counts: Counts) -> None:
    def run() -> list[np.ndarray]:
        loop, found = Training(nn.ReLU()), []
        for i in range(10):

            def closure(i: int = i) -> Tensor:
                loop.optimizer.zero_grad()
                loss = F.cross_entropy(loop.model(Tensor(array(5, 4, seed=i))), Tensor(np.arange(5) % 3))
                loss.backward()
                return loss

            found.append(loop.optimizer.step(closure).numpy())
        return [*found, *loop.state()]

    same(run)
    assert counts.replays >= 5
