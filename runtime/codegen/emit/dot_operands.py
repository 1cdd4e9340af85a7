"""Lowering of `tensorize`: neighbouring iterations of a reduction side by side, four bytes or two bfloat16, as one
int32 in each lane.

before:  ACC += CAST(a[k]) * CAST(b[k, lane])                      for each k
after:   DOT(ACC, SPLAT(a[k .. k+3]), [b[k .. k+3, lane] in each lane])      for each fourth k

What lies apart along the reduction is joined by shifts; where they lie side by side along it, but the lanes apart, they
are loaded in a square of int32s, which is transposed. What is packed is packed so. Of float32 each number is packed as
three of bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from manygrad.runtime.codegen.analysis.affine import Position
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.local import held
from manygrad.runtime.codegen.emit.memory import transpose
from manygrad.runtime.codegen.emit.values import key, ragged_mask, value
from manygrad.runtime.codegen.kernel.float32_parts import parts_of
from manygrad.runtime.codegen.loops.lanes import Lanes, step_along
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.target import LANE_BYTES
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


def dot_operand(e: Emission, u: UOp, r: UOp, position: Position) -> Inst:
    """`u` at as many iterations of `r` as fill four bytes, from `position` on, 0 beyond the last one: int32, a
    scalar where all lanes agree."""
    if (packed := held(e, u, position)) is not None:
        return packed
    at = (*key(e, u, position), LANE_BYTES)
    if (known := e.find(u, at)) is not None:
        return known
    if e.scope.vectorized is r or e.scope.vectorized not in ranges_of(u):
        found = side_by_side(e, u, r, position, e.scope.lanes if e.scope.vectorized is r else 1)
    elif lanes_follow(e, u, r):
        found = side_by_side(e, u, r, position, e.scope.lanes, whole=True)
    elif (square := transposed_operand(e, u, r, position)) is not None:
        found = square
    else:
        found = joined(e, u, r, position)
    e.remember(u, at, found)
    return found


def lanes_follow(e: Emission, u: UOp, r: UOp) -> bool:
    """Whether what the next lane reads lies behind this one's iterations of `r`, in whole vectors."""
    analysis, count = e.scope.analysis, e.tiling.dots[r]
    indices = [v.src[0].src[1] for v in u.toposort() if v.op is Ops.LOAD]
    forms = [analysis.affine(i, {}) for i in indices]
    return (
        e.scope.vectorized not in e.scope.ragged
        and all(f is not None and f.stride == count for f in forms)
        and all(step_along(analysis, i, r) == 1 for i in indices)
    )


@contextmanager
def vectors_along(e: Emission, r: UOp, lanes: int, whole: bool) -> Iterator[None]:
    """Vectors along `r`, which is of a fixed size, for the moment; `whole`: there is something in all lanes."""
    at = e.scope
    inner = e.with_lanes(Lanes(r, lanes, at.vectors.square, at.vectors.singly))
    with e.within(inner if whole else replace(inner, ragged={**at.ragged, r: None})):  # (its tile need not fill them)
        yield


def side_by_side(e: Emission, u: UOp, r: UOp, position: Position, count: int, whole: bool = False) -> Inst:
    """`count` groups from `position` on, one after the other along `r`, or, `whole`, those of the lanes."""
    with vectors_along(e, r, e.tiling.dots[r] * count, whole):
        found = e.splat(value(e, u, position), e.scope.lanes)
        in_order = u.op is Ops.LOAD and step_along(e.scope.analysis, u.src[0].src[1], r) == 1  # (reads 0 beyond)
        if not in_order and (mask := ragged_mask(e, position)) is not None:
            found = e.alu(Ops.WHERE, u.dtype, mask, found, e.const(0, u.dtype))
    return e.emit(Ops.BITCAST, dtypes.int32, (found,), None, count)


