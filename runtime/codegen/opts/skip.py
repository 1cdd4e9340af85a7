from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, without
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Skip(RangeOpt):
    """Iterations of the sums over a reduce range in which a factor of the product is masked out are skipped, for a
    whole tile or a position in it; `runtime/codegen/loops/reduce.py` makes versions for the edges of an image.

    before:  for k: s += (a[k] if valid[k] else 0) * b[k]
    after:   for k: if valid[k]: s += a[k] * b[k]           # skip(k)
    """

    kind = "skip"

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, skipped=nest.skipped | {self.reduced(self.axis, ranges)})

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for o in mine:
            if any(u.arg is not Ops.ADD for u in sig.reduces if o.axis in [x.arg.id for x in u.src[1:]]):
                return f"{o}: what is masked out counts in a reduction that is no sum"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Skip(axis) for axis in sorted(r.arg.id for r in nest.skipped)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        for r in search.reduced:
            yield without(search.opts, Skip, axis=r.arg.id)
            yield (*without(search.opts, Skip, axis=r.arg.id), Skip(r.arg.id))
