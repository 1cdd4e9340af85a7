"""What the heuristic asks of a kernel: strides, what is read, which reduction matters, what was decided so far; and of
the machine."""

from __future__ import annotations

from manygrad.runtime.codegen.affine import TileAnalysis
from manygrad.runtime.codegen.describe import Signature, signature, volume
from manygrad.runtime.codegen.opts import Opt, Reorder, Tile, Vectorize
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


class Facts:
    def __init__(self, ast: UOp, machine: Machine) -> None:
        self.sig: Signature = signature(ast)
        self.machine = machine
        self.lanes = machine.vector_bytes // self.element_bytes()
        self.loads = [u for u in self.sig.nodes if u.op is Ops.LOAD]
        self._analyses: dict[UOp, TileAnalysis] = {}
        self.opts: list[Opt] = []
        self.order = list(self.sig.loops)
        self.under = {u: [v for v in u.src[0].toposort() if v.op is Ops.LOAD] for u in self.sig.reduces}

    def element_bytes(self) -> int:
        """The width that vectors are counted in: the widest float computed, else the widest integer stored or loaded.
        Without a reduction, whose order of sums follows from it, what is the same for all iterations (a learning rate
        in float64) does not count."""
        nodes = [u for u in self.sig.nodes if self.sig.reduces or ranges_of(u)]
        seen: set[DType] = {
            u.dtype
            for u in nodes
            if u.op not in (Ops.SINK, Ops.STORE, Ops.PARAM, Ops.INDEX) and u.dtype is not dtypes.index
        }
        floats = [
            4 if d.is_half else d.itemsize
            for d in seen
            if d.is_float and any(u.dtype is d and u.op is not Ops.CAST for u in nodes)
        ]
        stored = [s.src[1].dtype.itemsize for s in self.sig.stores]
        return max(floats, default=0) or max([d.itemsize for d in seen if not d.is_float] + stored, default=4)

    def stride(self, index: UOp, r: UOp) -> int | None:
        """How the offset of `index` changes along `r` within a vector; None: irregularly, 2 also for a known
        pattern."""
        analysis = self._analyses.get(r)
        if analysis is None:
            analysis = self._analyses[r] = TileAnalysis({r: self.lanes}, r, self.lanes)
        a = analysis.affine(index.src[1], {})
        if a is None:
            return None
        return 2 if a.table else a.stride

    def contiguous(self, loads: list[UOp], r: UOp) -> bool:
        """All `loads` are contiguous along `r` or independent of it, and some are contiguous."""
        strides = [self.stride(u.src[0], r) for u in loads]
        return 1 in strides and all(s in (0, 1) for s in strides)

    def main_reduce(self) -> UOp | None:
        """The REDUCE with the most iterations."""
        return max(self.sig.reduces, key=lambda u: volume(ranges_of(u) | frozenset(u.src[1:])), default=None)

    def tile_of(self, r: UOp) -> int:
        """Elements of `r` in a tile, as decided so far."""
        tile, vector = chosen(self.opts, Tile, r.arg[0]), chosen(self.opts, Vectorize, r.arg[0])
        return max(tile.size if tile is not None else 1, vector.lanes if vector is not None else 1)

    def reorder(self, wanted: list[UOp]) -> None:
        for i, r in enumerate(wanted):
            if self.order[i] is not r:
                self.opts.append(Reorder(r.arg[0], self.order[i].arg[0]))
                self.order.remove(r)
                self.order.insert(i, r)
