from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class NontemporalStore(Opt):
    """Whole vectors stored to the argument go past the caches; of rows that begin within a cache line, too
    (`runtime/codegen/loops/rows.py`). It is stored to, not read.

    before:  for n by 16: out[n ..] = ..            (the processor reads the line before it writes it)
    after:   for n by 16: out[n ..] = .. past the caches        # nontemporal_store(out)
    """

    kind = "nontemporal_store"
    argument: int

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, streamed=(*nest.streamed, self.argument))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        read = {u.src[0].src[0].arg for u in sig.nodes if u.op is Ops.LOAD}
        for slot in nest.streamed:
            stores = [s for s in sig.stores if s.src[0].src[0].arg == slot]
            if not stores or slot in read or any(s.arg is not None for s in stores):
                return f"{cls(slot)}: the argument is not one that is only stored to"
            if nest.vectorized is None:
                return f"{cls(slot)}: no loop is vectorized"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [NontemporalStore(slot) for slot in sorted(nest.streamed)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        return search.toggled([NontemporalStore(s.src[0].src[0].arg) for s in search.sig.stores])
