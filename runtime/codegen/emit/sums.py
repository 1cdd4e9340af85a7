"""Reductions: accumulators in registers for every position of the tile, folded at the end where they are vectors.

A sum that fits 16 bits (`ReduceLoop.words`) is held in them, two a lane, which are added up at its end: a machine that
adds two products in 16 bits need not widen each pair.

Order: ascending in the ranges; with lanes, element k goes to partial sum k mod lanes, and those are folded pairwise; of
what is dealt out to work items, each has a sum of its own, and those are folded pairwise, too. It does not depend on
the tiles of the loops.

A maximum of floats over a row takes the greater of a vector and an accumulator, which forgets NaNs, and remembers
beside it in which lanes there was one: an instruction less than a maximum that is NaN where either is.

A blocked reduction keeps its accumulators in local memory between blocks of its outermost range, so that a block of the
operands stays in the cache while all tiles of a loop use it. The order of the sums is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from manygrad.runtime.codegen.cost import MASK_REGISTERS
from manygrad.runtime.codegen.emit.dot_operands import dot_operand
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.fragments import reduce_fragments
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.local import picked_up
from manygrad.runtime.codegen.emit.masks import apart, unless_masked
from manygrad.runtime.codegen.emit.matrices import reduce_matrices
from manygrad.runtime.codegen.emit.values import ragged_mask, remember, value
from manygrad.runtime.codegen.kernel.dots import is_product
from manygrad.runtime.codegen.loops.tree import ReduceLoop, Rest
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

IDENTITY = {Ops.ADD: lambda d: 0, Ops.MUL: lambda d: 1, Ops.MAX: lambda d: d.min}


@dataclass
class Accumulator:
    """The partial sums of a REDUCE at one tile position."""

    reduce: UOp
    position: dict[UOp, int]
    parts: list[Inst]
    ordered: Inst | None = None  # of a MAX of floats: the lanes in which no NaN has been; None: the parts tell
    words: bool = False  # two sums of 16 bits a lane


def reduce(e: Emission, node: ReduceLoop, body: Callable[[], None]) -> None:
    """Accumulators around the loops of `body`, which has each tile added; then the results are known."""
    if node.matrix or node.warp:
        (reduce_matrices if node.matrix else reduce_fragments)(e, node, body)
        return
    with e.within(e.with_lanes(node.lanes)) if node.lanes != e.scope.vectors else nullcontext():
        sums = accumulators(e, node)
        e.adding.append(lambda: accumulate_tile(e, node, sums))
        body()
        e.adding.pop()
        if node.rest is None or node.rest.is_last:
            finish(e, sums, node.split, node.across)
        else:
            put_down(e, sums, node.rest)


def parts(e: Emission, node: ReduceLoop) -> Iterator[tuple[UOp, dict[UOp, int]]]:
    """(REDUCE, tile position) of every partial sum."""
    for u in node.group:
        for position in e.positions(ranges_of(u)):
            for _ in range(node.partials):
                yield u, position


def accumulators(e: Emission, node: ReduceLoop) -> list[Accumulator]:
    """New accumulators, set to the identity, or to the sums that rested."""
    lanes, found = node.lanes.count, list[Accumulator]()
    for i, (u, position) in enumerate(parts(e, node)):
        identity = e.const(u.dtype.const(IDENTITY[u.arg](u.dtype)), u.dtype, lanes)
        start = identity if node.rest is None else picked_up(e, node.rest, i * lanes, identity)
        if not found or found[-1].reduce is not u or found[-1].position != position:
            found.append(Accumulator(u, position, [], words=node.words))
        found[-1].parts.append(e.emit(Low.ACC, u.dtype, (start,), None, lanes, here=True))
    if node.rest is None and node.split is not None and len(found) <= MASK_REGISTERS:
        true = e.const(True, dtypes.bool, lanes)
        for acc in found:
            if acc.reduce.arg is Ops.MAX and acc.reduce.dtype.is_float:
                acc.ordered = e.emit(Low.ACC, dtypes.bool, (true,), None, lanes, here=True)
    return found


def put_down(e: Emission, sums: list[Accumulator], rest: Rest) -> None:
    for i, acc in enumerate(a for x in sums for a in x.parts):
        memory = e.emit(Low.SCRATCH, acc.dtype, (), rest.offset_bytes)
        found = e.emit(Low.GET, acc.dtype, (acc,), None, acc.lanes, here=True)
        src = (memory, instruction(e, rest.at), found)
        e.emit(Low.STORE, dtypes.void, src, i * acc.lanes, acc.lanes, here=True)


def accumulate_tile(e: Emission, node: ReduceLoop, sums: list[Accumulator]) -> None:
    """All positions of the tile along the reduction."""
    split, step = node.split, e.tiling.step_of(node.split, node.lanes) if node.split is not None else 1
    for at in e.positions(frozenset(node.group[0].src[1:])):
        part = at.get(split, 0) // step if split is not None else 0
        with unless_masked(e, node.masks, at) as reached:
            for row in apart(e, node.masks, at) if reached else ():
                with unless_masked(e, node.masks, {**row, **at}) as some:
                    for acc in sums if some else ():
                        if row.items() <= acc.position.items():
                            accumulate(e, acc, {**acc.position, **at}, part)


def finish(e: Emission, sums: list[Accumulator], split: UOp | None, across: int) -> None:
    """Folds the partial sums, then those of the work items, and makes the results known in the current block."""
    results = [result_of(e, acc, split) for acc in sums]
    for bit in range(across.bit_length() - 2, -1, -1):  # (all work items get the same sum)
        others = [e.emit(Low.EXCHANGE, x.dtype, (x,), 1 << bit, x.lanes, here=True) for x in results]
        results = [e.alu(acc.reduce.arg, x.dtype, x, y) for acc, x, y in zip(sums, results, others)]
    for acc, result in zip(sums, results):
        remember(e, acc.reduce, acc.position, result)


def result_of(e: Emission, acc: Accumulator, split: UOp | None) -> Inst:
    u = acc.reduce
    join = partial(greater, e) if acc.ordered is not None else partial(e.alu, u.arg, u.dtype)
    found = [e.emit(Low.GET, u.dtype, (a,), None, a.lanes, here=True) for a in acc.parts]
    if acc.words:
        found = [e.emit(Low.SUM_WORDS, u.dtype, (x,), u.src[0].arg, x.lanes, here=True) for x in found]
    result = folded(e, found, join, split is not None)
    if acc.ordered is None:
        return result
    ordered = e.emit(Low.GET, dtypes.bool, (acc.ordered,), None, acc.ordered.lanes, here=True)
    nan = e.emit(Low.ANY, dtypes.bool, (e.alu(Ops.NOT, dtypes.bool, ordered),))
    return e.alu(Ops.WHERE, u.dtype, nan, e.const(math.nan, u.dtype), result)


def folded(e: Emission, values: list[Inst], join: Callable[[Inst, Inst], Inst], lanes: bool) -> Inst:
    """`values` joined in pairs; `lanes`: and then their lanes."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        joined = [join(a, b) for a, b in zip(values, values[half:])]
        values = joined + values[len(joined) : half]
    found = values[0]
    while lanes and found.lanes > 1:
        lower, upper = (e.emit(Low.HALVES, found.dtype, (found,), i, found.lanes // 2) for i in (0, 1))
        found = join(lower, upper)
    return found


def greater(e: Emission, a: Inst, b: Inst) -> Inst:
    """`b` where either is NaN."""
    return e.alu(Ops.WHERE, a.dtype, e.alu(Ops.CMPLT, dtypes.bool, b, a), a, b)


def accumulate(e: Emission, accumulator: Accumulator, position: dict[UOp, int], part: int) -> None:
    u, acc = accumulator.reduce, accumulator.parts[part]
    old = e.emit(Low.GET, u.dtype, (acc,), None, acc.lanes, here=True)
    v = u.src[0]
    if (r := next((r for r in u.src[1:] if r in e.tiling.dots), None)) is not None:
        a, b = (e.splat(dot_operand(e, s, r, position), acc.lanes) for s in v.src)
        dot = Low.DOT_WORDS if accumulator.words else Low.DOT
        new = e.emit(dot, u.dtype, (a, b, old), v.arg, acc.lanes, here=True)
        e.emit(Low.SET, dtypes.void, (acc, new), here=True)
        return
    if u.arg is Ops.ADD and is_product(v) and u.dtype.is_float:
        if v in e.local.kept:  # rounded, as where it is read; in the sum it is not
            value(e, v, position)
        a, b = (
            e.splat(e.alu(Ops.CAST, u.dtype, x) if x.dtype is not u.dtype else x, acc.lanes)
            for x in (value(e, s, position) for s in v.src)
        )
        new = e.emit(Low.FMA, u.dtype, (a, b, old), None, acc.lanes, here=True)
    elif accumulator.ordered is not None:
        x = e.splat(value(e, v, position), acc.lanes)
        remember_nans(e, accumulator.ordered, x, position)
        new = greater(e, x, old)
    else:
        new = e.emit(u.arg, u.dtype, (e.splat(value(e, v, position), acc.lanes), old), None, acc.lanes, here=True)
    if e.scope.vectorized in u.src[1:] and (mask := ragged_mask(e, position)) is not None:
        new = e.emit(Ops.WHERE, u.dtype, (mask, new, old), None, acc.lanes, here=True)
    e.emit(Low.SET, dtypes.void, (acc, new), here=True)


def remember_nans(e: Emission, acc: Inst, x: Inst, position: dict[UOp, int]) -> None:
    number = e.emit(Ops.CMPEQ, dtypes.bool, (x, x), None, acc.lanes, here=True)
    old = e.emit(Low.GET, dtypes.bool, (acc,), None, acc.lanes, here=True)
    new = e.emit(Ops.AND, dtypes.bool, (old, number), None, acc.lanes, here=True)
    if (mask := ragged_mask(e, position)) is not None:
        new = e.emit(Ops.WHERE, dtypes.bool, (mask, new, old), None, acc.lanes, here=True)
    e.emit(Low.SET, dtypes.void, (acc, new), here=True)
