from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, unshaped, width_is_wrong
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class RFactor(RangeOpt):
    """The reduction is factored: partial sums of every `lanes`-th element in one vector, folded in pairs at the end.

    One range of a REDUCE, no loop of which is vectorized, and on which no other REDUCE depends.

    before:  for k in 64: s += x[k]
    after:   for k in 64 by 16: v[0:16] += x[k:k+16];  s = v[0] + v[8] + ..     # rfactor(k, 16)
    """

    kind = "rfactor"
    shapes = True
    changes_sums = True
    lanes: int

    @property
    def unique(self) -> tuple[str, int]:
        return (self.kind, self.axis)

    def wrong(self) -> str | None:
        return width_is_wrong(self, "lanes", self.lanes)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        r = self.reduced(self.axis, ranges)
        tile = {**nest.tile, r: max(self.lanes, nest.tile_of(r))}
        return replace(nest, reduce_lanes={**nest.reduce_lanes, r: self.lanes}, tile=tile)

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for r in nest.reduce_lanes:
            over = [u for u in sig.reduces if r in u.src[1:]]
            if any(x is not r and x in nest.reduce_lanes for u in over for x in u.src[1:]):
                return f"lanes along range {r.arg.id}: another range of that REDUCE has lanes already"
            if any(r in ranges_of(v) for v in sig.reduces):
                return f"lanes along range {r.arg.id}: a REDUCE inside of it depends on it"
            if nest.vectorized is not None and all(nest.vectorized in ranges_of(u) for u in over):
                return (
                    f"lanes along range {r.arg.id}: that REDUCE has lanes along loop {nest.vectorized.arg.id} already"
                )
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [RFactor(r.arg.id, n) for r, n in nest.reduce_lanes.items()]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        if not search.sums:
            return
        # in place of vectors along a loop, and of what needs them
        bare = tuple(o for o in search.scalar if not o.needs_vectors)
        for r in search.reduced:
            yield unshaped(search.opts, r.arg.id)
            for n in (search.lanes // 2, search.lanes, 2 * search.lanes):
                yield (*unshaped(search.opts, r.arg.id), RFactor(r.arg.id, n))
                yield (*unshaped(bare, r.arg.id), RFactor(r.arg.id, n))
