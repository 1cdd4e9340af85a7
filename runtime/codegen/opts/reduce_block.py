from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, is_fixed, size_max
from manygrad.runtime.codegen.lowered import SCRATCH_BYTES
from manygrad.runtime.codegen.opts.block import SIZES, Block
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, at_least_one, chosen, without
from manygrad.runtime.codegen.opts.parallel import Parallel
from manygrad.runtime.codegen.opts.unroll import Unroll
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

ITERATIONS = (64, 128, 256, 512, 1024)
USUAL = 256  # iterations that a first block has


@dataclass(frozen=True, repr=False)
class ReduceBlock(RangeOpt):
    """All tiles of the block, and all of the loops inside of it, do `iterations` of the outermost reduce range before
    the next ones, of which only so much is packed at a time; sums rest in local memory (Goto and van de Geijn, "Anatomy
    of high-performance matrix multiplication", 2008).

    With `block`, all loops up to the blocked one in the parallel loop, for one group of REDUCEs without `rfactor`; a
    multiple of its unroll.

    before:  for 8 tiles of m: for k in 4096: ..
    after:   for k in 4096 by 256: for 8 tiles of m: for k' in 256: ..      # reduce_block(k, 256)
    """

    kind = "reduce_block"
    needs_block = True
    needs_vectors = True
    iterations: int

    @property
    def unique(self) -> tuple[str, int]:
        return (self.kind, self.axis)

    def wrong(self) -> str | None:
        return at_least_one(self, self.iterations)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, reduce_block=(self.reduced(self.axis, ranges), self.iterations))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        if nest.reduce_block is None:
            return None
        k, per = nest.reduce_block
        if not nest.block or not is_fixed(k) or per % nest.tile_of(k):
            return (
                f"reduce_block({k.arg.id}, {per}) needs a block, a fixed size, "
                f"and a multiple of the tile {nest.tile_of(k)}"
            )
        blocked, tiles = next(iter(nest.block.items()))
        group = [u for u in sig.reduces if blocked in ranges_of(u)]
        reason = _unlike(sig, group, nest, blocked, k)
        if reason is not None:
            return f"reduce_block({k.arg.id}): {reason}"
        inner = nest.packed_in_blocks[1:]
        area = math.prod(nest.tile_of(r) for r in nest.loops)
        area *= math.prod(-(-x.src[0].arg // nest.tile_of(x)) for x in inner)
        nbytes = tiles * area * len(group) * group[0].dtype.itemsize
        return None if nbytes <= SCRATCH_BYTES // 2 else f"{nbytes} bytes of sums, of {SCRATCH_BYTES // 2}"

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [ReduceBlock(nest.reduce_block[0].arg.id, nest.reduce_block[1])] if nest.reduce_block is not None else []

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        """The loops up to the blocked one are cut over the threads."""
        order = search.nest.loops
        if chosen(search.opts, ReduceBlock) is None:
            for r in search.sig.loops:
                for n in SIZES:
                    some = (*without(search.opts, Block, Parallel), Block(r.arg.id, n), Parallel(1 + order.index(r)))
                    for k in search.reduced:
                        written = _written_out(search, k)
                        yield (*some, ReduceBlock(k.arg.id, max(1, USUAL // written) * written))
        if search.nest.block:
            bare = without(search.opts, ReduceBlock, Parallel)
            some = (*bare, Parallel(1 + order.index(next(iter(search.nest.block)))))
            yield (*bare, Parallel(len(search.sig.loops)))
            for k in search.reduced:
                yield from ((*some, ReduceBlock(k.arg.id, n)) for n in ITERATIONS if n < size_max(k))


def _unlike(sig: Signature, group: list[UOp], nest: LoopNest, blocked: UOp, k: UOp) -> str | None:
    """Why the REDUCEs over the blocked loop cannot be run in blocks of `k`."""
    if not group or any(u.src[1:] != group[0].src[1:] or u.dtype is not group[0].dtype for u in group):
        return f"the REDUCEs over the blocked loop {blocked.arg.id} must share their ranges and type"
    if len({nest.vectorized in ranges_of(u) for u in group}) > 1:
        return "some of the REDUCEs run along the vectorized loop and some do not"
    if group[0].src[1] is not k:
        return f"the outermost range of the reduction is {group[0].src[1].arg.id}"
    if len(sig.reduces) > len(group):
        return f"there are REDUCEs that do not depend on the blocked loop {blocked.arg.id}"
    if any(r in nest.reduce_lanes for r in group[0].src[1:]):
        return "the reduction has lanes of its own"
    inside = nest.packed_in_blocks
    if not all(frozenset(inside) <= ranges_of(u) for u in group) or not all(map(is_fixed, inside[1:])):
        return "a loop inside of the blocked one is not of fixed size, or the reduction does not depend on it"
    return None


def _written_out(search: Neighbourhood, k: UOp) -> int:
    """Iterations of `k` that are written out."""
    unroll = chosen(search.opts, Unroll, k.arg.id)
    return unroll.times if unroll is not None else 1
