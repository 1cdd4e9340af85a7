"""A replay with the memory of the replay before it, which checks and passes nothing anew."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit
from manygrad.runtime import jit
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
    monkeypatch.setattr(TinyJit, "_pass", lambda self, i, t: passed.append(t))
    for _ in range(4):
        step(a, b)
    assert not passed
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
        m.setattr(jit, "run_items", fail)
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
                made = mix(tensors[i], tensors[j])
            last = (made, arrays[i] * 3 - arrays[j])
            if rng.random() < 0.3:
                late.append((made + 1, last[1] + 1))
        if last is not None and rng.random() < 0.5:
            assert np.array_equal(last[0].numpy(), last[1])
    for lazy, expected in late:
        assert np.array_equal(lazy.numpy(), expected)
