"""Which position of an offset is the row that a thread may own."""

from __future__ import annotations

from manygrad.schedule.kernels.own_rows import _row
from manygrad.tensor.dtype import dtypes
from tests.runtime.codegen.kernels import add, load, loop, mul


def test_a_row_is_the_one_position_that_is_data_and_moves_furthest() -> None:
    r, at = loop(8, 1), load(1, loop(5, 0), dtypes.int64).cast(dtypes.index)
    other = load(2, loop(5, 0), dtypes.int64).cast(dtypes.index)
    assert _row(add(mul(at, 8), r)) == _row(add(mul(at, 8), r, 16)) == (at, 8)
    assert _row(add(mul(at, 7), r)) == (None, 0), "rows overlap"
    assert _row(add(mul(at, 8), other)) == (None, 0), "two positions are data"
    assert _row(add(mul(at, 8), r, -8)) == (None, 0), "rows are counted from the target's first on"
