"""Rows that do not begin at a cache line, stored past the caches: each row's loop begins where a line does.

before:  LOOP j in 0, 16, ..: STORE out[1000 i + j]  (the vectors of every second row lie across two lines)
after:   STORE of the elements before the first line; LOOP j in whole lines: STREAM out[1000 i + j]; STORE of the rest

The values are those of the loop as it was, in other vectors. For kernels whose innermost loop is the lanes', which
reads and writes what lies side by side.
"""

from __future__ import annotations

from manygrad.runtime.codegen.affine import TileAnalysis
from manygrad.runtime.codegen.cost import LEAST_ROW_VECTORS
from manygrad.runtime.codegen.describe import Signature
from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.loops import Body
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.pieces import Pieces
from manygrad.runtime.codegen.target import LINE_BYTES
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


def whole_vectors(store: UOp, lane: UOp, lanes: int) -> bool:
    """Whether every vector stored along `lane` begins at a multiple of its length."""
    analysis = TileAnalysis({lane: lanes}, lane, lanes)
    a = analysis.affine(store.src[0].src[1], {})
    return a is not None and a.stride == 1 and a.constant % lanes == 0 and analysis.alignment(a.terms) % lanes == 0


def begins_anywhere(sig: Signature, nest: LoopNest) -> bool:
    """Whether vectors may begin at any element of the rows that the kernel stores."""
    lane = nest.lane
    if lane is None or lane is not nest.loops[-1] or lane in nest.loops[: nest.parallel] or nest.block or nest.staged:
        return False
    if lane.src[0].op is not Ops.CONST or lane.src[0].arg < LEAST_ROW_VECTORS * nest.lanes:
        return False
    if any(lane in ranges_of(u) for u in sig.reduces) or len({s.src[0].src[1] for s in sig.stores}) > 1:
        return False
    analysis = TileAnalysis({lane: 1}, lane, nest.lanes)
    accesses = [u.src[0] for u in sig.nodes if u.op in (Ops.LOAD, Ops.STORE) and lane in ranges_of(u.src[0])]
    forms = [analysis.affine(index.src[1], {}) for index in accesses]
    return all(len(index.src) == 2 for index in accesses) and all(
        a is not None and not a.table and a.stride == 1 for a in forms
    )


class Liner(Pieces):
    def __init__(self, ast: UOp, nest: LoopNest) -> None:
        super().__init__(ast, nest)
        stores = self.sig.stores
        self.by_lines = (
            all(s.src[0].src[0].arg in nest.streamed for s in stores)
            and not any(nest.lane is not None and whole_vectors(s, nest.lane, nest.lanes) for s in stores)
            and begins_anywhere(self.sig, nest)
        )
        self.line = max(nest.lanes, *(LINE_BYTES // s.src[1].dtype.itemsize for s in stores))  # elements
        self.row: dict[UOp, int] = {}  # the only position of the tile whose results are stored
        self.in_lines = False  # whether vectors are whole lines

    def each_row(self, r: UOp, body: Body) -> None:
        """`body` for all of the rows in the tile, one after the other, in vectors that begin where lines do."""
        lanes, size = self.lanes, self.const(r.src[0].arg)
        line = self.const(self.line)
        self.use_lane(r, lanes, r, begins=1)
        for row in list(self.positions(frozenset(self.nest.loops) - {r})):
            self.row = row
            first = self.first_line(r, line)
            left = self.emit(Ops.SUB, INDEX, (size, first))
            last = self.emit(Ops.SUB, INDEX, (size, self.emit(Ops.MOD, INDEX, (left, line), True)))
            self.some(r, self.const(0), first, body)
            self.in_lines = True
            self.counted(r, first, last, lanes, body)
            self.in_lines = False
            self.some(r, last, size, body)
        self.row = {}
        self.use_lane(r, lanes)

    def first_line(self, r: UOp, line: Inst) -> Inst:
        """The first element of the row that stands at the beginning of a line."""
        self.origin[r] = self.const(0)
        a = self.analysis.affine(self.sig.stores[0].src[0].src[1], self.row)
        assert a is not None
        begin = self.add(self.base(a), self.const(a.constant))
        del self.origin[r]
        into = self.emit(Ops.MOD, INDEX, (begin, line), True)
        return self.emit(Ops.MOD, INDEX, (self.emit(Ops.SUB, INDEX, (line, into)), line), True)

    def some(self, r: UOp, begin: Inst, end: Inst, body: Body) -> None:
        """The elements from `begin` to `end`, less than a line, or none."""
        index = Inst(Low.LOOP, INDEX, 1, (begin, end), self.lanes, len(self.blocks))
        self.open(index)
        self.within_tile(r, index, self.lanes, body, ragged=True, size=end)
        self.close()
