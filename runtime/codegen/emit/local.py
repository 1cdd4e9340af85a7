"""Local memory: where packed operands and kept rows are read, and where rows are written."""

from __future__ import annotations

from manygrad.runtime.codegen.analysis.affine import Position
from manygrad.runtime.codegen.emit.emission import INDEX, Emission
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.values import sum_of_terms
from manygrad.runtime.codegen.loops.local import Kept, Stage
from manygrad.runtime.codegen.loops.tree import Rest
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def held(e: Emission, u: UOp, position: Position) -> Inst | None:
    """The value from local memory, where it lies there."""
    again = e.local.again.get(u)
    if again is not None and any(w not in e.waiting and w not in e.running for w in again[0].owners):
        pointer, offset, constant = _row_at(e, u, *again, position)
        lanes = e.scope.lanes if again[1] is e.scope.vectorized else 1
        # in this block: the contents change with every tile of the loops around
        return e.emit(Low.LOAD, u.dtype, (pointer, offset), constant, lanes, here=True)
    if u in e.local.matrices and u not in e.waiting and u not in e.running:
        pointer, constant = matrix_sum_at(e, u, position)
        return e.emit(Low.LOAD, u.dtype, (pointer, e.const(0)), constant, e.scope.lanes, here=True)
    stage = e.local.stages.get(u)
    return _packed(e, stage, position) if stage is not None and u in e.packed else None


def matrix_sum_at(e: Emission, u: UOp, position: Position) -> tuple[Inst, int]:
    """(pointer, constant) of a sum that came out of a matrix unit: square after square, those side by side first."""
    dot, sums = u.src[0].arg, e.local.matrices[u]
    lanes = dot.vector_bytes // u.dtype.itemsize
    assert e.scope.vectorized is not None
    row, vector = (
        position.get(sums.rows, 0) if sums.rows is not None else 0,
        position.get(e.scope.vectorized, 0) // lanes,
    )
    square = row // dot.rows * sums.wide + vector
    pointer = e.emit(Low.SCRATCH, u.dtype, (), sums.offset_bytes)
    return pointer, (square * dot.rows + row % dot.rows) * lanes


def keep(e: Emission, u: UOp, position: Position, value: Inst) -> None:
    """Writes what has just been computed to its row, if a REDUCE that is to keep it is running."""
    kept = e.local.kept.get(u)
    if kept is not None and any(w in e.running for w in kept.owners):
        pointer, offset, constant = _row_at(e, u, kept, kept.r, position)
        value = e.splat(value, e.scope.lanes if kept.r is e.scope.vectorized else 1)
        e.emit(Low.STORE, dtypes.void, (pointer, offset, value), constant, value.lanes, here=True)


def _row_at(e: Emission, u: UOp, kept: Kept, along: UOp, position: Position) -> tuple[Inst, Inst, int]:
    """(pointer, offset, constant) of the element at `position`, `along` being the range of the row."""
    row = 0
    for x, tile in kept.rows:
        row = row * tile + position.get(x, 0)
    a = e.scope.analysis.affine(along, position)
    assert a is not None
    return e.emit(Low.SCRATCH, u.dtype, (), kept.offset_bytes), sum_of_terms(e, a), a.constant + row * kept.pitch


def packed_at(e: Emission, stage: Stage, position: Position) -> tuple[Inst, Inst, int, int]:
    """(pointer, offset, constant, lanes) of an element of a stage."""
    beside = {r: i for r, i in position.items() if r not in stage.pitches}
    at, a = e.scope, e.scope.analysis.affine(stage.row, beside)
    assert a is not None and a.stride == 0
    pointer = e.emit(Low.SCRATCH, stage.dtype, (), stage.offset_bytes)
    offset, origin = sum_of_terms(e, a), at.origin[stage.loop]
    if stage.blocked is not None:
        k, step = stage.blocked
        offset = e.emit(Ops.SUB, INDEX, (offset, e.emit(Ops.MUL, INDEX, (at.block[k], e.const(step)))))
    if at.vector is not None:
        vectorized, begin, place = at.vector
        origin = begin if vectorized is stage.loop else origin
        offset = e.add(e.emit(Ops.MUL, INDEX, (place, e.const(stage.pitches[vectorized]))), offset)
    if stage.loop in at.block:
        before = e.emit(Ops.SUB, INDEX, (origin, at.block[stage.loop]))
        offset = e.add(e.emit(Ops.MUL, INDEX, (before, e.const(stage.rows))), offset)
    constant = a.constant + sum(position.get(r, 0) * pitch for r, pitch in stage.pitches.items())
    return pointer, offset, constant, at.lanes if at.vectorized is not None and stage.pitches.get(at.vectorized) else 1


def _packed(e: Emission, stage: Stage, position: Position) -> Inst:
    pointer, offset, constant, lanes = packed_at(e, stage, position)
    # never hoisted out of the tile: its contents change with it
    if offset.depth < e.scope.origin[stage.loop].depth:
        offset = e.emit(Ops.ADD, INDEX, (offset, e.const(0)), here=True)
    dtype = stage.value.dtype if stage.grouped is None else dtypes.int32
    return e.emit(Low.LOAD, dtype, (pointer, offset), constant, lanes)


def picked_up(e: Emission, rest: Rest, offset: int, identity: Inst) -> Inst:
    """The sum that rested, or the identity before the first block."""
    dtype, lanes = identity.dtype, identity.lanes
    sums = e.emit(Low.SCRATCH, dtype, (), rest.offset_bytes)
    rested = e.emit(Low.LOAD, dtype, (sums, instruction(e, rest.at)), offset, lanes, here=True)
    begun = e.splat(instruction(e, rest.begun), lanes)
    return e.emit(Ops.WHERE, dtype, (begun, rested, identity), None, lanes, here=True)
