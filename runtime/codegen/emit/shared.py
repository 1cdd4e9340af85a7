"""Memory that the work items of a group share: where an element lies, copying it there, reading it."""

from __future__ import annotations

from manygrad.runtime.codegen.analysis.affine import Position
from manygrad.runtime.codegen.emit.emission import INDEX, Emission
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.values import value
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.loops.local import FragmentStage, GroupStage, SharedLoop
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def copy(e: Emission, stage: GroupStage) -> None:
    """The element of the open tiles, of one iteration each."""
    begins = (e.scope.block[stage.k], *(instruction(e, x.begin) for x in stage.loops))
    ranges = (stage.k_source, *(x.source for x in stage.loops))
    places = [_since(e, e.scope.origin[r], begin) for r, begin in zip(ranges, begins)]
    found = value(e, stage.source, {})
    e.emit(Low.STORE, dtypes.void, (memory_of(e, stage), _element(e, stage, places), found), 0, here=True)


def copied_to(e: Emission, stage: GroupStage, to: tuple[Index, ...]) -> Inst:
    """The offset of a place in the block around."""
    return e.add(block_offset(e, stage), _element(e, stage, [instruction(e, x) for x in to]))


def _element(e: Emission, stage: GroupStage, places: list[Inst]) -> Inst:
    """Where an element lies in a block: along the reduction, then along each loop."""
    steps = [(places[0], stage.row)]
    steps += [(_apart(e, x, place), x.pitch) for x, place in zip(stage.loops, places[1:])]
    return _offset(e, steps)


def _apart(e: Emission, x: SharedLoop, place: Inst) -> Inst:
    """An iteration's place, where the vectors of tiles lie apart."""
    if x.vectors == 1:
        return place
    digit = lambda by, count: _digit(e, place, by, count)  # noqa: E731
    tile, vector, lane = digit(x.lanes * x.vectors, 0), digit(x.lanes, x.vectors), digit(1, x.lanes)
    return _offset(e, [(vector, x.size // x.vectors), (tile, x.lanes), (lane, 1)])


def _digit(e: Emission, place: Inst, by: int, count: int) -> Inst:
    """The digit of `place` that counts in steps of `by`, of so many; 0: of any number."""
    place = e.emit(Ops.IDIV, INDEX, (place, e.const(by)), True) if by > 1 else place
    return e.emit(Ops.MOD, INDEX, (place, e.const(count)), True) if count else place


def shared(e: Emission, u: UOp, position: Position) -> Inst | None:
    """The value, where a group's memory holds it."""
    stage = e.local.shared.get(u)
    if stage is None or u not in e.packed:
        return None
    steps = [(_since(e, e.scope.origin[stage.k], e.scope.block[stage.k]), stage.row)]
    constant = position.get(stage.k, 0) * stage.row
    for x in stage.loops:
        place, at = _since(e, e.scope.origin[x.loop], instruction(e, x.begin)), position.get(x.loop, 0)
        if x.vectors > 1:  # (a tile begins at a multiple of its size)
            place, at = _digit(e, place, x.vectors, 0), at // x.lanes * (x.size // x.vectors)
        steps.append((place, x.pitch))
        constant += at * x.pitch
    offset = e.add(block_offset(e, stage), _offset(e, steps))
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


def _since(e: Emission, origin: Inst, begin: Inst) -> Inst:
    return e.emit(Ops.SUB, INDEX, (origin, begin))


def _offset(e: Emission, places: list[tuple[Inst, int]]) -> Inst:
    """Offset of what lies `pitch` elements apart from place to place."""
    total = e.const(0)
    for place, pitch in places:
        total = e.add(total, place if pitch == 1 else e.emit(Ops.MUL, INDEX, (place, e.const(pitch))))
    return total
