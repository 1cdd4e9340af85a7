from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Reorder(RangeOpt):
    """Loop `axis` is moved directly outside of loop `outside`. Not outside of a loop that its size depends on.

    before:  for m: for n: ..
    after:   for n: for m: ..                            # reorder(n, m)
    """

    kind = "reorder"
    outside: int

    @property
    def unique(self) -> None:
        return None

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        r = self.loop(self.axis, ranges)
        others = [x for x in nest.loops if x is not r]
        where = next((i for i, x in enumerate(others) if x.arg.id == self.outside), None)
        if where is None:
            raise ValueError(f"{self}: there is no other loop {self.outside}")
        return replace(nest, loops=(*others[:where], r, *others[where:]))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for i, r in enumerate(nest.loops):
            if not ranges_of(r.src[0]) <= frozenset(nest.loops[:i]):
                return f"the size of loop {r.arg.id} depends on a loop inside of it"
        return None

    @classmethod
    def of(cls, nest: LoopNest, written: Sequence[UOp] = ()) -> list[Opt]:
        found: list[Opt] = []
        order = list(written)
        for i, r in enumerate(nest.loops):
            if order[i] is not r:
                found.append(Reorder(r.arg.id, order[i].arg.id))
                order.remove(r)
                order.insert(i, r)
        return found

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        order = search.nest.loops
        for i, r in enumerate(order):
            for x in (*order[:i], *order[i + 2 :]):
                yield _after_the_others(search.opts, Reorder(r.arg.id, x.arg.id))
        if len(order) > 1:  # (the innermost place is reached by moving the last loop away from it)
            yield _after_the_others(search.opts, Reorder(order[-1].arg.id, order[0].arg.id))


def _after_the_others(opts: Opts, move: Reorder) -> Opts:
    made = [o for o in opts if isinstance(o, Reorder)]
    return (*made, move, *(o for o in opts if not isinstance(o, Reorder)))
