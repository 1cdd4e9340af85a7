"""Which range stands in the lanes of vectors, and what each choice of it tells of index expressions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest, in_whole_tiles, is_fixed
from manygrad.tensor.uop.ops import Ops
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


class KernelContext:
    """The kernel as building and emission see it: its expressions, its nest, an analysis for each choice of lanes."""

    def __init__(self, sig: Signature, nest: LoopNest) -> None:
        self.sig, self.nest = sig, nest
        slots = {slot for _, slot in nest.staged}  # packing tiles reduce ranges, too
        self._also_tiled = {
            r for u in sig.nodes if u.op is Ops.LOAD and u.src[0].src[0].arg in slots for r in ranges_of(u)
        }
        self._analyses: dict[Lanes, TileAnalysis] = {}

    def analysis(self, lanes: Lanes) -> TileAnalysis:
        if lanes not in self._analyses:
            self._analyses[lanes] = self._analysis(lanes)
        return self._analyses[lanes]

    def _analysis(self, lanes: Lanes) -> TileAnalysis:
        aligned = {}
        tiles, lane = self.nest.tile, lanes.range
        whole = {r for r, t in tiles.items() if is_fixed(r) and r.src[0].arg <= t and r is not lanes.square}
        for r, t in tiles.items():
            t = self.tile_of(r, lanes) if r is lanes.square else t
            alone = lanes.begins or lanes.count
            even = is_fixed(r) or in_whole_tiles(r, t)
            aligned[r] = t if even and r is not lanes.singly else alone if r is lane else 1
            if r in self.nest.reduce_lanes and r is not lane:  # a REDUCE with other lanes runs it singly
                aligned[r] = 1
                whole.discard(r)
        if lanes.singly is not None:
            whole.discard(lanes.singly)
        for r in self._also_tiled:
            aligned.setdefault(r, 1)
        return TileAnalysis(aligned, lane, lanes.count, frozenset(whole))

    @property
    def lanes(self) -> Lanes:
        """Lanes of the loops."""
        return Lanes(self.nest.lane, self.nest.lanes if self.nest.lane is not None else 1)

    def lanes_of(self, group: tuple[UOp, ...], lanes: Lanes) -> tuple[Lanes, UOp | None]:
        """Lanes of REDUCEs that share their ranges: along the range of `lanes` where they depend on it, else along one
        of their own, which is given, too."""
        if lanes.range is not None and lanes.range in ranges_of(group[0]):
            return lanes, None
        split = next((r for r in group[0].src[1:] if r in self.nest.reduce_lanes), None)
        return Lanes(split, self.nest.reduce_lanes[split] if split is not None else 1), split

    def step_of(self, r: UOp, lanes: Lanes) -> int:
        """How many iterations of `r` one vector, or one of the groups in it, takes in."""
        return (lanes.count if r is lanes.range else 1) * self.nest.dots.get(r, 1)

    def positions(self, ranges: frozenset[UOp], tiles: Mapping[UOp, int], lanes: Lanes) -> Iterator[dict[UOp, int]]:
        """The tile positions along `ranges`, in order, the lane's innermost; along that, one a vector."""
        tiled = [r for r in (*self.nest.loops, *tiles) if r in ranges and tiles.get(r, 1) > 1]
        tiled = sorted(dict.fromkeys(tiled), key=lambda r: r is lanes.range)
        for at in itertools.product(*(range(0, tiles[r], self.step_of(r, lanes)) for r in tiled)):
            yield dict(zip(tiled, at))

    def tile_of(self, r: UOp, lanes: Lanes) -> int:
        """The tile of `r`; 1 for a range that a REDUCE runs in lanes when another one uses it without."""
        nest, dot = self.nest, self.nest.dots.get(r, 1)
        if r is lanes.square:
            return lanes.count * dot
        return dot if r in nest.reduce_lanes and self.in_vector(r, lanes) == dot else nest.tile.get(r, 1)

    def in_vector(self, r: UOp, lanes: Lanes) -> int:
        """How many neighbouring iterations of `r` one vector holds."""
        nest = self.nest
        n = nest.lanes if r is nest.lane else nest.reduce_lanes.get(r, 1) if r is lanes.range else 1
        return n * nest.dots.get(r, 1)


def fixed_size(r: UOp) -> int | None:
    return r.src[0].arg if is_fixed(r) else None


def step_along(analysis: TileAnalysis, index: UOp, r: UOp) -> int | None:
    """How far apart the first two iterations of a tile of `r` read."""
    first, second = (analysis.affine(index, {r: i}) for i in (0, 1))
    if first is None or second is None or second._replace(constant=first.constant) != first:
        return None
    return second.constant - first.constant
