"""Lowering of `align`: vectors of a loop begin where what they store is aligned, in each row elsewhere.

before:  LOOP x (64 at a time): 16 rows of STORE(out[y*4471 + x]), each vector in two lines after:   the first elements
of each row, up to a line; LOOP x: STORE(out[y*4471 + x + s]), s = -y*4471 mod 16; what is left of each row

What is read along another loop (a transpose) is read in squares as ever, and two neighbouring vectors give one that
begins in between.
"""

from __future__ import annotations

from manygrad.runtime.codegen.affine import Position
from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.loops import Body, Looper
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


class Aligner(Looper):
    head = False  # whether the first elements of rows are stored now

    def loop(self, r: UOp, body: Body) -> None:
        if r is self.nest.aligned:
            self.aligned_tiles(r, self.const(0), self.size(r), body)
        else:
            super().loop(r, body)

    def tiles_between(self, r: UOp, begin: Inst, end: Inst, body: Body) -> None:
        if r is self.nest.aligned:
            tile = self.const(self.tile_of(r))
            self.aligned_tiles(
                r, self.emit(Ops.MUL, INDEX, (begin, tile)), self.emit(Ops.MUL, INDEX, (end, tile)), body
            )
        else:
            super().tiles_between(r, begin, end, body)

    def one_tile(self, r: UOp, number: Inst, body: Body) -> None:
        if r is self.nest.aligned:
            self.tiles_between(r, number, self.add(number, self.const(1)), body)
        else:
            super().one_tile(r, number, body)

    def aligned_tiles(self, r: UOp, first: Inst, last: Inst, body: Body) -> None:
        """From `first` up to `last`: whole tiles, moved by less than a vector; with the first one what is before it,
        with the last one the rest."""
        size, tile, n = self.fixed_size(r), self.tile_of(r), self.nest.lanes
        assert size is not None
        whole = self.const((size - n + 1) // tile * tile)

        def under(a: Inst, b: Inst, origin: Inst, extent: int) -> None:
            self.open(
                Inst(Low.IF, dtypes.void, 1, (self.emit(Ops.CMPLT, dtypes.bool, (a, b)),), None, len(self.blocks))
            )
            self.within_tile(r, self.here(origin), extent, body, ragged=True)
            self.close()

        self.head = True
        under(first, self.const(1), self.const(0), n)
        self.head, self.reach = False, n - 1
        inside = self.emit(Ops.CMPLT, dtypes.bool, (last, whole))
        end = self.emit(Ops.WHERE, INDEX, (inside, last, whole))
        index = Inst(Low.LOOP, INDEX, 1, (first, end), tile, len(self.blocks))
        self.open(index)
        self.within_tile(r, index, tile, body, ragged=True)
        self.close()
        self.reach = 0
        under(self.const(size - 1), last, whole, size - whole.arg)

    def moved(self, store: UOp, position: Position) -> tuple[Position, Inst | None] | None:
        """Where the vector at `position` is stored, and which lanes of it, if not all; None: none."""
        lane, n = self.lane, self.lanes
        form = self.analysis.affine(store.src[0].src[1], position)
        assert lane is not None and form is not None
        shift = -form.constant % n
        if self.head:
            return (position, self.emit(Low.FIRST, dtypes.bool, (), shift, n)) if shift else None
        position = {**position, lane: position.get(lane, 0) + shift}
        return (position, self.ragged_mask(position)) if position[lane] < self.tile[lane] + self.reach else None
