"""The loop nest of a kernel with its decisions: what the Opts make, one after the other, and what is lowered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from manygrad.runtime.codegen.target import WARP
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class LoopNest:
    """`loops`: from the outermost to the innermost one. All else says how they and the ranges of the REDUCEs are run;
    by default one iteration after the other.

    Large: what each kind of Opt decided.
    """

    loops: tuple[UOp, ...]
    vectorized: UOp | None = None  # the loop that is vectorized
    lanes: int = 1
    reduce_lanes: Mapping[UOp, int] = field(default_factory=dict)
    tile: Mapping[UOp, int] = field(default_factory=dict)  # range -> elements
    parallel: int = 0  # so many of the outermost loops are one loop that is cut over the threads
    block: Mapping[UOp, int] = field(default_factory=dict)  # loop -> tiles a block; one entry at most
    bound: Mapping[UOp, int] = field(default_factory=dict)  # loop -> work items of a group that run its tiles
    reduce_bound: Mapping[UOp, int] = field(default_factory=dict)  # reduce range -> work items that it is dealt out to
    warp_matrix: UOp | None = None  # the reduce range along which a warp's matrix instructions add up
    shared: tuple[tuple[UOp, int, int], ...] = ()  # (reduce range, argument, iterations of it that a group copies)
    ring: Mapping[UOp, int] = field(default_factory=dict)  # reduce range -> blocks of it that shared memory holds
    reduce_block: tuple[UOp, int] | None = None
    dots: Mapping[UOp, int] = field(default_factory=dict)  # reduce range -> iterations in a lane
    in_parts: UOp | None = None  # the reduce range of products of float32 that are made of parts
    matrix: UOp | None = None  # the one of those along which a matrix unit adds up
    skipped: frozenset[UOp] = frozenset()  # reduce ranges
    staged: tuple[tuple[UOp, int], ...] = ()  # (loop, argument)
    kept: tuple[tuple[UOp, UOp], ...] = ()  # (reduce range, where the same is computed again)
    online: tuple[tuple[UOp, UOp], ...] = ()  # (reduce range of the sum, of the maximum)
    prefetched: tuple[tuple[UOp, int], ...] = ()  # (range, argument)
    read_ahead: tuple[tuple[int, int], ...] = ()  # (argument, bytes)
    aligned: UOp | None = None  # the loop of vectors that begin where what they store is aligned
    streamed: tuple[int, ...] = ()  # arguments

    def tile_of(self, r: UOp) -> int:
        return self.tile.get(r, 1)

    def lanes_of(self, r: UOp) -> int:
        """How many neighbouring iterations of `r` stand in one vector."""
        return self.lanes if r is self.vectorized else self.reduce_lanes.get(r, 1)

    def next_tile(self, load: UOp, r: UOp) -> UOp | None:
        """The loop of which `load`, read along `r`, is prefetched one tile ahead: the innermost one around `r` that
        moves it."""
        depends, around = ranges_of(load), self.loops[: self.loops.index(r)] if r in self.loops else self.loops
        return next((x for x in reversed(around) if x in depends), None) if r in depends else None

    @property
    def packed_in_blocks(self) -> tuple[UOp, ...]:
        """Loops at which only a block of a blocked reduction is packed: the blocked one and those inside of it."""
        if self.reduce_block is None or not self.block:
            return ()
        return self.loops[self.loops.index(next(iter(self.block))) :]

    def part_of(self, r: UOp) -> int:
        """How many tiles of a loop one index of the parallel loop has."""
        return self.block.get(r, 1) * self.bound.get(r, 1)

    @property
    def group(self) -> tuple[int, ...]:
        """Work items of a group: those of its sums, then the innermost loop's first; of a warp's matrix product those
        of a warp, then the warps; (): there are no groups."""
        if self.warp_matrix is not None:
            return WARP, math.prod(self.bound.values()) // WARP
        across = tuple({*self.reduce_bound.values()})  # (one number)
        return (*across, *(self.bound[r] for r in reversed(self.loops) if r in self.bound))

    @property
    def counts(self) -> tuple[tuple[UOp, int], ...]:
        """(size, step) of the loops that make up the parallel loop."""
        return tuple((r.src[0], self.tile_of(r) * self.part_of(r)) for r in self.loops[: self.parallel])
