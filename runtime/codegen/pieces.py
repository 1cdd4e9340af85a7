"""Pieces: the parallel loop, a part of which is one call of the kernel; blocks of a loop; blocked reductions.

A blocked reduction: for each block of its outermost range, all tiles of the piece (the blocked loop's and those of the
loops inside of it) do their share, their operands packed for this block alone; the sums rest in local memory in
between.
"""

from __future__ import annotations

import math

from manygrad.runtime.codegen.align import Aligner
from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.loops import Body
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.reduction import IDENTITY
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


class Pieces(Aligner):
    def __init__(self, ast: UOp, nest: LoopNest) -> None:
        super().__init__(ast, nest)
        self.sums_offset: int | None = None  # of a blocked reduction's accumulators in local memory

    # *** the parallel loop ***

    def parallel_loops(self, body: Body) -> None:
        """The outermost loops, as one loop over this call's part of their joint tiles."""
        nest, loops = self.nest, self.nest.loops[: self.nest.parallel]
        begin, finish = (self.emit(op, INDEX) for op in (Low.BEGIN, Low.FINISH))
        blocked = next(iter(nest.block), None)
        if len(loops) == 1 and blocked is None:
            self.tiles_between(loops[0], begin, finish, body)
            return
        index = Inst(Low.LOOP, INDEX, 1, (begin, finish), 1, len(self.blocks))
        self.open(index)
        number = self.digits(index, loops)
        for i, r in enumerate(loops[:-1]):
            inner = number[loops[i + 1]]
            for later in loops[i + 2 :]:
                inner = self.emit(Ops.OR, INDEX, (inner, number[later]))
            first = self.emit(Ops.CMPEQ, dtypes.bool, (inner, self.const(0)))
            at_begin = self.conjunction(
                self.emit(Ops.CMPEQ, dtypes.bool, (index, begin)), self.not_held(begin, loops[i + 1 :])
            )
            assert at_begin is not None
            self.changed[r] = self.emit(Ops.OR, dtypes.bool, (at_begin, first))
        single = [r for r in loops if r is not blocked]
        if blocked is None:
            self.one_tile_each(single, number, body)
        else:  # what is packed for the block is packed before the loops that it does not depend on
            packed = {r for u, stage in self.stages.items() if stage.loop is blocked for r in ranges_of(u)}
            before, after = ([r for r in single if (r in packed) == outside] for outside in (True, False))

            def block() -> None:
                begin, end = self.open_block(blocked, number[blocked])
                self.one_tile_each(after, number, lambda: self.block(blocked, begin, end, body))

            self.one_tile_each(before, number, block)
        self.close()

    def not_held(self, begin: Inst, later: tuple[UOp, ...]) -> Inst | None:
        """Whether this thread's last part of the loop ended in another iteration of the loops before `later`; None: it
        is not known."""
        if not self.stages:
            return None
        count = self.const(1)
        for r in later:
            count = self.emit(Ops.MUL, INDEX, (count, self.tiles_of(r, self.nest.block.get(r, 1))))
        end = self.emit(Low.LOAD, INDEX, (self.emit(Low.SCRATCH, INDEX, (), 0), self.const(0)), 0)
        last = self.emit(Ops.SUB, INDEX, (end, self.const(1)))
        runs = [self.emit(Ops.IDIV, INDEX, (x, count), False) for x in (last, begin)]
        return self.emit(Ops.CMPNE, dtypes.bool, tuple(runs))

    def one_tile_each(self, loops: list[UOp], number: dict[UOp, Inst], body: Body) -> None:
        if loops:
            self.one_tile(loops[0], number[loops[0]], lambda: self.one_tile_each(loops[1:], number, body))
        else:
            body()

    def digits(self, index: Inst, loops: tuple[UOp, ...]) -> dict[UOp, Inst]:
        """The number of each loop's tile (or block of tiles) in a joint index."""
        found, rest = {}, index
        for r in reversed(loops):
            if r is loops[0]:
                found[r] = rest
                break
            count = self.tiles_of(r, self.nest.block.get(r, 1))
            found[r] = self.emit(Ops.MOD, INDEX, (rest, count), True)
            rest = self.emit(Ops.IDIV, INDEX, (rest, count), True)
        return found

    # *** blocks ***

    def open_block(self, r: UOp, number: Inst) -> tuple[Inst, Inst]:
        """The first tile of a block of `r` and the one after its last; what the block needs for all of a reduction is
        packed."""
        per, tiles = self.const(self.nest.block[r]), self.tiles_of(r)
        begin = self.emit(Ops.MUL, INDEX, (number, per))
        end = self.add(begin, per)
        end = self.emit(Ops.WHERE, INDEX, (self.emit(Ops.CMPLT, dtypes.bool, (end, tiles)), end, tiles))
        self.block_begin[r] = self.emit(Ops.MUL, INDEX, (begin, self.const(self.nest.tile.get(r, 1))))
        if self.nest.reduce_block is None:
            self.pack(r, lambda pack: self.tiles_between(r, begin, end, pack))
        return begin, end

    def block(self, r: UOp, begin: Inst, end: Inst, body: Body) -> None:
        """The tiles of a block of `r`, inside of all other loops."""
        if self.nest.reduce_block is None:
            self.tiles_between(r, begin, end, body)
        else:
            self.blocked_reduction(r, begin, end, *self.nest.reduce_block, body)

    def blocked_reduction(self, r: UOp, begin: Inst, end: Inst, k: UOp, per: int, body: Body) -> None:
        """The reduction over `k`, `per` iterations at a time, for all the tiles of `r` and of the loops inside of
        it."""
        group = [u for u in self.open_reduces if r in ranges_of(u)]
        assert (
            group
            and k is group[0].src[1]
            and all(u.src[1:] == group[0].src[1:] and u.dtype is group[0].dtype for u in group)
        )
        waiting = self.open_reduces
        self.open_reduces = [u for u in waiting if u not in group]
        inside = self.nest.packed_in_blocks[1:]
        with self.lane_of(group):
            lanes = self.lanes if self.lane is not None else 1
        steps, first = (
            self.sums_of(group, r, inside, lanes),
            self.emit(Ops.MUL, INDEX, (begin, self.const(self.nest.tile.get(r, 1)))),
        )
        sums = self.emit(Low.SCRATCH, group[0].dtype, (), self.sums_offset)

        def at() -> Inst:
            """Where the sums of the current tile are."""
            offset = self.emit(
                Ops.MUL, INDEX, (self.emit(Ops.SUB, INDEX, (self.origin[r], first)), self.const(steps[r]))
            )
            for x in inside:
                offset = self.add(offset, self.emit(Ops.MUL, INDEX, (self.origin[x], self.const(steps[x]))))
            return offset

        def load(i: int, u: UOp, lanes: int) -> Inst:
            identity = self.const(u.dtype.const(IDENTITY[u.arg](u.dtype)), u.dtype, lanes)
            rested = self.emit(Low.LOAD, u.dtype, (sums, at()), i * lanes, lanes, here=True)
            begun = self.splat(self.emit(Ops.CMPLT, dtypes.bool, (self.const(0), self.bounds[k][0])), lanes)
            return self.emit(Ops.WHERE, u.dtype, (begun, rested, identity), None, lanes, here=True)

        def step() -> None:
            with self.lane_of(group) as split:
                accumulators = self.accumulators(group, split, load)
                self.accumulate_all(group, accumulators, split)
                for i, acc in enumerate(a for x in accumulators for a in x.parts):
                    value = self.emit(Low.GET, acc.dtype, (acc,), None, lanes, here=True)
                    self.emit(Low.STORE, dtypes.void, (sums, at(), value), i * lanes, lanes, here=True)

        def last() -> None:
            with self.lane_of(group) as split:
                accumulators = self.accumulators(group, split, load)
                self.accumulate_all(group, accumulators, split)
                self.finish(accumulators, split)
            body()

        def tiles(what: Body, i: int = 0) -> None:
            if i < len(inside):
                self.loop(inside[i], lambda: tiles(what, i + 1))
            else:
                self.tiles_between(r, begin, end, what)

        def block(origin: Inst, size: int, what: Body) -> None:
            self.bounds[k] = (origin, size)
            self.pack(r, lambda pack: self.tiles_between(r, begin, end, pack))
            tiles(what)
            del self.bounds[k]

        size = self.fixed_size(k)
        assert size is not None
        before = (size - 1) // per * per
        if before:
            index = Inst(Low.LOOP, INDEX, 1, (self.const(0), self.const(before)), per, len(self.blocks))
            self.open(index)
            block(index, per, step)
            self.close()
        block(self.const(before), size - before, last)
        self.open_reduces = waiting

    def sums_of(self, group: list[UOp], r: UOp, inside: tuple[UOp, ...], lanes: int) -> dict[UOp, int]:
        """Reserves local memory for the sums of all tiles; gives the elements from one iteration of a loop to the
        next."""
        vectors = {
            x: self.nest.tile.get(x, 1) // (self.nest.lanes if x is self.nest.lane else 1) for x in self.nest.loops
        }
        count = sum(
            lanes * math.prod(n for x, n in vectors.items() if x in ranges_of(u)) for u in group
        )  # of one tile of each loop
        steps = {}
        for x, tiles in (
            (r, self.nest.block[r]),
            *((x, -(-x.src[0].arg // self.nest.tile.get(x, 1))) for x in reversed(inside)),
        ):
            steps[x] = count // self.nest.tile.get(x, 1)
            count *= tiles
        if self.sums_offset is None:
            self.sums_offset = self.local(count * group[0].dtype.itemsize)
        return steps
