"""Loops: whole tiles, then what is left; the parallel loop, a part of which is one call of the kernel; blocked loops."""

from __future__ import annotations

from collections.abc import Callable

from manygrad.runtime.codegen.describe import ranges_of
from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opt import Plan
from manygrad.runtime.codegen.reduction import IDENTITY, Reducer
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

Body = Callable[[], None]


class Looper(Reducer):
    def __init__(self, ast: UOp, plan: Plan) -> None:
        super().__init__(ast, plan)
        self.bounds: dict[UOp, tuple[Inst, int]] = {}  # range of a blocked reduction -> (begin, size) of the block
        self.sums_offset: int | None = None  # of a blocked reduction's accumulators in local memory

    # *** sizes ***

    def size(self, r: UOp) -> Inst:
        return self.value(r.src[0], {})

    def tile_of(self, r: UOp) -> int:
        """The tile of `r`; 1 for a range that a REDUCE runs in lanes when another one uses it without."""
        if r is self.square:
            return self.lanes
        return 1 if r in self.plan.reduce_lanes and self.lanes_of(r) == 1 else self.plan.tile.get(r, 1)

    def lanes_of(self, r: UOp) -> int:
        return self.plan.lanes if r is self.plan.lane else self.plan.reduce_lanes.get(r, 1) if r is self.lane else 1

    def whole_of(self, r: UOp) -> Inst:
        """How many iterations of `r` whole tiles cover."""
        size, tile = self.fixed_size(r), self.tile_of(r)
        if size is not None:
            return self.const(size // tile * tile)
        rest = self.emit(Ops.MOD, INDEX, (self.size(r), self.const(tile)), True)
        return self.emit(Ops.SUB, INDEX, (self.size(r), rest))

    def tiles_of(self, r: UOp, per: int = 1) -> Inst:
        """How many tiles (groups of `per` tiles) cover `r`."""
        step = self.plan.tile.get(r, 1) * per
        if step == 1:
            return self.size(r)
        return self.emit(Ops.IDIV, INDEX, (self.add(self.size(r), self.const(step - 1)), self.const(step)), True)

    # *** one loop ***

    def within_tile(
        self, r: UOp, origin: Inst, tile: int, body: Body, ragged: bool = False, size: Inst | None = None
    ) -> None:
        """`body` with `r` bound to a tile at `origin`, in the innermost block."""
        self.origin[r], self.tile[r] = origin, tile
        if ragged:
            self.ragged[r] = size
        waiting = list(self.open_reduces)
        if not self.packing:
            self.pack(r)
            self.reduces_ready()
        body()
        self.open_reduces = waiting
        self.ragged.pop(r, None)
        del self.origin[r], self.tile[r]

    def here(self, x: Inst) -> Inst:
        """`x` as the origin of a tile: what depends on it stays in this block."""
        if x.op is Low.CONST:
            return self.emit(Low.HERE, INDEX, (), x.arg, here=True)
        return self.emit(Ops.ADD, INDEX, (x, self.const(0)), here=True)

    def counted(self, r: UOp, begin: Inst, end: Inst, tile: int, body: Body, ragged: bool = False) -> None:
        """A loop from `begin` to `end` in steps of `tile`; `ragged`: the size of `r`, known at run time, masks the lanes."""
        index = Inst(Low.LOOP, INDEX, 1, (begin, end), tile, len(self.blocks))
        self.open(index)
        self.within_tile(r, index, tile, body, ragged, self.size(r) if ragged else None)
        self.close()

    def once(self, r: UOp, origin: Inst, tile: int, body: Body) -> None:
        """A single tile; its last vector may be partial."""
        self.open()
        self.within_tile(r, self.here(origin), tile, body, ragged=tile % self.lanes_of(r) != 0)
        self.close()

    def rest(self, r: UOp, begin: Inst, body: Body) -> None:
        """What whole tiles leave of `r`: one smaller tile, or, where its size is not known, vectors or single iterations."""
        size, tile, lanes = self.fixed_size(r), self.tile_of(r), self.lanes_of(r)
        if size is not None:
            self.once(r, self.const(size // tile * tile), size % tile, body)
        else:
            changed = self.changed.pop(r, None)  # one vector after the other is packed at the same place: always anew
            self.counted(r, begin, self.size(r), lanes, body, ragged=lanes > 1)
            if changed is not None:
                self.changed[r] = changed

    def loop(self, r: UOp, body: Body) -> None:
        """All of `r`, or of its current block."""
        tile, size = self.tile_of(r), self.fixed_size(r)
        if size is None:
            self.counted(r, self.const(0), self.whole_of(r), tile, body)
            if tile > 1:
                self.rest(r, self.whole_of(r), body)
            return
        begin, size = self.bounds.get(r, (self.const(0), size))
        whole = size // tile * tile
        if whole == tile:
            self.once(r, begin, tile, body)
        elif whole:
            self.counted(r, begin, self.add(begin, self.const(whole)), tile, body)
        if size > whole:
            self.once(r, self.add(begin, self.const(whole)), size - whole, body)

    def tiles_between(self, r: UOp, begin: Inst, end: Inst, body: Body) -> None:
        """The tiles of `r` from number `begin` to `end`, the last of which may be partial."""
        tile, size = self.tile_of(r), self.fixed_size(r)
        first, last = (self.emit(Ops.MUL, INDEX, (x, self.const(tile))) if tile > 1 else x for x in (begin, end))
        if tile == 1 or (size is not None and size % tile == 0):
            self.counted(r, first, last, tile, body)
            return
        whole = self.whole_of(r)
        beyond = self.emit(Ops.CMPLT, dtypes.bool, (whole, last))
        if size is None or size >= tile:
            self.counted(r, first, self.emit(Ops.WHERE, INDEX, (beyond, whole, last)), tile, body)
        self.open(Inst(Low.IF, dtypes.void, 1, (beyond,), None, len(self.blocks)))
        self.rest(r, whole, body)
        self.close()

    def one_tile(self, r: UOp, number: Inst, body: Body) -> None:
        """The tile of `r` of that number."""
        tile, size = self.tile_of(r), self.fixed_size(r)
        origin = self.emit(Ops.MUL, INDEX, (number, self.const(tile))) if tile > 1 else number
        if tile == 1 or (size is not None and size % tile == 0):
            self.open()
            self.within_tile(r, origin, tile, body)
            self.close()
            return
        inside = self.emit(Ops.CMPLT, dtypes.bool, (origin, self.whole_of(r)))
        condition = Inst(Low.IF, dtypes.void, 1, (inside,), None, len(self.blocks))
        self.open(condition)
        self.within_tile(r, self.here(origin), tile, body)
        then = self.blocks.pop().insts  # put in place with the other branch: what that one hoists stands before both
        otherwise = Inst(Low.ELSE, dtypes.void, 1, (), None, len(self.blocks))
        self.open(otherwise)
        self.rest(r, self.here(origin), body)
        other = self.blocks.pop().insts
        end = Inst(Low.END, dtypes.void, 1, (), None, len(self.blocks) - 1)
        self.blocks[-1].insts.extend([condition, *then, otherwise, *other, end])

    # *** the parallel loop ***

    def parallel_loops(self, body: Body) -> None:
        """The outermost loops, as one loop over this call's part of their joint tiles."""
        plan, loops = self.plan, self.plan.loops[: self.plan.parallel]
        begin, finish = (self.emit(op, INDEX) for op in (Low.BEGIN, Low.FINISH))
        blocked = next(iter(plan.block), None)
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
            self.changed[r] = self.emit(Ops.OR, dtypes.bool, (self.emit(Ops.CMPEQ, dtypes.bool, (index, begin)), first))
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
            count = self.tiles_of(r, self.plan.block.get(r, 1))
            found[r] = self.emit(Ops.MOD, INDEX, (rest, count), True)
            rest = self.emit(Ops.IDIV, INDEX, (rest, count), True)
        return found

    # *** blocks ***

    def open_block(self, r: UOp, number: Inst) -> tuple[Inst, Inst]:
        """The first tile of a block of `r` and the one after its last; what the block needs is packed."""
        per, tiles = self.const(self.plan.block[r]), self.tiles_of(r)
        begin = self.emit(Ops.MUL, INDEX, (number, per))
        end = self.add(begin, per)
        end = self.emit(Ops.WHERE, INDEX, (self.emit(Ops.CMPLT, dtypes.bool, (end, tiles)), end, tiles))
        self.block_begin[r] = self.emit(Ops.MUL, INDEX, (begin, self.const(self.plan.tile.get(r, 1))))
        self.pack(r, lambda pack: self.tiles_between(r, begin, end, pack))
        return begin, end

    def block(self, r: UOp, begin: Inst, end: Inst, body: Body) -> None:
        """The tiles of a block of `r`, inside of all other loops."""
        if self.plan.reduce_block is None:
            self.tiles_between(r, begin, end, body)
        else:
            self.blocked_reduction(r, begin, end, *self.plan.reduce_block, body)

    def blocked_reduction(self, r: UOp, begin: Inst, end: Inst, k: UOp, per: int, body: Body) -> None:
        """The reduction over `k` in blocks of `per`, each for all the tiles of `r`; sums in local memory between them."""
        group = [u for u in self.open_reduces if r in ranges_of(u)]
        assert (
            group
            and k is group[0].src[1]
            and all(u.src[1:] == group[0].src[1:] and u.dtype is group[0].dtype for u in group)
        )
        waiting = self.open_reduces
        self.open_reduces = [u for u in waiting if u not in group]
        dtype, tile = group[0].dtype, self.plan.tile.get(r, 1)
        with self.lane_of(group):
            lanes = self.lanes if self.lane is not None else 1
            own = [frozenset(self.plan.loops) & ranges_of(u) for u in group]
        pitch = 0  # elements a tile
        for ranges in own:
            count = lanes
            for x in ranges:
                count *= self.plan.tile.get(x, 1) // (self.plan.lanes if x is self.plan.lane else 1)
            pitch += count
        if self.sums_offset is None:
            self.sums_offset = self.local(self.plan.block[r] * pitch * dtype.itemsize)
        first = self.emit(Ops.MUL, INDEX, (begin, self.const(tile)))
        sums = self.emit(Low.SCRATCH, dtype, (), self.sums_offset)

        def at() -> Inst:
            """Where the sums of the current tile are."""
            tiles = self.emit(Ops.SUB, INDEX, (self.origin[r], first))
            return self.emit(Ops.MUL, INDEX, (tiles, self.const(pitch // tile)))

        def load(i: int, u: UOp, lanes: int) -> Inst:
            return self.emit(Low.LOAD, u.dtype, (sums, at()), i * lanes, lanes, here=True)

        def start() -> None:
            with self.lane_of(group) as split:
                for i, (u, _) in enumerate(self.parts(group, split)):
                    identity = self.const(u.dtype.const(IDENTITY[u.arg](u.dtype)), u.dtype, lanes)
                    self.emit(Low.STORE, dtypes.void, (sums, at(), identity), i * lanes, lanes, here=True)

        def step() -> None:
            with self.lane_of(group) as split:
                accumulators = self.accumulators(group, split, load)
                self.accumulate_all(group, accumulators, split)
                for i, acc in enumerate(a for x in accumulators for a in x.parts):
                    value = self.emit(Low.GET, dtype, (acc,), None, lanes, here=True)
                    self.emit(Low.STORE, dtypes.void, (sums, at(), value), i * lanes, lanes, here=True)

        def finish() -> None:
            with self.lane_of(group) as split:
                self.finish(self.accumulators(group, split, load), split)
            body()

        self.tiles_between(r, begin, end, start)
        size = self.fixed_size(k)
        assert size is not None
        if whole := size // per * per:
            index = Inst(Low.LOOP, INDEX, 1, (self.const(0), self.const(whole)), per, len(self.blocks))
            self.open(index)
            self.bounds[k] = (index, per)
            self.tiles_between(r, begin, end, step)
            self.close()
        if size > whole:
            self.bounds[k] = (self.const(whole), size - whole)
            self.tiles_between(r, begin, end, step)
        del self.bounds[k]
        self.tiles_between(r, begin, end, finish)
        self.open_reduces = waiting
