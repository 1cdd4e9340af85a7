"""A replay with the memory of the replay before it, which checks and passes nothing anew."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from threading import Thread
from typing import Any

import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, TinyJit
from manygrad.native.replay import DONE
from manygrad.runtime.jit import captured as captures
from manygrad.tensor.environment import Context


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, (3, 5)).astype(np.float32)


def stored(array: np.ndarray) -> Tensor:
    return Tensor(array).contiguous().realize()


def test_the_same_tensors_are_passed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = TinyJit(lambda x, y: x * 2 + y)
    a, b, c = (stored(values(i)) for i in range(3))
    for _ in range(3):
        step(a, b)
    passed: list[Any] = []
    monkeypatch.setattr(captures.Captured, "_pass", lambda self, i, t: passed.append(t))
    for _ in range(4):
        step(a, b)
    assert not passed
    step.again = None  # (made by Python: native code reads other memory where that lies)
    step(a, c)
    assert [id(t) for t in passed] == [id(a), id(c)]


def test_what_is_written_to_them_between_calls_is_seen() -> None:
    step = TinyJit(lambda x: x * 2)
    a = stored(values(0))
    for i in range(6):
        a.assign(Tensor(values(i)))
        if i % 2:
            a.realize()
        assert np.array_equal(step(a).numpy(), values(i) * 2)


def test_a_replay_that_fails_leaves_nothing_to_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read other memory before it failed."""
    step = TinyJit(lambda x: x + 1)
    a, b = stored(values(0)), stored(values(1))
    for _ in range(4):
        step(a)

    def fail(items: Any, vars: Any) -> None:
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as m:
        m.setattr(captures, "run_items", fail)
        step.again = None  # (which is made by Python)
        with pytest.raises(RuntimeError, match="a kernel failed"):
            step(b)
    assert np.array_equal(step(a).numpy(), values(0) + 1)


def test_memory_that_is_freed_is_not_taken_for_what_lies_there_later() -> None:
    step = TinyJit(lambda x: x - 1)
    for i in range(12):
        a = stored(values(i))
        assert np.array_equal(step(a).numpy(), values(i) - 1)
        del a
        gc.collect()


def native(step: Any, *args: Tensor) -> bool:
    """Whether native code alone makes this call; it is made."""
    again = step.again
    return again is not None and again.replay.call(*args) == DONE


def prepared(step: Any, *args: Tensor) -> Any:
    for _ in range(5):
        step(*args)
    return step


def test_native_code_makes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    step, a = TinyJit(lambda x: x * 2), stored(values(0))
    prepared(step, a)
    for _ in range(50):  # (it holds for a tenth of a second at most, which may just have ended)
        if made := native(step, a):
            break
        step(a)
    assert made
    GlobalCounters.reset()
    taken = GlobalCounters.steps
    with monkeypatch.context() as m:
        m.setattr(captures, "run_items", None)
        if step.again.replay.holds():
            assert np.array_equal(step(a).numpy(), values(0) * 2)
            assert (GlobalCounters.kernel_count, GlobalCounters.steps - taken) == (1, 1)
            assert GlobalCounters.global_ops == 15 and GlobalCounters.global_mem == 2 * 15 * 4


OTHERWISE = ["other", "none", "two", "number", "array", "view", "made", "pending", "context", "time"]


@pytest.mark.parametrize("what", OTHERWISE)
def test_native_code_makes_no_other_call(what: str) -> None:
    step, a, b = TinyJit(lambda x: x * 2), stored(values(0)), stored(values(1))
    out = prepared(step, a)(a)
    if what == "made":
        kept = out + 1  # noqa: F841  (lazy: it must keep its value)
        assert not native(step, a)
    elif what == "pending":
        b.assign(a + 1)
        assert not native(step, a)
    elif what == "context":
        with Context(DEBUG=0):
            assert not native(step, a)
    elif what == "time":
        time.sleep(0.11)
        assert not native(step, a) and not step.again.replay.holds()
    else:
        args = {"other": (b,), "none": (), "two": (a, a), "number": (3,), "array": (values(0),), "view": (a[1:],)}
        assert not native(step, *args[what])  # type: ignore[arg-type]


