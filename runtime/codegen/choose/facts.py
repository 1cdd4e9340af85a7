"""Facts that the decisions ask of a kernel and of the machine: strides, what is read, which reduction matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.analysis.describe import Signature, signature, volume
from manygrad.runtime.codegen.cost import ELEMENT_BYTES
from manygrad.runtime.codegen.kernel.legalize import as_written
from manygrad.runtime.codegen.opts import Opts, Reorder, Tile, Vectorize
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, eq=False)
class Facts:
    """A kernel on a machine. `written`: what `legalize` put in place of an operation -> that operation, which is what
    costs count: an exponential is one, whatever polynomial a machine makes of it."""

    ast: UOp
    machine: Machine
    written: Mapping[UOp, UOp] = field(default_factory=dict)

    @cached_property
    def sig(self) -> Signature:
        return signature(self.ast)

    @cached_property
    def lanes(self) -> int:
        """Elements of a vector."""
        return self.machine.vector_bytes // self._element_bytes

    @cached_property
    def operations(self) -> tuple[UOp, ...]:
        """The nodes as they were before `legalize`, sources first."""
        return tuple(as_written(self.ast, self.written)) if self.written else self.sig.nodes

    @cached_property
    def loads(self) -> list[UOp]:
        return [u for u in self.sig.nodes if u.op is Ops.LOAD]

    @cached_property
    def loads_of(self) -> dict[UOp, list[UOp]]:
        """REDUCE -> the LOADs below it."""
        return {u: [v for v in u.src[0].toposort() if v.op is Ops.LOAD] for u in self.sig.reduces}

    @cached_property
    def main(self) -> UOp | None:
        """The REDUCE with the most iterations."""
        return max(self.sig.reduces, key=lambda u: volume(ranges_of(u) | frozenset(u.src[1:])), default=None)

    def levels(self, main: UOp) -> tuple[UOp, ...]:
        """`main` and the REDUCEs that add up nothing but it: sums of blocks, of their sums, and so on."""
        found = [main]
        while outer := [u for u in self.sig.reduces if u.src[0] is found[-1]]:
            found.append(outer[0])
        return tuple(found)

    def reduced(self, main: UOp) -> frozenset[UOp]:
        """The ranges over which `main` and its levels run."""
        return frozenset(r for u in self.levels(main) for r in u.src[1:])

    @cached_property
    def fixed_loops(self) -> bool:
        """Whether the sizes of all loops are constants."""
        return all(r.src[0].op is Ops.CONST for r in self.sig.loops)

    @cached_property
    def _element_bytes(self) -> int:
        """The width that vectors are counted in: the widest float computed, else the widest integer stored or loaded.
        Without a reduction, whose order of sums follows from it, what is the same for all iterations (a learning rate
        in float64) does not count."""
        nodes = [u for u in self.operations if self.sig.reduces or ranges_of(u)]
        seen: set[DType] = {
            u.dtype
            for u in nodes
            if u.op not in (Ops.SINK, Ops.STORE, Ops.PARAM, Ops.INDEX) and u.dtype is not dtypes.index
        }
        computed = {u.dtype for u in nodes if u.op is not Ops.CAST}
        floats = [ELEMENT_BYTES if d.is_half else d.itemsize for d in seen if d.is_float and d in computed]
        stored = [s.src[1].dtype.itemsize for s in self.sig.stores]
        return max(floats, default=0) or max([d.itemsize for d in seen if not d.is_float] + stored, default=4)

    @cached_property
    def _analyses(self) -> dict[UOp, TileAnalysis]:
        return {}

    def stride(self, index: UOp, r: UOp) -> int | None:
        """How the offset of `index` changes along `r` within a vector; None: irregularly, 2 also for a known
        pattern."""
        if (index, r) not in self._strides:
            self._strides[index, r] = self._stride(index, r)
        return self._strides[index, r]

    @cached_property
    def _strides(self) -> dict[tuple[UOp, UOp], int | None]:
        return {}

    def _stride(self, index: UOp, r: UOp) -> int | None:
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

    def stored_along(self, r: UOp) -> bool:
        """Whether all results lie side by side along `r`."""
        return all(self.stride(s.src[0], r) == 1 for s in self.sig.stores)

    def term(self, u: UOp) -> UOp:
        """The term that a REDUCE joins, as it was written."""
        term = self.written.get(u, u).src[0]
        return self.written.get(term, term)


def touched(load: UOp) -> int:
    """Elements that a load reads in all, at most."""
    low, high = bounds(load.src[0].src[1])
    return min(volume(ranges_of(load)), high - low + 1)


def touched_bytes(load: UOp) -> int:
    return touched(load) * load.dtype.itemsize


def largest_bytes(loads: list[UOp]) -> int:
    """Bytes of what one of `loads` reads in all, at most; 0 where there is none."""
    return max(map(touched_bytes, loads), default=0)


def slot(access: UOp) -> int:
    """The argument that a LOAD or STORE accesses."""
    number: int = access.src[0].src[0].arg
    return number


def is_masked(load: UOp) -> bool:
    return len(load.src[0].src) == 3


# *** what was decided so far ***


def tile_of(opts: Opts, r: UOp) -> int:
    """Elements of `r` in a tile."""
    tile, vector = chosen(opts, Tile, r.arg.id), chosen(opts, Vectorize, r.arg.id)
    return max(tile.size if tile is not None else 1, vector.lanes if vector is not None else 1)


def tiles_along(opts: Opts, r: UOp, size: int) -> int:
    """How many tiles `size` iterations of `r` are."""
    return -(-size // tile_of(opts, r))


def order_of(facts: Facts, opts: Opts) -> list[UOp]:
    """The loops, outer first."""
    order = list(facts.sig.loops)
    for o in opts:
        if isinstance(o, Reorder):
            r = next(x for x in order if x.arg.id == o.axis)
            order.remove(r)
            order.insert(next(i for i, x in enumerate(order) if x.arg.id == o.outside), r)
    return order


def reordered(facts: Facts, opts: Opts, wanted: list[UOp]) -> Opts:
    """The list with the loops in the order `wanted`."""
    order = order_of(facts, opts)
    for i, r in enumerate(wanted):
        if order[i] is not r:
            opts = (*opts, Reorder(r.arg.id, order[i].arg.id))
            order.remove(r)
            order.insert(i, r)
    return opts
