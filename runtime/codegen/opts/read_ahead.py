from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

DISTANCES = (1 << 10, 1 << 12)  # that the search tries


@dataclass(frozen=True, repr=False)
class ReadAhead(Opt):
    """Beside what is loaded of the argument, what lies `nbytes` further is prefetched, each cache line once. That helps
    where it is read in order. It is not packed.

    before:  for m: for k: s += a[m, k]                          (the processor looks ahead within a page, or not)
    after:   for m: for k: { prefetch a[m, k + 1024]; s += a[m, k] }          # read_ahead(a, 4096), of float32
    """

    kind = "read_ahead"
    argument: int
    nbytes: int

    @property
    def unique(self) -> tuple[str, int]:
        return self.kind, self.argument

    def wrong(self) -> str | None:
        return None if self.nbytes >= 1 else f"{self}: at least 1 byte"

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, read_ahead=(*nest.read_ahead, (self.argument, self.nbytes)))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        read = {u.src[0].src[0].arg for u in sig.nodes if u.op is Ops.LOAD}
        for o in mine:
            if o.argument not in read:
                return f"{o}: the argument is not read"
            if any(s == o.argument for _, s in nest.staged):
                return f"{o}: the argument is packed"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [ReadAhead(*ahead) for ahead in sorted(nest.read_ahead)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        for slot in sorted({u.src[0].src[0].arg for u in search.sig.nodes if u.op is Ops.LOAD}):
            others = tuple(o for o in search.opts if not (isinstance(o, ReadAhead) and o.argument == slot))
            yield others
            for nbytes in DISTANCES:
                yield (*others, ReadAhead(slot, nbytes))
