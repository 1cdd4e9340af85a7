from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, without
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Parallel(Opt):
    """So many of the outermost loops are cut over the threads, as one loop. Their sizes are known before the call.

    before:  for m: for n: ..
    after:   parallel for (m, n): ..            # parallel(2)
    """

    kind = "parallel"
    loops: int

    @property
    def unique(self) -> str:
        return self.kind

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        if not 0 <= self.loops <= len(nest.loops):
            raise ValueError(f"{self}: the kernel has {len(nest.loops)} loops")
        return replace(nest, parallel=self.loops)

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for r in nest.loops[: nest.parallel]:
            if ranges_of(r.src[0]):
                return f"the size of loop {r.arg.id} is not known before the call, so it is not cut over the threads"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Parallel(nest.parallel)] if nest.parallel else []

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        for n in range(len(search.sig.loops) + 1):
            yield (*without(search.opts, Parallel), *([Parallel(n)] if n else []))
