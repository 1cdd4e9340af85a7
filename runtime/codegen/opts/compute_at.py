from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, size_max
from manygrad.runtime.codegen.lowered import SCRATCH_BYTES
from manygrad.runtime.codegen.opts.keep import kept_bytes, kept_values
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class ComputeAt(RangeOpt):
    """What the REDUCEs over the range `axis` compute of an element is computed there, kept in local memory, and read
    where the same is needed along the range `again`. REDUCEs over that range alone, both of one fixed size, and work
    that is worth it (`keep.py`).

    before:  for k: s += exp(x[k]);  for j: y[j] = exp(x[j]) / s
    after:   for k: { local[k] = exp(x[k]); s += local[k] };  for j: y[j] = local[j] / s      # compute_at(k, j)
    """

    kind = "compute_at"
    again: int

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        r, again = self.reduced(self.axis, ranges), self.range_of(self.again, ranges)
        return replace(nest, kept=(*nest.kept, (r, again)))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        nbytes = 0
        for r, again in nest.kept:
            it = cls(r.arg.id, again.arg.id)
            if nest.block:
                return f"{it}: not with a block"
            if again in {a for a, _ in nest.kept} or [x for _, x in nest.kept].count(again) > 1:
                return f"{it}: range {again.arg.id} is part of another compute_at"
            kept = set(kept_values(sig, r, again).values())
            if not kept:
                return f"nothing worth keeping is computed along range {r.arg.id} and again along range {again.arg.id}"
            if any(nest.vectorized in ranges_of(u) for u in kept):
                return f"{it}: what is kept runs along the vectorized loop"
            nbytes += sum(kept_bytes(u, r, nest) for u in kept)
        return None if nbytes <= SCRATCH_BYTES // 4 else f"{nbytes} bytes kept, of {SCRATCH_BYTES // 4}"

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [ComputeAt(axis, again) for axis, again in sorted((r.arg.id, x.arg.id) for r, x in nest.kept)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        others = (*search.reduced, *search.sig.loops)
        pairs = [(r, x) for r in search.reduced for x in others if x is not r and size_max(x) == size_max(r)]
        return search.toggled([ComputeAt(r.arg.id, x.arg.id) for r, x in pairs])
