from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, is_fixed
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

SIZES = (8, 16, 32)
DIMS = 3  # of a group, in OpenCL as in CUDA


@dataclass(frozen=True, repr=False)
class Bind(RangeOpt):
    """Neighbouring tiles of a loop are run side by side by the `items` work items of a group; the parallel loop is the
    grid of groups. For devices with groups (`Machine.group_items`).

    before:  parallel for (m by 4, n by 4): ..
    after:   grid for (m by 4*8, n by 4*8): group for 8 tiles of m, 8 tiles of n: ..     # bind(m, 8), bind(n, 8)
    """

    kind = "bind"
    items: int

    @property
    def unique(self) -> tuple[str, int]:
        return self.kind, self.axis

    def wrong(self) -> str | None:
        return None if self.items >= 2 else f"{self}: a group has at least 2 work items"

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, bound={**nest.bound, self.loop(self.axis, ranges): self.items})

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        if not nest.bound:
            return None
        outside = [r.arg.id for r in nest.bound if r not in nest.loops[: nest.parallel]]
        if outside:
            return f"loop {outside[0]} is not in the parallel loop, so no group runs its tiles"
        if len(nest.group) > DIMS:
            return f"a group has {DIMS} dimensions at most"
        return of_one_thread(nest)

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Bind(r.arg.id, n) for r, n in sorted(nest.bound.items(), key=lambda x: nest.loops.index(x[0]))]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        if search.group_items <= 1:
            return
        for r in search.nest.loops[: search.nest.parallel][-2:]:
            others = tuple(o for o in search.opts if not (isinstance(o, Bind) and o.axis == r.arg.id))
            yield others
            taken = math.prod(o.items for o in others if isinstance(o, Bind))
            for n in SIZES:
                if taken * n <= search.group_items:
                    yield (*others, Bind(r.arg.id, n))


def of_one_thread(nest: LoopNest) -> str | None:
    """Why no group can run the nest."""
    if nest.block or nest.staged or nest.aligned is not None or nest.streamed:
        return "block, cache_read, align and nontemporal_store are about one thread's tiles, not about a group's"
    return None


def uneven(sig: Signature, nest: LoopNest) -> str | None:
    """Why some work items of a group would not get to where all wait for each other."""
    for r in nest.loops[: nest.parallel]:
        step = nest.tile_of(r) * nest.part_of(r)
        if step > 1 and (not is_fixed(r) or r.src[0].arg % step):
            return f"loop {r.arg.id} is not cut evenly into groups: some work items would miss a barrier"
    for r in (u for u in sig.nodes if u.op is Ops.RANGE):
        if ranges_of(r.src[0]) & nest.bound.keys():
            return f"the size of range {r.arg.id} differs within a group: some work items would miss a barrier"
    return None
