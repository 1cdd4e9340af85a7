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
