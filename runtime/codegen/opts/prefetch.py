from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Prefetch(RangeOpt):
    """While the range runs, what it reads of the argument is prefetched one tile ahead of the innermost loop around it
    that moves it. There is such a loop; the argument is not packed.

    before:  for m: for k: s += a[m, k]
    after:   for m: for k: { prefetch a[m + 1, k]; s += a[m, k] }       # prefetch(k, a)
    """

    kind = "prefetch"
    argument: int

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, prefetched=(*nest.prefetched, (self.range_of(self.axis, ranges), self.argument)))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for r, slot in nest.prefetched:
            reads = [u for u in sig.nodes if u.op is Ops.LOAD and u.src[0].src[0].arg == slot]
            if any(s == slot for _, s in nest.staged):
                return f"argument {slot} is packed"
            if not any(nest.next_tile(u, r) for u in reads):
                return f"argument {slot} is not read along range {r.arg.id} and a loop around it"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Prefetch(axis, slot) for axis, slot in sorted((r.arg.id, slot) for r, slot in nest.prefetched)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        read = sorted({u.src[0].src[0].arg for u in search.sig.nodes if u.op is Ops.LOAD})
        ranges = (*search.reduced, *search.sig.loops)
        return search.toggled([Prefetch(r.arg.id, slot) for r in ranges for slot in read])
