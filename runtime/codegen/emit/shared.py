"""Memory that the work items of a group share: where an element lies, copying it there, reading it."""

from __future__ import annotations

from manygrad.runtime.codegen.analysis.affine import Position
from manygrad.runtime.codegen.emit.emission import INDEX, Emission
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.values import value
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.loops.local import FragmentStage, GroupStage
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def copy(e: Emission, stage: GroupStage) -> None:
    """The element of the open tiles, of one iteration each."""
    steps = [(stage.k_source, e.scope.block[stage.k], stage.row)]
    steps += [(x.source, instruction(e, x.begin), x.pitch) for x in stage.loops]
    offset = _offset(e, [(e.scope.origin[r], begin, pitch) for r, begin, pitch in steps])
    found = value(e, stage.source, {})
    e.emit(Low.STORE, dtypes.void, (memory_of(e, stage), offset, found), 0, here=True)


def copied_to(e: Emission, stage: GroupStage, to: tuple[Index, ...]) -> Inst:
    """The offset of a place in the block around."""
    pitches = (stage.row, *(x.pitch for x in stage.loops))
    return e.add(block_offset(e, stage), _offset(e, [(instruction(e, x), e.const(0), n) for x, n in zip(to, pitches)]))


def shared(e: Emission, u: UOp, position: Position) -> Inst | None:
    """The value, where a group's memory holds it."""
    stage = e.local.shared.get(u)
    if stage is None or u not in e.packed:
        return None
    steps = [(stage.k, e.scope.block[stage.k], stage.row)]
    steps += [(x.loop, instruction(e, x.begin), x.pitch) for x in stage.loops]
    offset = _offset(e, [(e.scope.origin[r], begin, pitch) for r, begin, pitch in steps])
    offset = e.add(block_offset(e, stage), offset)
    constant = sum(position.get(r, 0) * pitch for r, _, pitch in steps)
    lanes = e.scope.lanes if any(x.loop is e.scope.vectorized for x in stage.loops) else 1
    # in this block: the contents change between barriers
    return e.emit(Low.LOAD, u.dtype, (memory_of(e, stage), offset), constant, lanes, here=True)


def memory_of(e: Emission, stage: GroupStage | FragmentStage) -> Inst:
    """The pointer to what a group shares."""
    return e.emit(Low.SHARED, stage.value.dtype, (), stage.offset_bytes)


def block_offset(e: Emission, stage: GroupStage | FragmentStage) -> Inst:
    """Where the block around lies among those in the group's memory."""
    if stage.ring == 1:
        return e.const(0)
    assert e.scope.place is not None
    return e.emit(Ops.MUL, INDEX, (e.scope.place, e.const(stage.elements)))


def _offset(e: Emission, places: list[tuple[Inst, Inst, int]]) -> Inst:
    """Offset of what lies `pitch` elements apart from iteration to iteration, since `begin`."""
    total = e.const(0)
    for origin, begin, pitch in places:
        place = e.emit(Ops.SUB, INDEX, (origin, begin)) if begin.op is not Low.CONST or begin.arg else origin
        total = e.add(total, place if pitch == 1 else e.emit(Ops.MUL, INDEX, (place, e.const(pitch))))
    return total
