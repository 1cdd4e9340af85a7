from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, in_whole_tiles, is_fixed
from manygrad.runtime.codegen.kernel.dots import is_dot, row_step, step_of
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, without
from manygrad.runtime.codegen.target import LANE_BYTES, SQUARES
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Matrix(RangeOpt):
    """The products of a tile's rows by its vectors, along a tile of the reduction, are instructions of a matrix unit
    (AMX): each adds those of 16 rows by a vector's lanes by as many groups of `tensorize`.

    The kernel's one REDUCE over the range, which has no other; of the factors one is packed along the vectorized loop
    (`cache_read`), the other lies contiguously along the reduction, its rows at a fixed distance, or is packed so along
    them, one after the other. The range's tile cuts it evenly.

    before:  for k in 64 by 2: for i in 16: s[i] = dot(a[i, k:k+2], b[k:k+2, n:n+16], s[i])
    after:   for k in 64 by 32: s[0:16] += a[0:16, k:k+32] @ b[k:k+32, n:n+16]           # matrix(k)
    """

    kind = "matrix"
    changes_sums = True
    needs_vectors = True

    @property
    def unique(self) -> str:
        return self.kind

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, matrix=self.reduced(self.axis, ranges))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        k = nest.matrix
        if k is None:
            return None
        over = [u for u in sig.reduces if k in u.src[1:]]
        if k not in nest.dots or len(over) != 1 or not is_dot(over[0].src[0]) or over[0].src[1:] != (k,):
            return f"matrix({k.arg.id}): not of one sum of products over the range alone, tensorized"
        (u,), dot = over, over[0].src[0].arg
        if dot.rows == 1 or nest.vectorized not in ranges_of(u) or nest.lanes * LANE_BYTES != dot.vector_bytes:
            return f"matrix({k.arg.id}): the machine has no such unit, or the vectors are not its"
        if k in nest.reduce_lanes or nest.online or nest.kept or nest.bound:
            return f"matrix({k.arg.id}): its sums are not cut"
        if not in_whole_tiles(k, nest.tile_of(k)) or nest.tile_of(k) > dot.most_terms:
            return f"matrix({k.arg.id}): the range's tile cuts it evenly, into at most {dot.most_terms} iterations"
        rows = [r for r in nest.loops if r is not nest.vectorized and r in ranges_of(u) and nest.tile_of(r) > 1]
        if len(rows) > 1 or any(n > SQUARES for n in matrices(nest, u)):
            return f"matrix({k.arg.id}): a tile is at most {SQUARES} squares high, of one loop, and {SQUARES} wide"
        if nest.reduce_block is not None and (not rows or nest.tile_of(rows[0]) % dot.rows):
            return f"matrix({k.arg.id}): only sums of whole squares rest between blocks of the reduction"
        return _wrong_factors(nest, k, u, rows)

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [] if nest.matrix is None else [Matrix(nest.matrix.arg.id)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        if search.sums:
            yield without(search.opts, Matrix)
            for r in search.nest.dots:
                yield (*without(search.opts, Matrix), Matrix(r.arg.id))


def _wrong_factors(nest: LoopNest, k: UOp, u: UOp, rows: list[UOp]) -> str | None:
    """Why its factors are not as a matrix unit reads them."""
    packed, of = {slot: loop for loop, slot in nest.staged}, f"matrix({k.arg.id})"
    columns = [s for s in u.src[0].src if nest.vectorized in ranges_of(s)]
    if len(columns) != 1:
        return f"{of}: not one factor along the vectorized loop, and one beside it"
    loads = [
        [v for v in s.toposort() if v.op is Ops.LOAD] for s in sorted(u.src[0].src, key=lambda s: s not in columns)
    ]
    if any(len(found) != 1 or len(found[0].src[0].src) > 2 for found in loads):
        return f"{of}: a factor is not one value that is read, or is read under a condition"
    ((column,), (row,)) = loads
    if packed.get(column.src[0].src[0].arg) is not nest.vectorized or any(r in ranges_of(column) for r in rows):
        return f"{of}: the factor along the vectorized loop is not packed at it, for all rows"
    in_parts = u.src[0].arg.in_parts
    if (loop := packed.get(row.src[0].src[0].arg)) is not None:
        lies = step_of(row, loop) == 1 or (in_parts and step_of(row, k) == 1)
        if [loop] != rows or not lies or not is_fixed(loop) or loop in nest.block:
            return f"{of}: the other factor is not packed along its rows, of a fixed number side by side, tile by tile"
    elif in_parts or row not in u.src[0].src or step_of(row, k) != 1 or any(row_step(row, r) is None for r in rows):
        return f"{of}: the other factor does not lie along the range, its rows at a fixed distance"
    return None


def matrix_rows(nest: LoopNest, u: UOp) -> UOp | None:
    """The loop whose tile is the rows of the sums `u`; None: there is one row."""
    return next((r for r in nest.loops if r is not nest.vectorized and r in ranges_of(u) and nest.tile_of(r) > 1), None)


def turned_rows(nest: LoopNest, u: UOp, value: UOp) -> bool:
    """Whether `value`, which is packed, is the rows of the sums `u` of a matrix unit: they are packed one after the
    other."""
    return nest.matrix in u.src[1:] and value in u.src[0].src and nest.vectorized not in ranges_of(value)


def matrices(nest: LoopNest, u: UOp) -> tuple[int, int]:
    """How many squares of sums a tile is high and wide."""
    rows = matrix_rows(nest, u)
    high = nest.tile_of(rows) if rows is not None else 1
    assert nest.vectorized is not None
    return -(-high // u.src[0].arg.rows), -(-max(nest.tile_of(nest.vectorized), nest.lanes) // nest.lanes)
