"""Lowers a kernel AST under a list of Opts to the linear form of `lowered.py`.

The expression graph is evaluated once per register-tile position. What does not depend on a position is shared through
a memo; what does not depend on an inner loop is emitted in the block of the outermost loop it does depend on. So of a
matrix product only the FMA is emitted per pair (row, column vector), a row's broadcast load once per row, and its
address outside the reduction.

before:  STORE(INDEX(c, m*N+n), REDUCE(MUL(LOAD(INDEX(a, m*K+k)), LOAD(INDEX(b, k*N+n))), k), m, n)
after:   LOOP m.. LOOP n.. ACC x 24; LOOP k.. LOAD b x 4, LOAD a x 6, FMA x 24; END; STORE x 24; END END

Order of a reduction: ascending in its ranges; with `rfactor`, element k goes to partial sum k mod tile, and the partial
sums are folded pairwise at the end. It does not depend on the tiles of the loops.

The parts: `emit` (blocks, sharing), `evaluate` (values, loads), `quads` (four bytes in a lane), `stage` (packing),
`keeper` (rows kept), `reduction`, `loops`, `align` and `lines` (vectors that begin where lines do: of a transpose, of
rows), `pieces`, and here the stores and the nest as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

from manygrad.runtime.codegen.affine import Affine, Position
from manygrad.runtime.codegen.describe import kernel_name
from manygrad.runtime.codegen.lines import Liner
from manygrad.runtime.codegen.lowered import Inst, Low, Program
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.turn import runs_of_stores, store_transposed
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

COMBINE = {
    "add": Ops.ADD,
    "mul": Ops.MUL,
    "max": Ops.MAX,
}  # a STORE's arg: how the value meets what is there ("set": it takes its place)


class Lowerer(Liner):
    def stores(self) -> None:
        """All STOREs at all positions of the tile; at one position, every value is computed before the first is
        stored."""
        if self.nest.aligned is not None:
            for position in self.positions(frozenset(self.nest.loops)):
                if (moved := self.moved(self.sig.stores[0], position)) is not None:
                    self.prepare_store(self.sig.stores[0], *moved)()
            return
        runs, rest = runs_of_stores(self)
        for run in runs:
            store_transposed(self, self.sig.stores[0], run)
        for position in (p for p in rest if self.row.items() <= p.items()):
            ready = [self.prepare_store(u, position) for u in self.sig.stores]
            for write in ready:
                write()

    def prepare_store(self, u: UOp, position: Position, some: Inst | None = None) -> Callable[[], None]:
        """`some`: the lanes that are stored, if not those of the range."""
        index = u.src[0]
        value = self.value(u.src[1], position)
        valid = self.conjunction(self.value(index.src[2], position)) if len(index.src) == 3 else None
        if valid is not None and valid.op is Low.CONST:
            return lambda: None
        a = self.analysis.affine(index.src[1], position)
        pointer = self.pointer(index.src[0])
        if self.lane is None:
            lanes, guard = 1, valid
        else:
            lanes, guard = self.lanes, self.conjunction(valid, some or self.ragged_mask(position))
        stream = guard is None and a is not None and self.streams(u, a)
        if a is not None and (lanes == 1 or a.stride == 1):
            offset, constant = self.base(a), a.constant
        else:
            offset, constant = self.splat(self.value(index.src[1], position), lanes), 0
        if guard is not None and offset.lanes > 1:
            guard = self.splat(guard, lanes)
        guards = () if guard is None else (guard,)
        value = self.splat(value, lanes)

        def write() -> None:
            new = value
            if u.arg in COMBINE:
                old = self.emit(Low.LOAD, value.dtype, (pointer, offset, *guards), constant, lanes, here=True)
                terms = [old, value]
                if value.dtype.is_half:
                    terms = [self.emit(Ops.CAST, dtypes.float32, (x,), None, lanes, here=True) for x in terms]
                new = self.emit(COMBINE[u.arg], terms[0].dtype, tuple(terms), None, lanes, here=True)
                if value.dtype.is_half:
                    new = self.emit(Ops.CAST, value.dtype, (new,), None, lanes, here=True)
            op = Low.STREAM if stream else Low.STORE
            self.emit(op, dtypes.void, (pointer, offset, new, *guards), constant, lanes, here=True)

        return write

    def streams(self, u: UOp, a: Affine) -> bool:
        """Whether a STORE goes past the caches: planned so, a whole vector, at a multiple of it."""
        if u.src[0].src[0].arg not in self.nest.streamed or a.stride != 1:
            return False
        return self.in_lines or (self.analysis.alignment(a.terms) % self.lanes == 0 and a.constant % self.lanes == 0)

    def run(self, name: str) -> Program:
        nest = self.nest

        def run_loops(i: int) -> None:
            if i == len(nest.loops):
                self.stores()
            elif self.by_lines and nest.loops[i] is nest.lane:
                self.each_row(nest.loops[i], self.stores)
            else:
                self.loop(nest.loops[i], lambda: run_loops(i + 1))

        self.reduces_ready()
        if nest.parallel:
            self.parallel_loops(self.stores if nest.reduce_block is not None else lambda: run_loops(nest.parallel))
        else:
            run_loops(0)
        return Program(
            name, tuple(self.blocks[0].insts), self.sig.variables, self.sig.slots, nest.counts, self.scratch_bytes
        )


def lower(ast: UOp, nest: LoopNest, name: str | None = None) -> Program:
    """The program of `ast` of the loops in `nest`."""
    return Lowerer(ast, nest).run(name or kernel_name(ast))
