"""Captures that are called with bound variables."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, Variable
from manygrad.tensor.uop import UOp


@pytest.mark.parametrize("device", ["CPU", "PYTHON"])
def test_a_capture_with_variables_is_one_call(device: str) -> None:
    """As a step that writes the next token's keys into a cache and reads those so far. A variable that the function
    binds itself keeps its value."""
    size = 4000 if device == "CPU" else 4  # (rows for several threads)
    cache = Tensor.zeros(8, size, device=device).contiguous().realize()
    want = np.zeros((8, size), np.float32)

    @TinyJit
    def step(row: Tensor, position: UOp) -> tuple[Tensor, Tensor]:
        cache[position : position + 1] = row
        own = Variable("own", 1, 8).bind(3)
        return (cache[: position + 1] * 2).sum(0), cache[:own].amax(0)

    v = Variable("position", 0, 7)
    for k, position in enumerate((0, 1, 2, 3, 7, 0, 5)):
        row = np.arange(size, dtype=np.float32)[None] * (k + 1)
        want[position] = row
        total, most = step(Tensor(row, device=device), v.bind(position))
        np.testing.assert_array_equal(total.numpy(), 2 * want[: position + 1].sum(0))
        np.testing.assert_array_equal(most.numpy(), want[:3].max(0))
    assert [type(i).__name__ for i in step.items] == ["GraphItem"]
