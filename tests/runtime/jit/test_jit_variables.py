"""Captures that are called with bound variables."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, Variable
from manygrad.errors import JitError
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
    assert [type(i).__name__ for i in step.captured.items] == ["GraphItem"]


def test_an_argument_may_be_an_expression_of_variables() -> None:
    x = Tensor.arange(512).cast("float32").realize()
    step = TinyJit(lambda begin, end: (x[begin : begin + 16].sum(), x[:end].sum()))
    v, w = Variable("block", 0, 15), Variable("more", 1, 16)
    for a, b in ((0, 1), (1, 5), (2, 3), (15, 16), (0, 7)):
        own, all_so_far = step(32 * v.bind(a), 16 * v.bind(a) + w.bind(b))
        assert own.item() == sum(range(32 * a, 32 * a + 16))
        assert all_so_far.item() == sum(range(16 * a + b))


def test_how_an_expression_is_made_of_variables_is_a_part_of_the_capture() -> None:
    x = Tensor.arange(64).realize()
    step = TinyJit(lambda end: x[:end].sum())
    v = Variable("end", 1, 16)
    assert [step(2 * v.bind(n)).item() for n in (3, 4, 5)] == [15, 28, 45]
    with pytest.raises(JitError, match=r"argument\[0\] was captured as \(end\*2\), now argument\[0\] is \(end=5\*3\)"):
        step(3 * v.bind(5))
    with pytest.raises(JitError, match="was captured as"):
        step(v.bind(5))
    for name, most, value in (("limit", 16, 5), ("end", 32, 20)):  # (the other one's memory ends at 16)
        with pytest.raises(JitError, match=rf"variables end \(1 to 16\), called with {name} \(1 to {most}\)"):
            step(2 * Variable(name, 1, most).bind(value))
    assert step(2 * v.bind(6)).item() == 66


def test_a_variable_has_one_value_in_a_call() -> None:
    x = Tensor.arange(64).realize()
    step = TinyJit(lambda begin, end: x[:begin].sum() + x[:end].sum())
    v = Variable("n", 1, 16)
    for n in (3, 4, 5):
        assert step(v.bind(n), v.bind(n) * 2).item() == sum(range(n)) + sum(range(2 * n))
    with pytest.raises(JitError, match="'n' is bound to 3 and to 4 in one call"):
        step(v.bind(3), v.bind(4))
