from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, is_fixed
from manygrad.runtime.codegen.kernel.dots import is_dot
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, without
from manygrad.runtime.codegen.target import FRAGMENT_BYTES, WARP_BESIDE, WARP_DOWN
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

SIDES = (4, 8, 16)  # rows, or columns, of a thread's tile


@dataclass(frozen=True, repr=False)
class WarpMatrix(RangeOpt):
    """The products of a group's tiles are matrix instructions of its warps (mma): each adds those of 16 rows by 8
    columns, 16 iterations of the reduction at a time, whose operands and sums are shared out over the registers of the
    warp's threads.

    Which row of the product is which row of the instruction is free, so a warp's threads lie 8 by 4 over its part, and
    the sums of each thread's own tile are in its own registers: what follows the product needs no exchange.

    The kernel's one REDUCE, over the range alone, with a tile of 32 iterations (16 of float32, of which factors are
    rounded to tf32). Both factors, with what they are made of (conversions, masks), are shared by the group, that many
    iterations at a time; one changes along the vectorized loop, the other along one more loop, and both loops are
    bound. Sizes need not be multiples of anything: what is beyond is read as something else, or as zeros along the
    reduction, and not stored.

    before:  group for m: group for n: for 32 of k: { shared a, b; for k in 32: c[8, 8] += a[8, k] * b[k, 8] }
    after:   for each warp of the group: for each thread of 32: for 32 of k: { shared a, b;
             c[64, 32] of the warp += a[64, 32] @ b[32, 32] }                                # warp_matrix(k)
    """

    kind = "warp_matrix"
    changes_sums = True
    needs_vectors = True

    @property
    def unique(self) -> str:
        return self.kind

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, warp_matrix=self.reduced(self.axis, ranges))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        k = nest.warp_matrix
        if k is None:
            return None
        at = f"warp_matrix({k.arg.id})"
        if len(sig.reduces) != 1 or sig.reduces[0].src[1:] != (k,) or not is_dot(sig.reduces[0].src[0]):
            return f"{at}: not the kernel's one sum of products over the range alone"
        (u,) = sig.reduces
        dot = u.src[0].arg
        if not dot.columns or nest.tile_of(k) != dot.block_terms:
            return f"{at}: the machine has no such unit, or the range's tile is not of {dot.block_terms} iterations"
        sides = product_sides(nest, u)
        if sides is None:
            return f"{at}: its factors are not one along the vectorized loop, and one along another that is bound"
        rows, columns = sides
        if not all(map(is_fixed, (k, *sides))):
            return f"{at}: a size is not fixed"
        if any(nest.tile_of(r) not in SIDES for r in sides) or nest.lanes not in (2, 4, 8):
            return f"{at}: a thread's tile has {', '.join(map(str, SIDES))} rows and columns, in vectors"
        if nest.bound[rows] & (nest.bound[rows] - 1) or nest.bound[columns] & (nest.bound[columns] - 1):
            return f"{at}: the numbers of a group's threads are powers of two"
        if nest.bound[rows] % WARP_DOWN or nest.bound[columns] % WARP_BESIDE or {*nest.bound} != {*sides}:
            return f"{at}: a group's threads lie {WARP_DOWN} by {WARP_BESIDE} in each warp"
        if nest.reduce_bound or any(nest.tile_of(r) > 1 for r in nest.loops if r not in sides):
            return f"{at}: no other loop has a tile, and no sum is dealt out"
        return _wrong_factors(sig, nest, u, sides)

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [] if nest.warp_matrix is None else [WarpMatrix(nest.warp_matrix.arg.id)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        if search.sums:
            yield without(search.opts, WarpMatrix)
            for r in search.reduced:
                yield (*without(search.opts, WarpMatrix), WarpMatrix(r.arg.id))


def product_sides(nest: LoopNest, u: UOp) -> tuple[UOp, UOp] | None:
    """The loops of the rows and the columns of the product `u`: those that are bound, the one with vectors last, if
    each factor has one of them."""
    factors = [ranges_of(s) for s in u.src[0].src]
    columns = nest.vectorized
    rows = next((r for r in nest.bound if r is not columns), None)
    if columns not in nest.bound or rows is None or columns is None:
        return None
    own = [(rows in f, columns in f) for f in factors]
    return (rows, columns) if sorted(own) == [(False, True), (True, False)] else None


def _wrong_factors(sig: Signature, nest: LoopNest, u: UOp, sides: tuple[UOp, UOp]) -> str | None:
    """Why a group cannot share what it multiplies."""
    at, grid = f"warp_matrix({u.src[1].arg.id})", frozenset(nest.loops[: nest.parallel])
    written = {s.src[0].src[0].arg for s in sig.stores}
    for factor in u.src[0].src:
        nodes = factor.toposort()
        if any(v.op is Ops.REDUCE for v in nodes) or not ranges_of(factor) - {u.src[1]} <= grid:
            return f"{at}: a factor reads another sum, or changes with a loop that is not in the grid"
        if any(v.op is Ops.LOAD and v.src[0].src[0].arg in written for v in nodes):
            return f"{at}: the kernel writes what it multiplies"
    if nest.shared or nest.online or nest.skipped or nest.kept or nest.dots:
        return f"{at}: nothing else is shared, kept, skipped or grouped"
    return None


def fragment_bytes(nest: LoopNest, loop: UOp) -> int:
    """Shared memory of a block of a factor, of which a group's part is along the loop."""
    return nest.tile_of(loop) * nest.part_of(loop) * FRAGMENT_BYTES


def fragments_bytes(sig: Signature, nest: LoopNest) -> int:
    """Shared memory of both factors; 0 without such a product."""
    if nest.warp_matrix is None:
        return 0
    factors = sig.reduces[0].src[0].src
    block = sum(fragment_bytes(nest, r) for f in factors for r in nest.bound if r in ranges_of(f))
    return block * nest.ring.get(nest.warp_matrix, 1)


def is_ragged(nest: LoopNest, r: UOp) -> bool:
    """Whether groups are cut unevenly along one of the loops of a warp's product."""
    return nest.warp_matrix is not None and r in nest.bound and bool(r.src[0].arg % (nest.tile_of(r) * nest.part_of(r)))


def warps_beside(nest: LoopNest, columns: UOp) -> int:
    """Warps of a group side by side."""
    return nest.bound[columns] // WARP_BESIDE
