"""Staging: what a tile's reductions read of an operand, packed into the thread's local memory, contiguous and
converted.

before:  LOOP n (64 at a time): LOOP m: LOOP k: LOAD b[k*N + n]
after:   LOOP n: { LOOP k: local[k*64 + 0..63] = b[k*N + n] }; LOOP m: LOOP k: LOAD local[k*64]

Of a blocked loop all tiles of the block are packed, one after the other, before the block's tiles run for the first
time; of a blocked reduction as many iterations as a block has, before that runs. What is packed for the tiles of a
block lies a little more than their size apart: at distances of a power of two all of it would meet in one set of the
first cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from manygrad.runtime.codegen.affine import Position, index_sum
from manygrad.runtime.codegen.dots import LANE_BYTES
from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts.cache_read import stage_rows, stage_sizes, staged_values, tiled_loops
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.quads import Quads
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

Around = Callable[[Callable[[], None]], None]  # runs a body inside of something
HEADER_BYTES = 64  # where a thread keeps up to which index it has run the kernel (0: not yet), so what it holds packed
PACK_BYTES = 64  # of the vectors that pack along a loop which is not the vectorised one


@dataclass
class Stage:
    """A value packed into local memory at every tile of `loop`: element [i of `ranges`..., position in the tile].

    The position is that in the tiles of all loops up to `loop` on which the value depends, in nested order. Of a
    blocked loop: [tile in the block, i of `ranges`..., position in the tile].
    """

    loop: UOp
    ranges: tuple[UOp, ...]
    row: UOp  # the joint index of `ranges`, in elements
    rows: int  # of a blocked loop: elements from one of its iterations to the next
    blocked: (
        tuple[UOp, int] | None
    )  # a reduce range of which a block is packed at a time; elements from one iteration to the next
    pitches: dict[UOp, int]  # elements from one position in a loop's tile to the next
    offset_bytes: int
    quads: UOp | None  # the one of `ranges` of which quads are packed, each as an element of their size
    ready: bool = False


class Stager(Quads):
    def __init__(self, ast: UOp, nest: LoopNest) -> None:
        super().__init__(ast, nest)
        self.scratch_bytes = 0
        self.stages: dict[UOp, Stage] = {}
        self.changed: dict[UOp, Inst] = {}  # loop inside a joint parallel loop -> whether it has just moved on
        self.block_begin: dict[UOp, Inst] = {}  # blocked loop -> index of its block's first iteration
        self.bounds: dict[UOp, tuple[Inst, int]] = {}  # range of a blocked reduction -> (begin, size) of the block
        self.packing = False
        self.singly = False  # whether a tile's vectors are packed in a loop
        self.vector: tuple[UOp, Inst, Inst] | None = (
            None  # in that loop: (the lane, index of the tile's first iteration, the vector's place in the tile)
        )
        if nest.staged:
            self.local(HEADER_BYTES)
        for r, slot in nest.staged:
            self.plan_stage(r, slot)

    def loop(self, r: UOp, body: Callable[[], None]) -> None:
        raise NotImplementedError

    def fixed_size(self, r: UOp) -> int | None:
        return r.src[0].arg if r.src[0].op is Ops.CONST else None

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
            sizes = stage_sizes(self.nest, loop, ranges)
            tiled = tiled_loops(self.nest, loop, u)
            quads = next((r for r in ranges if r in self.nest.dots), None)
            each = self.nest.dots[quads] if quads is not None else 1
            pitches, pitch = {}, each
            for r in reversed(tiled):
                pitches[r] = pitch
                pitch *= self.nest.tile.get(r, 1)
            shares = [
                each if r is quads else 1 for r in ranges
            ]  # (the iterations of a quad lie side by side in its element)
            steps = {r: math.prod(sizes[i + 1 :]) * pitch // math.prod(shares[i:]) for i, r in enumerate(ranges)}
            row = index_sum(tuple(steps.items()), 0)
            blocked = next(((r, c) for (r, c), n in zip(steps.items(), sizes) if n < r.src[0].arg), None)
            rows = stage_rows(self.nest, loop, sizes)
            offset = self.local(rows * pitch // each * self.nest.block.get(loop, 1) * u.dtype.itemsize)
            self.stages[u] = Stage(loop, ranges, row, rows, blocked, pitches, offset, quads)

    def staged_at(self, u: UOp, stage: Stage, position: Position) -> tuple[Inst, Inst, int, int]:
        """(pointer, offset, constant, lanes) of an element of a stage."""
        a = self.analysis.affine(stage.row, position)
        assert a is not None and a.stride == 0
        pointer = self.emit(Low.SCRATCH, u.dtype, (), stage.offset_bytes)
        offset, origin = self.base(a), self.origin[stage.loop]
        if stage.blocked is not None:
            k, step = stage.blocked
            offset = self.emit(
                Ops.SUB, INDEX, (offset, self.emit(Ops.MUL, INDEX, (self.bounds[k][0], self.const(step))))
            )
        if self.vector is not None:
            lane, begin, at = self.vector
            origin = begin if lane is stage.loop else origin
            offset = self.add(self.emit(Ops.MUL, INDEX, (at, self.const(stage.pitches[lane]))), offset)
        if stage.loop in self.block_begin:
            before = self.emit(Ops.SUB, INDEX, (origin, self.block_begin[stage.loop]))
            offset = self.add(self.emit(Ops.MUL, INDEX, (before, self.const(stage.rows))), offset)
        constant = a.constant + sum(position.get(r, 0) * pitch for r, pitch in stage.pitches.items())
        return pointer, offset, constant, self.lanes if stage.pitches.get(self.lane) else 1  # type: ignore[arg-type]

    def staged_load(self, u: UOp, stage: Stage, position: Position) -> Inst:
        pointer, offset, constant, lanes = self.staged_at(u, stage, position)
        # never hoisted out of the tile: its contents change with it
        if offset.depth < self.origin[stage.loop].depth:
            offset = self.emit(Ops.ADD, INDEX, (offset, self.const(0)), here=True)
        return self.emit(Low.LOAD, u.dtype if stage.quads is None else dtypes.int32, (pointer, offset), constant, lanes)

    def pack(self, loop: UOp, tiles: Around | None = None) -> None:
        """Fills the stages of `loop` for the tile that is open now, unless they hold it already.

        `tiles(body)` runs `body` in all tiles of the loop's block, which are packed then.
        """
        stages = {u: s for u, s in self.stages.items() if s.loop is loop}
        if not stages or (loop in self.nest.block and tiles is None):
            return
        changed = self.changed.get(loop)
        if changed is not None:
            self.open(Inst(Low.IF, dtypes.void, 1, (changed,), None, len(self.blocks)))
        self.packing = True
        for u, stage in stages.items():
            stage.ready = False
            before = (self.lane, self.lanes)
            self.choose_packing_lane(u, stage)
            if tiles is None:
                self.pack_ranges(u, stage)
            elif self.square is not None:
                tiles(lambda u=u, stage=stage: self.pack_ranges(u, stage))  # type: ignore[misc]
            else:  # what lies side by side is read together
                self.pack_ranges(u, stage, tiles=tiles)
            self.square, self.singly = None, False
            self.use_lane(*before)
        self.packing = False
        if changed is not None:
            self.close()
        for stage in stages.values():
            stage.ready = True

    def choose_packing_lane(self, u: UOp, stage: Stage) -> None:
        """Vectors along the loop, also where another one is vectorised, if the operand is contiguous along it or in
        squares."""
        before, tile = (self.lane, self.lanes), self.nest.tile.get(stage.loop, 1)
        if self.lane not in stage.pitches and self.fixed_size(stage.loop) is not None and tile > 1:
            self.use_lane(
                stage.loop,
                min(
                    1 << (tile - 1).bit_length(),
                    PACK_BYTES // (u.dtype.itemsize if stage.quads is None else LANE_BYTES),
                ),
            )
        if self.lane in stage.pitches:
            index = [v.src[0] for v in u.toposort() if v.op is Ops.LOAD][-1]
            a = self.analysis.affine(index.src[1], {})
            if a is not None and a.stride != 1:
                self.square = next((r for r in stage.ranges if self.step(index.src[1], r) == 1), None)
                self.use_lane(self.lane, self.lanes)
            if self.lane is not self.nest.lane and self.square is None and (a is None or a.stride != 1):
                self.use_lane(*before)
            if self.square is not None and len(index.src) == 2:
                self.use_lane(self.lane, self.lanes, self.lane)
                single = self.analysis.affine(index.src[1], {})
                self.singly = (
                    a is not None and single is not None and single.offsets(self.lanes) == a.offsets(self.lanes)
                )
                self.use_lane(self.lane, self.lanes, self.lane if self.singly else None)

    def pack_ranges(self, u: UOp, stage: Stage, i: int = 0, tiles: Around | None = None) -> None:
        if i < len(stage.ranges):
            self.loop(stage.ranges[i], lambda: self.pack_ranges(u, stage, i + 1, tiles))
        elif tiles is not None:
            tiles(lambda: self.pack_positions(u, stage))
        else:
            self.pack_vectors(u, stage)

    def pack_vectors(self, u: UOp, stage: Stage) -> None:
        """The tile, in squares one vector after the other: transposing a square is much code."""
        r = self.lane
        if not self.singly or r is None or self.tile[r] == self.lanes or self.tile[r] % self.lanes:
            self.pack_positions(u, stage)
            return
        origin, tile = self.origin[r], self.tile[r]
        at = Inst(Low.LOOP, INDEX, 1, (self.const(0), self.const(tile)), self.lanes, len(self.blocks))
        self.open(at)
        self.vector, self.along = (r, origin, at), at
        self.origin[r], self.tile[r] = self.add(origin, at), self.lanes
        self.pack_positions(u, stage)
        self.vector, self.along = None, r
        self.origin[r], self.tile[r] = origin, tile
        self.close()

    def pack_positions(self, u: UOp, stage: Stage) -> None:
        borrowed = self.lane is stage.loop and self.lane is not self.nest.lane
        if borrowed:
            self.ragged[stage.loop] = None  # (a tile need not fill its vectors)
        masks = self.masks([u], frozenset(stage.ranges))
        for at in self.positions(frozenset(stage.ranges)):
            with self.unless_masked(masks, at) as reached:
                for position in self.positions(frozenset(stage.pitches)) if reached else ():
                    self.pack_position(u, stage, {**position, **at}, borrowed)
        if borrowed:
            self.ragged.pop(stage.loop)

    def pack_position(self, u: UOp, stage: Stage, position: Position, borrowed: bool) -> None:
        pointer, offset, constant, lanes = self.staged_at(u, stage, position)
        value = self.value(u, position) if stage.quads is None else self.quads(u, stage.quads, position)
        value = self.splat(value, lanes)
        mask = self.ragged_mask(position) if borrowed else None
        guard = () if mask is None else (mask,)
        self.emit(Low.STORE, dtypes.void, (pointer, offset, value, *guard), constant, lanes, here=True)