def test_every_thread_has_its_turn() -> None:
    """Each uses memory of its own thread; a thread that has ended leaves nothing that is used."""
    step, a = TinyJit(lambda x: x @ x.T), stored(values(0))
    want = values(0) @ values(0).T
    found: list[bool] = []

    def run() -> None:
        for _ in range(300):
            found.append(np.array_equal(step(a).numpy(), want))

    prepared(step, a)
    for _ in range(6):
        threads = [Thread(target=run) for _ in range(2)]
        for t in threads:
            t.start()
        run()
        for t in threads:
            t.join(60)
    assert len(found) == 6 * 3 * 300 and all(found)


FORK = """
import os
import numpy as np
from manygrad import Tensor, TinyJit
step = TinyJit(lambda x: (x * 2).sum())
a = Tensor(np.ones((512, 512), np.float32)).contiguous().realize()
for _ in range(5):
    step(a)
child = os.fork()
right = all(step(a).item() == 2 * 512 * 512 for _ in range(50))
if child == 0:
    os._exit(0 if right else 1)
assert right and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_replays_alone() -> None:
    """(In a process of its own: where OPENCL is open, its driver's threads are not in the child.)"""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_call_leaves_no_references() -> None:
    step, a = TinyJit(lambda x: x + 1), stored(values(0))
    prepared(step, a)
    gc.collect()  # (what other tests left refers to None, too)
    counts = [sys.getrefcount(x) for x in (a, a.uop, step.captured.results.slots[0].now, None)]
    for _ in range(2000):
        step(a)
    gc.collect()
    after = [sys.getrefcount(x) for x in (a, a.uop, step.captured.results.slots[0].now, None)]
    assert all(abs(y - x) < 50 for x, y in zip(counts, after))


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_give_what_numpy_gives(seed: int) -> None:
    """Of two captures over the same tensors: other arguments, results passed back in, results read late, writes."""
    rng = random.Random(seed)
    state = stored(values(99))
    kept = values(99)

    @TinyJit
    def mix(x: Tensor, y: Tensor) -> Tensor:
        return x * 3 - y

    @TinyJit
    def count(x: Tensor) -> Tensor:
        state.assign(state + x)
        return state * 2

    arrays = [values(i) for i in range(4)]
    tensors = [stored(x) for x in arrays]
    last: tuple[Tensor, np.ndarray] | None = None  # a result and what it holds
    late: list[tuple[Tensor, np.ndarray]] = []  # lazy values, read at the end
    i, j = 0, 1
    for _ in range(60):
        what = rng.random()
        if what < 0.2:
            i, j = rng.randrange(4), rng.randrange(4)
            while i == j:
                j = rng.randrange(4)
        elif what < 0.3:
            arrays[i] = values(rng.randrange(1000))
            tensors[i].assign(Tensor(arrays[i]))
        elif what < 0.35:
            arrays[i] = values(rng.randrange(1000))
            tensors[i] = stored(arrays[i])
        elif what < 0.45:
            kept = kept + arrays[i]
            assert np.array_equal(count(tensors[i]).numpy(), kept * 2)
        elif what < 0.55 and last is not None:
            made = mix(last[0], tensors[j])
            last = (made, np.float32(3) * last[1] - arrays[j])
        else:
            with Context(JIT=int(rng.random() > 0.05)):
                for _ in range(rng.choice([1, 1, 5])):
                    made = mix(tensors[i], tensors[j])
            last = (made, arrays[i] * 3 - arrays[j])
            if rng.random() < 0.3:
                late.append((made + 1, last[1] + 1))
        if last is not None and rng.random() < 0.5:
            assert np.array_equal(last[0].numpy(), last[1])
    for lazy, expected in late:
        assert np.array_equal(lazy.numpy(), expected)
