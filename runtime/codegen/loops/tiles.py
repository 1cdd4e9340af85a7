"""Loops over the tiles of a range: whole ones, then what is left.

before:  for r in 0..100 (tiles of 16)
after:   for i in 0..96 by 16 { tile r: 16 from i }; { tile r: 4 from 96 }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from manygrad.runtime.codegen.analysis.describe import in_whole_tiles
from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.context import KernelContext
from manygrad.runtime.codegen.loops.index import Index, Numbering
from manygrad.runtime.codegen.loops.lanes import Lanes, fixed_size
from manygrad.runtime.codegen.loops.local import Local
from manygrad.runtime.codegen.loops.prefetch import prefetched
from manygrad.runtime.codegen.loops.tree import For, If, Node, Nodes, Ragged, Scope, StorePart, TileLoop
from manygrad.tensor.uop.uop import UOp

NONE: Mapping[UOp, Index] = {}


@dataclass(frozen=True)
class Around:
    """State around a node that is being built."""

    lanes: Lanes
    tiles: Mapping[UOp, int] = field(default_factory=dict)  # range -> extent of its tile, the outermost first
    origins: Mapping[UOp, Index] = field(default_factory=dict)
    waiting: tuple[UOp, ...] = ()  # REDUCEs that are not computed yet
    running: frozenset[UOp] = frozenset()  # those whose loops are open
    inside: frozenset[UOp] = frozenset()  # ranges of the innermost of them: only what depends on these is nested
    changed: Mapping[UOp, Index] = field(default_factory=dict)  # loop -> whether it has just moved on
    blocks: Mapping[UOp, tuple[Index, int]] = field(default_factory=dict)  # reduce range -> (begin, size) of the block
    groups: Mapping[UOp, Index] = field(default_factory=dict)  # loop -> first iteration of the group's part
    packing: bool = False
    added: tuple[UOp, ...] = ()  # what the innermost reduction adds up
    stored: StorePart = StorePart.ALL
    row: tuple[tuple[UOp, int], ...] = ()


Body = Callable[[Around], Nodes]


@dataclass(frozen=True)
class Tiler:
    """`opened` says what is done first in a tile that has just been opened: (nodes, what is around the rest)."""

    kernel: KernelContext
    local: Local
    opened: Callable[[Tiler, UOp, Around], tuple[Nodes, Around]]
    counters: Numbering = field(default_factory=Numbering)

    # *** one tile, one loop ***

    def tile(self, r: UOp, origin: Index, extent: int, around: Around, body: Body, ragged: Ragged = Ragged.NO,
             size: Index | None = None, reach: int = 0) -> Node:  # fmt: skip
        inner = replace(around, tiles={**around.tiles, r: extent}, origins={**around.origins, r: origin})
        first, inner = self.opened(self, r, inner)
        nodes = prefetched(self.kernel, r, inner.tiles, (*first, *body(inner)), inner.added)
        return TileLoop(r, origin, extent, nodes, ragged, size, reach)

    def counted(self, r: UOp, begin: Index, end: Index, tile: int, around: Around, body: Body,
                ragged: Ragged = Ragged.NO, size: Index | None = None, reach: int = 0) -> Node:  # fmt: skip
        """A loop over whole tiles; with a `size` their vectors may be partial."""
        counter = self.counters.new()
        return For(counter, begin, end, tile, (self.tile(r, counter, tile, around, body, ragged, size, reach),))

    def once(self, r: UOp, origin: Index, tile: int, around: Around, body: Body) -> Node:
        """A single tile; its last vector may be partial."""
        whole = tile % self.kernel.tiling.in_vector(r, around.lanes) == 0
        return Scope((self.tile(r, index.here(origin), tile, around, body, Ragged.NO if whole else Ragged.FIXED),))

    # *** all tiles ***

    def whole_of(self, r: UOp, around: Around) -> Index:
        """How many iterations of `r` whole tiles cover."""
        size, tile = fixed_size(r), self.kernel.tiling.tile_of(r, around.lanes)
        if size is not None:
            return index.const(size // tile * tile)
        if in_whole_tiles(r, tile):
            return index.size(r)
        return index.sub(index.size(r), index.mod(index.size(r), index.const(tile)))

    def tiles_of(self, r: UOp, per: int = 1) -> Index:
        """How many tiles (groups of `per` tiles) cover `r`."""
        step = self.kernel.nest.tile.get(r, 1) * per
        if step == 1:
            return index.size(r)
        return index.div(index.add(index.size(r), index.const(step - 1)), index.const(step))

    def rest(self, r: UOp, begin: Index, around: Around, body: Body) -> Node:
        """The remainder that whole tiles leave of `r`: one smaller tile, or, where its size is not known, vectors or
        single iterations."""
        size, tile = fixed_size(r), self.kernel.tiling.tile_of(r, around.lanes)
        if size is not None:
            return self.once(r, index.const(size // tile * tile), size % tile, around, body)
        # one vector after the other is packed at the same place: always anew
        anew = replace(around, changed={x: c for x, c in around.changed.items() if x is not r})
        lanes = self.kernel.tiling.in_vector(r, around.lanes)
        if lanes == 1:
            return self.counted(r, begin, index.size(r), lanes, anew, body)
        return self.counted(r, begin, index.size(r), lanes, anew, body, Ragged.SIZE, index.size(r))

    def loop(self, r: UOp, around: Around, body: Body) -> Nodes:
        """All of `r`, or of its current block."""
        tile, size = self.kernel.tiling.tile_of(r, around.lanes), fixed_size(r)
        if r is self.kernel.nest.aligned:
            return self.aligned(r, index.const(0), index.size(r), around, body)
        if size is None:
            all_whole = self.counted(r, index.const(0), self.whole_of(r, around), tile, around, body)
            even = in_whole_tiles(r, tile)
            return (all_whole, *(() if even else (self.rest(r, self.whole_of(r, around), around, body),)))
        begin, size = around.blocks.get(r, (index.const(0), size))
        whole = size // tile * tile
        found: list[Node] = []
        if whole == tile:
            found.append(self.once(r, begin, tile, around, body))
        elif whole:
            found.append(self.counted(r, begin, index.add(begin, index.const(whole)), tile, around, body))
        if size > whole:
            found.append(self.once(r, index.add(begin, index.const(whole)), size - whole, around, body))
        return tuple(found)

    def between(self, r: UOp, begin: Index, end: Index, around: Around, body: Body) -> Nodes:
        """The tiles of `r` from number `begin` to `end`, the last of which may be partial."""
        tile, size = self.kernel.tiling.tile_of(r, around.lanes), fixed_size(r)
        if r is self.kernel.nest.aligned:
            return self.aligned(r, index.mul(begin, tile), index.mul(end, tile), around, body)
        first, last = (index.mul(x, tile) if tile > 1 else x for x in (begin, end))
        if in_whole_tiles(r, tile):
            return (self.counted(r, first, last, tile, around, body),)
        whole = self.whole_of(r, around)
        beyond = index.less(whole, last)
        rest = If(beyond, (self.rest(r, whole, around, body),))
        if size is not None and size < tile:
            return (rest,)
        return (self.counted(r, first, index.choose(beyond, whole, last), tile, around, body), rest)

    def one(self, r: UOp, number: Index, around: Around, body: Body) -> Nodes:
        """The tile of `r` of that number."""
        tile, size = self.kernel.tiling.tile_of(r, around.lanes), fixed_size(r)
        if r is self.kernel.nest.aligned:
            return self.between(r, number, index.add(number, index.const(1)), around, body)
        origin = index.mul(number, tile) if tile > 1 else number
        if in_whole_tiles(r, tile):
            return (Scope((self.tile(r, origin, tile, around, body),)),)
        if size is not None and size < tile:
            return (self.rest(r, origin, around, body),)
        inside = index.less(origin, self.whole_of(r, around))
        whole = self.tile(r, index.here(origin), tile, around, body)
        return (If(inside, (whole,), (self.rest(r, index.here(origin), around, body),)),)

    def aligned(self, r: UOp, first: Index, last: Index, around: Around, body: Body) -> Nodes:
        """From `first` up to `last` in vectors that begin where what they store is aligned, in each row elsewhere:
        whole tiles, moved by less than a vector; with the first one what is before it, with the last one the rest.

        before:  for x by 64: 16 rows of STORE out[y*4471 + x], each vector in two lines
        after:   the first elements of each row, up to a line;
                 for x by 64: STORE out[y*4471 + x + s], s = -y*4471 mod 16; what is left of each row

        What is read along another loop (a transpose) is read in squares all the same, and two neighbouring vectors
        give one that begins in between.
        """
        size, tile, n = fixed_size(r), self.kernel.tiling.tile_of(r, around.lanes), self.kernel.nest.lanes
        assert size is not None
        whole = (size - n + 1) // tile * tile

        def under(condition: Index, origin: int, extent: int, around: Around) -> Node:
            at = index.here(index.const(origin))
            return If(condition, (self.tile(r, at, extent, around, body, Ragged.FIXED),))

        head = under(index.less(first, index.const(1)), 0, n, replace(around, stored=StorePart.BEFORE))
        end = index.choose(index.less(last, index.const(whole)), last, index.const(whole))
        moved = self.counted(r, first, end, tile, around, body, Ragged.FIXED, None, n - 1)
        return head, moved, under(index.less(index.const(size - 1), last), whole, size - whole, around)
