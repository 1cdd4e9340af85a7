"""Staging: what a tile's reductions read of an operand, packed into the thread's local memory, contiguous and converted.

before:  LOOP n (64 at a time): LOOP m: LOOP k: LOAD b[k*N + n]
after:   LOOP n: { LOOP k: local[k*64 + 0..63] = b[k*N + n] }; LOOP m: LOOP k: LOAD local[k*64]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from manygrad.runtime.codegen.affine import Position, index_sum
from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.evaluate import Evaluator
from manygrad.runtime.codegen.legal import staged_values
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opt import Plan
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


@dataclass
class Stage:
    """A value packed into local memory at every tile of `loop`: element [i of `ranges`..., position in the tile]."""

    loop: UOp
    ranges: tuple[UOp, ...]
    row: UOp  # the joint index of `ranges`
    tile: int
    offset_bytes: int
    ready: bool = False


class Stager(Evaluator):
    def __init__(self, ast: UOp, plan: Plan) -> None:
        super().__init__(ast, plan)
        self.scratch_bytes = 0
        self.stages: dict[UOp, Stage] = {}
        self.changed: dict[UOp, Inst] = {}  # loop inside a joint parallel loop -> whether it has just moved on
        self.packing = False
        for r, slot in plan.staged:
            self.plan_stage(r, slot)

    def loop(self, r: UOp, body: Callable[[], None]) -> None:
        raise NotImplementedError

    def local(self, nbytes: int) -> int:
        """Reserves scratch memory; gives its offset in bytes."""
        offset = self.scratch_bytes
        self.scratch_bytes += -(-nbytes // 64) * 64
        return offset

    def staged(self, u: UOp, position: Position) -> Inst | None:
        stage = self.stages.get(u)
        return self.staged_load(u, stage, position) if stage is not None and stage.ready else None

    def plan_stage(self, loop: UOp, slot: int) -> None:
        """Prepares to pack what REDUCEs read of argument `slot`."""
        for u, ranges in staged_values(self.sig, slot):
            sizes = [r.src[0].arg for r in ranges]
            tile = self.plan.tile.get(loop, 1)
            row = index_sum(tuple((r, math.prod(sizes[i + 1 :]) * tile) for i, r in enumerate(ranges)), 0)
            self.stages[u] = Stage(loop, ranges, row, tile, self.local(math.prod(sizes) * tile * u.dtype.itemsize))

    def staged_at(self, u: UOp, stage: Stage, position: Position) -> tuple[Inst, Inst, int, int]:
        """(pointer, offset, constant, lanes) of an element of a stage."""
        a = self.analysis.affine(stage.row, position)
        assert a is not None and a.stride == 0
        pointer = self.emit(Low.SCRATCH, u.dtype, (), stage.offset_bytes)
        return (
            pointer,
            self.base(a),
            a.constant + position.get(stage.loop, 0),
            self.lanes if stage.loop is self.lane else 1,
        )

    def staged_load(self, u: UOp, stage: Stage, position: Position) -> Inst:
        pointer, offset, constant, lanes = self.staged_at(u, stage, position)
        # never hoisted out of the tile: its contents change with it
        if offset.depth < self.origin[stage.loop].depth:
            offset = self.emit(Ops.ADD, INDEX, (offset, self.const(0)), here=True)
        return self.emit(Low.LOAD, u.dtype, (pointer, offset), constant, lanes)

    def pack(self, loop: UOp) -> None:
        """Fills the stages of `loop` for the tile that is open now, unless they hold it already."""
        stages = {u: s for u, s in self.stages.items() if s.loop is loop}
        if not stages:
            return
        changed = self.changed.get(loop)
        if changed is not None:
            self.open(Inst(Low.IF, dtypes.void, 1, (changed,), None, len(self.blocks)))
        self.packing = True
        for u, stage in stages.items():
            stage.ready = False
            self.square = self.contiguous_range(u, stage)
            self.pack_ranges(u, stage, 0)
            self.square = None
        self.packing = False
        if changed is not None:
            self.close()
        for stage in stages.values():
            stage.ready = True

    def contiguous_range(self, u: UOp, stage: Stage) -> UOp | None:
        """The reduce range along which a load that is strided along the lanes is contiguous: it is packed in squares."""
        load = u.src[0] if u.op is Ops.CAST else u
        a = self.analysis.affine(load.src[0].src[1], {})
        if a is None or a.stride == 1 or stage.loop is not self.lane:
            return None
        return next((x.expr for x, c in a.terms if c == 1 and x.expr in stage.ranges), None)

    def pack_ranges(self, u: UOp, stage: Stage, i: int) -> None:
        if i < len(stage.ranges):
            self.loop(stage.ranges[i], lambda: self.pack_ranges(u, stage, i + 1))
            return
        for position in self.positions(frozenset((stage.loop, *stage.ranges))):
            pointer, offset, constant, lanes = self.staged_at(u, stage, position)
            value = self.splat(self.value(u, position), lanes)
            self.emit(Low.STORE, dtypes.void, (pointer, offset, value), constant, lanes, here=True)
