from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.kernel.online import online_pair, online_pairs
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Online(RangeOpt):
    """The sum over the range `axis` of exponentials below the maximum over the range `maximum` is made in one pass with
    that. Such a pair, `rfactor` along `axis`, which no `compute_at` keeps.

    before:  for j: m = max(m, x[j]);  for k: s += exp(x[k] - m)
    after:   for k: { n = max(m, x[k]); s = s * exp(m - n) + exp(x[k] - n); m = n }       # online(k, j)
    """

    kind = "online"
    changes_sums = True
    maximum: int

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        r, x = self.reduced(self.axis, ranges), self.range_of(self.maximum, ranges)
        return replace(nest, online=(*nest.online, (r, x)))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for r, x in nest.online:
            it = cls(r.arg.id, x.arg.id)
            if (pair := online_pair(sig, r, x)) is None:
                return f"{it}: not a sum of exponentials below the maximum over the other range"
            kept = any(r in both or x in both for both in nest.kept)
            if r not in nest.reduce_lanes or nest.vectorized in ranges_of(pair.total) or kept:
                return f"{it}: without lanes along the range, or kept"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Online(axis, x) for axis, x in sorted((r.arg.id, x.arg.id) for r, x in nest.online)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        pairs = online_pairs(search.sig)
        return search.toggled([Online(p.total.src[1].arg.id, p.maximum.src[1].arg.id) for p in pairs])
