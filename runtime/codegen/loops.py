"""Loops: whole tiles, then what is left."""

from __future__ import annotations

from collections.abc import Callable

from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.running import Runner
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

Body = Callable[[], None]


class Looper(Runner):
    def __init__(self, ast: UOp, nest: LoopNest) -> None:
        super().__init__(ast, nest)

    # *** sizes ***

    def size(self, r: UOp) -> Inst:
        return self.value(r.src[0], {})

    def tile_of(self, r: UOp) -> int:
        """The tile of `r`; 1 for a range that a REDUCE runs in lanes when another one uses it without."""
        dot = self.nest.dots.get(r, 1)
        if r is self.square:
            return self.lanes * dot
        return dot if r in self.nest.reduce_lanes and self.lanes_of(r) == dot else self.nest.tile.get(r, 1)

    def lanes_of(self, r: UOp) -> int:
        lanes = self.nest.lanes if r is self.nest.lane else self.nest.reduce_lanes.get(r, 1) if r is self.lane else 1
        return lanes * self.nest.dots.get(r, 1)

    def whole_of(self, r: UOp) -> Inst:
        """How many iterations of `r` whole tiles cover."""
        size, tile = self.fixed_size(r), self.tile_of(r)
        if size is not None:
            return self.const(size // tile * tile)
        rest = self.emit(Ops.MOD, INDEX, (self.size(r), self.const(tile)), True)
        return self.emit(Ops.SUB, INDEX, (self.size(r), rest))

    def tiles_of(self, r: UOp, per: int = 1) -> Inst:
        """How many tiles (groups of `per` tiles) cover `r`."""
        step = self.nest.tile.get(r, 1) * per
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
        """A loop from `begin` to `end` in steps of `tile`; `ragged`: the size of `r`, known at run time, masks the
        lanes."""
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
        """What whole tiles leave of `r`: one smaller tile, or, where its size is not known, vectors or single
        iterations."""
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
        if size is not None and size < tile:
            self.rest(r, origin, body)
            return
        inside = self.emit(Ops.CMPLT, dtypes.bool, (origin, self.whole_of(r)))
        self.branch(
            inside,
            lambda: self.within_tile(r, self.here(origin), tile, body),
            lambda: self.rest(r, self.here(origin), body),
        )
