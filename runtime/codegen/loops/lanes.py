"""How ranges are cut into tiles, which of them stands in the lanes of vectors, and what that tells of index
expressions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.analysis.describe import in_whole_tiles, is_fixed
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class Lanes:
    """`count` neighbouring iterations of `range` in one vector."""

    range: UOp | None = None
    count: int = 1
    square: UOp | None = None  # a reduce range that packing tiles by the number of lanes, to transpose squares
    singly: UOp | None = None  # a range with a loop over single vectors,
    begins: int = 0  # which begin at any multiple of this (0: of their lanes)


@dataclass(frozen=True, eq=False)
class Tiling:
    """How each range of a kernel is cut, which holds in all of its loop tree: what index expressions may rely on.

    A tile of a range stands in registers: `sizes` of them; of one along which factors are multiplied by dot products
    each lane has so many iterations (`dots`)."""

    loops: tuple[UOp, ...]  # from the outermost to the innermost one
    lanes: Lanes  # of the loops
    sizes: Mapping[UOp, int]  # range -> iterations of its tile
    reduce_lanes: Mapping[UOp, int]  # reduce range -> neighbouring iterations in one vector of partial sums
    dots: Mapping[UOp, int]  # reduce range -> iterations in a lane
    packed: frozenset[UOp]  # ranges of what is packed: that tiles them, too
    _analyses: dict[Lanes, TileAnalysis] = field(default_factory=dict, repr=False)

    def analysis(self, lanes: Lanes) -> TileAnalysis:
        if lanes not in self._analyses:
            self._analyses[lanes] = self._analysis(lanes)
        return self._analyses[lanes]

    def _analysis(self, lanes: Lanes) -> TileAnalysis:
        aligned = {}
        whole = {r for r, t in self.sizes.items() if is_fixed(r) and r.src[0].arg <= t and r is not lanes.square}
        for r, t in self.sizes.items():
            t = self.tile_of(r, lanes) if r is lanes.square else t
            alone = lanes.begins or lanes.count
            even = is_fixed(r) or in_whole_tiles(r, t)
            aligned[r] = t if even and r is not lanes.singly else alone if r is lanes.range else 1
            if r in self.reduce_lanes and r is not lanes.range:  # a REDUCE with other lanes runs it singly
                aligned[r] = 1
                whole.discard(r)
        if lanes.singly is not None:
            whole.discard(lanes.singly)
        for r in self.packed:
            aligned.setdefault(r, 1)
        return TileAnalysis(aligned, lanes.range, lanes.count, frozenset(whole))

    def size_of(self, r: UOp) -> int:
        return self.sizes.get(r, 1)

    def lanes_of(self, group: tuple[UOp, ...], lanes: Lanes) -> tuple[Lanes, UOp | None]:
        """Lanes of REDUCEs that share their ranges: along the range of `lanes` where they depend on it, else along one
        of their own, which is given, too."""
        if lanes.range is not None and lanes.range in ranges_of(group[0]):
            return lanes, None
        split = next((r for r in group[0].src[1:] if r in self.reduce_lanes), None)
        return Lanes(split, self.reduce_lanes[split] if split is not None else 1), split

    def step_of(self, r: UOp, lanes: Lanes) -> int:
        """How many iterations of `r` one vector, or one of the groups in it, takes in."""
        return (lanes.count if r is lanes.range else 1) * self.dots.get(r, 1)

    def positions(self, ranges: frozenset[UOp], tiles: Mapping[UOp, int], lanes: Lanes) -> Iterator[dict[UOp, int]]:
        """The tile positions along `ranges`, in order, the vectorized range innermost; along that, one a vector."""
        tiled = [r for r in (*self.loops, *tiles) if r in ranges and tiles.get(r, 1) > 1]
        tiled = sorted(dict.fromkeys(tiled), key=lambda r: r is lanes.range)
        for at in itertools.product(*(range(0, tiles[r], self.step_of(r, lanes)) for r in tiled)):
            yield dict(zip(tiled, at))

    def tile_of(self, r: UOp, lanes: Lanes) -> int:
        """The tile of `r`; 1 for a range that a REDUCE runs in lanes when another one uses it without."""
        dot = self.dots.get(r, 1)
        if r is lanes.square:
            return lanes.count * dot
        return dot if r in self.reduce_lanes and self.in_vector(r, lanes) == dot else self.size_of(r)

    def in_vector(self, r: UOp, lanes: Lanes) -> int:
        """How many neighbouring iterations of `r` one vector holds."""
        n = self.lanes.count if r is self.lanes.range else self.reduce_lanes.get(r, 1) if r is lanes.range else 1
        return n * self.dots.get(r, 1)


def fixed_size(r: UOp) -> int | None:
    return r.src[0].arg if is_fixed(r) else None


def step_along(analysis: TileAnalysis, index: UOp, r: UOp) -> int | None:
    """How far apart the first two iterations of a tile of `r` read."""
    first, second = (analysis.affine(index, {r: i}) for i in (0, 1))
    if first is None or second is None or second._replace(constant=first.constant) != first:
        return None
    return second.constant - first.constant