def joined(e: Emission, u: UOp, r: UOp, position: Position) -> Inst:
    """Vectors of one iteration each, those of the later ones shifted."""
    at, count = position.get(r, 0), e.tiling.dots[r]
    bits = dtypes.uint8 if u.dtype.itemsize == 1 else dtypes.uint16
    total: Inst | None = None
    for i in range(min(count, e.scope.tile[r] - at)):
        part = e.alu(Ops.BITCAST, bits, value(e, u, {**position, r: at + i}))
        wide = e.alu(Ops.CAST, dtypes.int32, part)
        wide = e.alu(Ops.SHL, dtypes.int32, wide, e.const(8 * bits.itemsize * i, dtypes.int32)) if i else wide
        total = wide if total is None else e.alu(Ops.OR, dtypes.int32, total, wide)
    assert total is not None
    return total


def transposed_operand(e: Emission, u: UOp, r: UOp, position: Position) -> Inst | None:
    """As `transposed_load`, of a square that is packed: for each lane as many groups as there are lanes,
    exchanged."""
    loads = [v for v in u.toposort() if v.op is Ops.LOAD and e.scope.vectorized in ranges_of(v)]
    mask = ragged_mask(e, position)
    if (
        e.scope.vectors.square is not r
        or (mask is not None and mask.op is not Low.FIRST)
        or any(step_along(e.scope.analysis, v.src[0].src[1], r) != 1 for v in loads)
    ):
        return None
    vectorized, n, count = e.scope.vectorized, e.scope.lanes, e.tiling.dots[r]
    span = count * n
    assert vectorized is not None
    at, first = position.get(vectorized, 0), position.get(r, 0) // span * span
    active = n if mask is None else mask.arg
    rows = [side_by_side(e, u, r, {**position, vectorized: at + i, r: first}, n) for i in range(active)]
    rows += [e.const(0, dtypes.int32, n)] * (n - active)
    columns = transpose(e, rows)
    for i, column in enumerate(columns):
        e.remember(u, (*key(e, u, {**position, r: first + count * i}), LANE_BYTES), column)
    return columns[(position.get(r, 0) - first) // count]


def dot_operand_parts(e: Emission, u: UOp, r: UOp, position: Position) -> list[Inst]:
    """As `dot_operand`, of float32: the parts of bfloat16, the largest first. A group has an iteration of the first
    half of what an instruction adds up and one of the second half, so that groups along `r` are joined from vectors."""
    unit, at = e.tiling.size_of(r), position.get(r, 0)
    first = at // unit * unit + at % unit // e.tiling.dots[r]
    return joined_parts(
        e, parts_of(u), *(value(e, u, {**position, r: i}) for i in (first, first + unit // e.tiling.dots[r]))
    )


def joined_parts(e: Emission, count: int, x: Inst, y: Inst) -> list[Inst]:
    """So many of `x` in the lower halves of int32, those of `y` in the upper ones."""
    found = []
    for low, high in itertools.islice(zip(parts(e, x), parts(e, y)), count):
        low = e.alu(Ops.SHR, low.dtype, low, e.const(16, low.dtype))
        found.append(e.alu(Ops.BITCAST, dtypes.int32, e.alu(Ops.OR, low.dtype, low, high)))
    return found


def parts(e: Emission, x: Inst) -> Iterator[Inst]:
    """The three numbers of bfloat16 whose sum a float32 is, as the upper halves of uint32: the first 8 bits of it, the
    next ones, rounded, and what is left. Of what is not finite the first one is the number itself (of a signalling NaN
    that only its last 16 bits tell from an infinite number, that)."""
    word = dtypes.uint32

    def bits(x: Inst) -> Inst:
        return e.alu(Ops.BITCAST, word, x)

    def upper(x: Inst) -> Inst:
        return e.alu(Ops.AND, word, x, e.const(0xFFFF0000, word))

    def rest(x: Inst, part: Inst) -> Inst:
        return e.alu(Ops.SUB, dtypes.float32, x, e.alu(Ops.BITCAST, dtypes.float32, part))

    yield (first := upper(bits(x)))
    x = rest(x, first)
    yield (second := upper(e.alu(Ops.ADD, word, bits(x), e.const(0x8000, word))))
    yield upper(bits(rest(x, second)))
