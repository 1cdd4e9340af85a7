"""Lazy values from before a TinyJit records, of what the step overwrites: they keep the value of their time."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, no_grad


@pytest.mark.parametrize("axis", [None, 0])
def test_lazy_values_of_state_made_before_the_capture_stay_what_they_were(axis: int | None) -> None:
    """Also if the step reads them, and also if it computes the same of its state: that follows the state."""

    def stored(value: float) -> Tensor:
        t = Tensor(np.full((4, 2), value, np.float32))
        return (t if axis is None else t.shard(("CPU:0", "CPU:1"), axis)).realize()

    w, h = stored(1), stored(0)

    @TinyJit
    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outside, own = h + 1, w * 2
        w.assign(w + 1)
        return outside, own, x + 1

    for n in range(5):
        if n == 1:
            h = w * 2  # not computed: 2 * 2
        outside, own, _ = step(stored(n))
        assert outside.tolist() == [[1 if n == 0 else 5] * 2] * 4
        assert own.tolist() == [[2 * (n + 1)] * 2] * 4 and w.tolist() == [[n + 2] * 2] * 4


def test_a_lazy_copy_of_what_the_step_stores_elsewhere() -> None:
    """The copy reads the memory where an equal value came to lie, which the step overwrites. (Replays read that.)"""
    with no_grad():
        value = Tensor(np.arange(6, dtype=np.float32)) + 1
        copy, other = value.clone(), Tensor.zeros(6)

        @TinyJit
        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            twice = copy * 2
            other.copy_(value)
            value.fill_(0)
            return twice, x + 1

        for n in range(4):
            twice, _ = step(Tensor([float(n)]).realize())
            assert twice.tolist() == [2, 4, 6, 8, 10, 12]
            assert other.tolist() == ([1, 2, 3, 4, 5, 6] if n == 0 else [0] * 6)


def test_an_older_tensor_that_takes_a_result_in_keeps_its_value() -> None:
    """Nothing of it is in memory yet, so `+=` makes it a new value: of an old tensor."""
    total, first = Tensor.zeros(4).contiguous(), Tensor(np.ones(4, np.float32)).realize()
    step = TinyJit(lambda a, b: (a + 2 * b) * 0.5 + 1)
    result = Tensor(np.full(4, 2, np.float32)).realize()
    for n in range(4):
        result = step(first, result)
        if n == 2:
            total += result
    assert total.tolist() == [6.5] * 4 and result.tolist() == [8] * 4


def test_a_view_that_is_passed_is_read_before_its_memory_is_used_again() -> None:
    """A lazy value of the last result is computed when the next call has its arguments: not where they lie."""
    view = Tensor(np.arange(8, dtype=np.float32))[::2]
    step = TinyJit(lambda a: a * 0.5 + 1)
    held = []
    for _ in range(5):
        result = step(view)
        held.append(result * 2 + 1)
        assert result.tolist() == [1, 2, 3, 4]
    assert [h.tolist() for h in held] == [[3, 5, 7, 9]] * 5
