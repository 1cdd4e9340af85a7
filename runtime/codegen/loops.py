"""Loops: whole tiles, then what is left; and the parallel loop, a part of which is one call of the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.reduction import Reducer
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


class Looper(Reducer):
    def size(self, r: UOp) -> Inst:
        return self.value(r.src[0], {})

    def within_tile(
        self, r: UOp, origin: Inst, tile: int, body: Callable[[], None], ragged: bool = False, size: Inst | None = None
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

    def lanes_of(self, r: UOp) -> int:
        return self.plan.lanes if r is self.plan.lane else self.plan.reduce_lanes.get(r, 1) if r is self.lane else 1

    def loop(self, r: UOp, body: Callable[[], None]) -> None:
        """All of `r`: whole tiles, then what is left."""
        tile, lanes = self.plan.tile.get(r, 1), self.lanes_of(r)
        if lanes == 1 and r in self.plan.reduce_lanes:
            tile = 1
        if r.src[0].op is not Ops.CONST:
            size = self.size(r)
            whole = (
                self.emit(Ops.SUB, INDEX, (size, self.emit(Ops.MOD, INDEX, (size, self.const(tile)), True)))
                if tile > 1
                else size
            )
            self.counted(r, self.const(0), whole, tile, tile, body)
            if tile > 1:
                self.counted(r, whole, size, lanes, lanes, body, ragged=lanes > 1, size=size)
            return
        size_n = r.src[0].arg
        whole_n = size_n // tile * tile
        if whole_n:
            self.counted(r, self.const(0), self.const(whole_n), tile, tile, body, once=whole_n == tile)
        if size_n > whole_n:
            self.rest(r, size_n, whole_n, lanes, body)

    def rest(self, r: UOp, size: int, whole: int, lanes: int, body: Callable[[], None]) -> None:
        self.open()
        self.within_tile(
            r, self.emit(Low.HERE, INDEX, (), whole, here=True), size - whole, body, ragged=(size - whole) % lanes != 0
        )
        self.close()

    def counted(
        self,
        r: UOp,
        begin: Inst,
        end: Inst,
        step: int,
        tile: int,
        body: Callable[[], None],
        once: bool = False,
        **ragged: Any,
    ) -> None:
        if once:
            self.open()
            self.within_tile(r, self.emit(Low.HERE, INDEX, (), 0, here=True), tile, body, **ragged)
        else:
            index = Inst(Low.LOOP, INDEX, 1, (begin, end), step, len(self.blocks))
            self.open(index)
            self.within_tile(r, index, tile, body, **ragged)
        self.close()

    def parallel_loops(self, body: Callable[[], None]) -> None:
        """The outermost loops, as one loop over this call's part of their joint tiles."""
        plan, loops = self.plan, self.plan.loops[: self.plan.parallel]
        begin, end = (self.emit(op, INDEX) for op in (Low.BEGIN, Low.FINISH))
        if len(loops) == 1:
            self.parallel_loop(loops[0], begin, end, body)
            return
        index = Inst(Low.LOOP, INDEX, 1, (begin, end), 1, len(self.blocks))
        self.open(index)
        rest, digits = index, []
        for r in reversed(loops):
            tile = plan.tile.get(r, 1)
            size = self.size(r)
            count = (
                size
                if tile == 1
                else self.emit(Ops.IDIV, INDEX, (self.add(size, self.const(tile - 1)), self.const(tile)), True)
            )
            if r is loops[0]:
                digits.append(rest)
            else:
                digits.append(self.emit(Ops.MOD, INDEX, (rest, count), True))
                rest = self.emit(Ops.IDIV, INDEX, (rest, count), True)
        digits.reverse()
        for i, r in enumerate(loops[:-1]):
            new = self.emit(Ops.CMPEQ, dtypes.bool, (index, begin))
            inner = digits[i + 1]
            for digit in digits[i + 2 :]:
                inner = self.emit(Ops.OR, INDEX, (inner, digit))
            first = self.emit(Ops.CMPEQ, dtypes.bool, (inner, self.const(0)))
            self.changed[r] = self.emit(Ops.OR, dtypes.bool, (new, first))

        def bind(i: int) -> None:
            if i == len(loops):
                body()
                return
            r = loops[i]
            tile, lanes = plan.tile.get(r, 1), self.lanes_of(r)
            origin = self.emit(Ops.MUL, INDEX, (digits[i], self.const(tile))) if tile > 1 else digits[i]
            mine = lambda: self.emit(Ops.ADD, INDEX, (origin, self.const(0)), here=True)  # noqa: E731  not shared with the other branch
            static = r.src[0].op is Ops.CONST
            if tile == 1 or (static and r.src[0].arg % tile == 0):
                self.open()
                self.within_tile(r, origin, tile, lambda: bind(i + 1))
                self.close()
                return
            size = self.size(r)
            whole = self.emit(Ops.SUB, INDEX, (size, self.emit(Ops.MOD, INDEX, (size, self.const(tile)), True)))
            inside = self.emit(
                Ops.CMPLT, dtypes.bool, (origin, self.const(r.src[0].arg // tile * tile) if static else whole)
            )
            condition = Inst(Low.IF, dtypes.void, 1, (inside,), None, len(self.blocks))
            self.open(condition)
            self.within_tile(r, mine(), tile, lambda: bind(i + 1))
            then = (
                self.blocks.pop().insts
            )  # put in place with the other branch: what that one hoists stands before both
            self.open(Inst(Low.ELSE, dtypes.void, 1, (), None, len(self.blocks)))
            if static:
                n, w = r.src[0].arg, r.src[0].arg // tile * tile
                self.rest(r, n, w, lanes, lambda: bind(i + 1))
            else:
                self.counted(r, mine(), size, lanes, lanes, lambda: bind(i + 1), ragged=lanes > 1, size=size)
            other = self.blocks.pop()
            assert other.begin is not None
            end = Inst(Low.END, dtypes.void, 1, (), None, len(self.blocks) - 1)
            self.blocks[-1].insts.extend([condition, *then, other.begin, *other.insts, end])

        bind(0)
        self.close()

    def parallel_loop(self, r: UOp, begin: Inst, end: Inst, body: Callable[[], None]) -> None:
        """One parallel loop: from begin to end in tiles, the last of which may be partial."""
        tile, lanes = self.plan.tile.get(r, 1), self.lanes_of(r)
        first = self.emit(Ops.MUL, INDEX, (begin, self.const(tile))) if tile > 1 else begin
        last = self.emit(Ops.MUL, INDEX, (end, self.const(tile))) if tile > 1 else end
        static = r.src[0].op is Ops.CONST
        if tile == 1 or (static and r.src[0].arg % tile == 0):
            self.counted(r, first, last, tile, tile, body)
            return
        size = self.size(r)
        whole = (
            self.const(r.src[0].arg // tile * tile)
            if static
            else self.emit(Ops.SUB, INDEX, (size, self.emit(Ops.MOD, INDEX, (size, self.const(tile)), True)))
        )
        beyond = self.emit(Ops.CMPLT, dtypes.bool, (whole, last))
        stop = self.emit(Ops.WHERE, INDEX, (beyond, whole, last))
        if not static or r.src[0].arg >= tile:
            self.counted(r, first, stop, tile, tile, body)
        self.open(Inst(Low.IF, dtypes.void, 1, (beyond,), None, len(self.blocks)))
        if static:
            self.rest(r, r.src[0].arg, r.src[0].arg // tile * tile, lanes, body)
        else:
            self.counted(r, whole, size, lanes, lanes, body, ragged=lanes > 1, size=size)
        self.close()
