from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from manygrad.runtime.codegen.analysis.describe import size_max
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, unshaped, width_is_wrong
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Vectorize(RangeOpt):
    """`lanes` neighbouring iterations of the loop in one vector: of one loop, a power of two, 2 to 64.

    before:  for n in 64: c[n] = a[n] + 1
    after:   for n in 64 by 16: c[n:n+16] = a[n:n+16] + 1   # vectorize(n, 16)
    """

    kind = "vectorize"
    shapes = True
    lanes: int

    @property
    def unique(self) -> str:
        return self.kind

    def wrong(self) -> str | None:
        return width_is_wrong(self, "lanes", self.lanes)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        r = self.loop(self.axis, ranges)
        return replace(nest, vectorized=r, lanes=self.lanes, tile={**nest.tile, r: max(self.lanes, nest.tile_of(r))})

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Vectorize(nest.vectorized.arg.id, nest.lanes)] if nest.vectorized is not None and nest.lanes > 1 else []

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        """No vectors; vectors along another loop, which take the place of its tile; longer and shorter ones."""
        yield search.scalar
        for r in search.sig.loops:
            if size_max(r) > 1:
                bare = unshaped(search.scalar, r.arg.id)
                for n in dict.fromkeys((search.lanes, search.lanes // 2, 2 * search.lanes)):
                    yield (*bare, Vectorize(r.arg.id, n))
