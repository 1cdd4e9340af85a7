from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from manygrad.runtime.codegen.analysis.describe import size_max
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, at_least_one, without
from manygrad.tensor.uop.uop import UOp

TIMES = (1, 2, 4, 8, 16)
SHORT = 64  # iterations of a range that may be written out whole


@dataclass(frozen=True, repr=False)
class Unroll(RangeOpt):
    """`times` iterations of a reduce range are written out, in order. A multiple of its lanes.

    Around a range that is not written out whole, iterations alternate: that changes the order of the sum.

    before:  for k in 64: s += x[k]
    after:   for k in 64 by 2: s += x[k]; s += x[k+1]       # unroll(k, 2)
    """

    kind = "unroll"
    shapes = True
    changes_sums = True
    times: int

    @property
    def unique(self) -> tuple[str, int]:
        return (self.kind, self.axis)

    def wrong(self) -> str | None:
        return at_least_one(self, self.times)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, tile={**nest.tile, self.reduced(self.axis, ranges): self.times})

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        written = {
            r.arg.id: n
            for r, n in nest.tile.items()
            if r.arg.kind == "reduce" and n != nest.lanes_of(r) * nest.dots.get(r, 1)
        }
        return [Unroll(axis, n) for axis, n in sorted(written.items())]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        for r in search.reduced:
            at = search.nest.reduce_lanes.get(r, 1) * search.nest.dots.get(r, 1)
            for n in (*TIMES, size_max(r)) if size_max(r) <= SHORT else TIMES:
                yield (*without(search.opts, Unroll, axis=r.arg.id), Unroll(r.arg.id, n * at))
