"""Stores of narrow vectors become one of a whole register, and nothing else about a program changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts import Opts, Tile, Vectorize
from manygrad.runtime.codegen.pipeline import prepare
from manygrad.runtime.codegen.render.llvm.wide_stores import with_wide_stores
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp
from tests.runtime.codegen.kernels import add, elementwise, load, loop, mul, sink, store

MACHINE = Machine(64, 32)
WIDE: Opts = (Vectorize(0, 16), Tile(0, 64))


def stores(ast: UOp, opts: Opts = WIDE) -> list[tuple[int, int]]:
    """Of the whole tile: (constant, lanes)."""
    insts = prepare(ast, MACHINE, opts).program().insts
    found = with_wide_stores(insts)
    known: set[Inst] = set()
    for x in found:  # a value stands before what uses it
        assert known.issuperset(x.src)
        known.add(x)
    return [(x.arg, x.src[2].lanes) for x in found if x.op is Low.STORE and len(x.src) == 3 and x.src[2].lanes > 1]


def to(d: DType) -> Callable[[UOp], UOp]:
    return lambda x: mul(x, UOp.const(dtypes.float32, 2.0)).cast(d)


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (dtypes.float32, [(0, 16), (16, 16), (32, 16), (48, 16)]),
        (dtypes.bfloat16, [(0, 32), (32, 32)]),
        (dtypes.int16, [(0, 32), (32, 32)]),
        (dtypes.uint8, [(0, 64)]),
        (dtypes.bool, [(0, 16), (16, 16), (32, 16), (48, 16)]),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_as_many_neighbours_as_fill_a_register(dtype: DType, want: list[tuple[int, int]]) -> None:
    assert stores(elementwise(to(dtype), [dtypes.float32], 640)) == want


def test_a_run_that_fills_no_register_is_joined_as_far_as_it_goes() -> None:
    ast = elementwise(to(dtypes.uint8), [dtypes.float32], 480)
    assert stores(ast, (Vectorize(0, 16), Tile(0, 48))) == [(0, 32), (32, 16)]


def test_values_that_are_rounded_are_joined_before() -> None:
    ast = elementwise(to(dtypes.bfloat16), [dtypes.float32], 640)
    found = with_wide_stores(prepare(ast, MACHINE, WIDE).program().insts)
    for x in found:
        if x.op is Low.STORE and len(x.src) == 3 and x.src[2].lanes > 1:
            value = x.src[2]
            assert (value.op, value.src[0].op, value.src[0].dtype) == (Ops.CAST, Low.SHUFFLE, dtypes.float32)
            assert value.src[0].arg == tuple(range(32))


def test_rows_that_lie_apart_stay_apart() -> None:
    i, j = loop(8, 0), loop(64, 1)
    value = load(1, add(mul(i, 64), j)).cast(dtypes.bfloat16)
    ast = sink(store(0, add(mul(i, 96), j), value, i, j))
    found = stores(ast, (Vectorize(1, 16), Tile(1, 32), Tile(0, 2)))
    assert found == [(0, 32), (96, 32)]


def test_two_outputs_side_by_side_in_a_kernel() -> None:
    i = loop(640, 0)
    x = load(2, i)
    ast = sink(store(0, i, x.cast(dtypes.bfloat16), i), store(1, i, x.cast(dtypes.int16), i))
    assert stores(ast) == [(c, 16) for c in (0, 0, 16, 16, 32, 32, 48, 48)]  # (they alternate)


def test_a_store_is_not_moved_past_a_load_of_its_argument_nor_out_of_its_block() -> None:
    index, half = dtypes.index, dtypes.bfloat16
    pointer, other = (Inst(Low.PARAM, half, 1, (), n, 0) for n in (0, 1))
    zero = Inst(Low.CONST, index, 1, (), 0, 0)
    value = Inst(Low.CONST, half, 16, (), 1.0, 0)
    wide = Inst(Low.CONST, dtypes.float32, 16, (), 1.0, 0)
    first, last = (Inst(Low.STORE, dtypes.void, 16, (pointer, zero, value), c, 0) for c in (0, 16))
    begin = [pointer, other, zero, value, wide]

    def joined(*between: Inst) -> bool:
        found = with_wide_stores([*begin, first, *between, last])
        assert [x for x in found if x in between] == list(between)
        return first not in found

    assert joined()
    assert joined(Inst(Low.LOAD, half, 16, (other, zero), 0, 0))
    assert not joined(Inst(Low.LOAD, half, 16, (pointer, zero), 0, 0))
    assert not joined(Inst(Low.STORE, dtypes.void, 16, (other, zero, value), 0, 0))
    assert not joined(Inst(Low.STORE, dtypes.void, 16, (pointer, zero, value), 64, 0))
    for op in (Low.IF, Low.LOOP, Low.END, Low.BARRIER, Low.MATRIX_STORE):
        assert not joined(Inst(op, dtypes.void, 1, (), None, 0))
