"""Memory that the work items of a group share: where an element lies, copying it there, reading it."""

from __future__ import annotations

from manygrad.runtime.codegen.analysis.affine import Position
from manygrad.runtime.codegen.emit.emission import INDEX, Emission
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.values import value
from manygrad.runtime.codegen.loops.local import FragmentStage, GroupStage
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def copy(e: Emission, stage: GroupStage) -> None:
    """The element of the open tiles, of one iteration each."""
    steps = [(stage.k_source, stage.k, e.scope.block[stage.k], stage.row)]
    steps += [(x.source, x.loop, instruction(e, x.begin), x.pitch) for x in stage.loops]
    offset = _offset(e, [(e.scope.origin[source], begin, pitch) for source, _, begin, pitch in steps])
    found = value(e, stage.source, {})
    e.emit(Low.STORE, dtypes.void, (memory_of(e, stage), offset, found), 0, here=True)


def shared(e: Emission, u: UOp, position: Position) -> Inst | None:
    """The value, where a group's memory holds it."""
    stage = e.local.shared.get(u)
    if stage is None or u not in e.packed:
        return None
    steps = [(stage.k, e.scope.block[stage.k], stage.row)]
    steps += [(x.loop, instruction(e, x.begin), x.pitch) for x in stage.loops]
    offset = _offset(e, [(e.scope.origin[r], begin, pitch) for r, begin, pitch in steps])
    constant = sum(position.get(r, 0) * pitch for r, _, pitch in steps)
    lanes = e.scope.lanes if any(x.loop is e.scope.vectorized for x in stage.loops) else 1
    # in this block: the contents change between barriers
    return e.emit(Low.LOAD, u.dtype, (memory_of(e, stage), offset), constant, lanes, here=True)


def memory_of(e: Emission, stage: GroupStage | FragmentStage) -> Inst:
    """The pointer to what a group shares."""
    return e.emit(Low.SHARED, stage.value.dtype, (), stage.offset_bytes)


def _offset(e: Emission, places: list[tuple[Inst, Inst, int]]) -> Inst:
    """Offset of what lies `pitch` elements apart from iteration to iteration, since `begin`."""
    total = e.const(0)
    for origin, begin, pitch in places:
        place = e.emit(Ops.SUB, INDEX, (origin, begin))
        total = e.add(total, place if pitch == 1 else e.emit(Ops.MUL, INDEX, (place, e.const(pitch))))
    return total
