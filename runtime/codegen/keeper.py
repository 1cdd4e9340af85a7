"""Lowering of `compute_at` (see `keep.py`): what a reduction writes to local memory on its way, and what is read
there."""

from __future__ import annotations

from dataclasses import dataclass

from manygrad.runtime.codegen.affine import Position
from manygrad.runtime.codegen.keep import kept_bytes, kept_rows, kept_values, pitch
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.stage import Stager
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.uop import UOp


@dataclass
class Kept:
    """An expression's values along `r` in local memory: a row for each position of the tile."""

    r: UOp
    owners: tuple[UOp, ...]  # the REDUCEs over `r` of them: the values are there once one has run
    rows: tuple[tuple[UOp, int], ...]
    pitch: int
    offset_bytes: int


class Keeper(Stager):
    def __init__(self, ast: UOp, nest: LoopNest) -> None:
        super().__init__(ast, nest)
        self.open_reduces: list[UOp] = list(self.sig.reduces)  # not emitted yet in the open tiles
        self.running: set[UOp] = set()  # REDUCEs whose loops are open
        self.kept: dict[UOp, Kept] = {}  # expression along its reduce range
        self.again: dict[UOp, tuple[Kept, UOp]] = {}  # the same along another range, and that range
        for r, again in nest.kept:
            over = [w for w in self.sig.reduces if w.src[1:] == (r,)]
            for v, u in kept_values(self.sig, r, again).items():
                if u not in self.kept:
                    owners = tuple(w for w in over if u in w.src[0].toposort())
                    at = self.local(kept_bytes(u, r, nest))
                    self.kept[u] = Kept(r, owners, kept_rows(u, r, nest), pitch(r), at)
                self.again[v] = (self.kept[u], again)

    def place(self, u: UOp, kept: Kept, along: UOp, position: Position) -> tuple[Inst, Inst, int]:
        """(pointer, offset, constant) of the element at `position`, `along` being the range of the row."""
        row = 0
        for x, tile in kept.rows:
            row = row * tile + position.get(x, 0)
        a = self.analysis.affine(along, position)
        assert a is not None
        return self.emit(Low.SCRATCH, u.dtype, (), kept.offset_bytes), self.base(a), a.constant + row * kept.pitch

    def staged(self, u: UOp, position: Position) -> Inst | None:
        found = self.again.get(u)
        if found is not None and any(w not in self.open_reduces and w not in self.running for w in found[0].owners):
            pointer, offset, constant = self.place(u, *found, position)
            lanes = self.lanes if found[1] is self.lane else 1
            # in this block: the contents change with every tile of the loops around
            return self.emit(Low.LOAD, u.dtype, (pointer, offset), constant, lanes, here=True)
        return super().staged(u, position)

    def remember(self, u: UOp, position: Position, inst: Inst) -> Inst:
        kept = self.kept.get(u)
        if kept is not None and any(w in self.running for w in kept.owners):
            pointer, offset, constant = self.place(u, kept, kept.r, position)
            value = self.splat(inst, self.lanes if kept.r is self.lane else 1)
            self.emit(Low.STORE, dtypes.void, (pointer, offset, value), constant, value.lanes, here=True)
        return super().remember(u, position, inst)
