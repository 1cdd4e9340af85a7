from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.lowered import EXCHANGE_BYTES
from manygrad.runtime.codegen.opts.bind import DIMS, of_one_thread, uneven
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, width_is_wrong, without
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

SIZES = (8, 16, 32, 64, 256)
MOST_ITEMS = 1024  # that add up one sum


@dataclass(frozen=True, repr=False)
class BindReduce(RangeOpt):
    """A reduction is dealt out to `items` neighbouring work items of a group, of one subgroup (a warp): each adds up
    every `items`-th tile, then they add their partial sums in pairs, and the first one stores.

    They exchange values in registers where the device has subgroups (`Machine.subgroup_items`), else through memory
    that the group shares; the bits are the same. All loops of the grid are cut evenly, so that no work item is missing.
    What is stored along a loop that the sums do not need (a row's elements, of its sum) is dealt out to the same items.

    before:  parallel for m: for k in 512: s += a[m, k]
    after:   grid for m: for each work item i of 32: { for k in i..512 by 32: s[i] += a[m, k] }
             s = s[0] + s[16] + ..                                                         # bind_reduce(k, 32)
    """

    kind = "bind_reduce"
    changes_sums = True
    items: int

    @property
    def unique(self) -> tuple[str, int]:
        return self.kind, self.axis

    def wrong(self) -> str | None:
        return width_is_wrong(self, "work items", self.items, MOST_ITEMS)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, reduce_bound={**nest.reduce_bound, self.reduced(self.axis, ranges): self.items})

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        if not mine:
            return None
        if len({o.items for o in mine}) > 1:
            return "all reductions of a kernel are dealt out to the same work items"
        if len(nest.group) > DIMS:
            return f"a group has {DIMS} dimensions at most, the work items of its sums are one"
        if (reason := of_one_thread(nest) or uneven(sig, nest)) is not None:
            return reason
        return next((why for k in nest.reduce_bound if (why := _cannot_bind(sig, nest, k))), None)

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [BindReduce(axis, n) for axis, n in sorted((r.arg.id, n) for r, n in nest.reduce_bound.items())]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        if search.group_items <= 1 or not search.sums:
            return
        for n in (0, *SIZES):  # all reductions at once, as their work items are the same
            bound = (BindReduce(r.arg.id, n) for r in search.reduced if n)
            yield (*without(search.opts, BindReduce), *bound)
        for r in search.reduced:
            yield without(search.opts, BindReduce, axis=r.arg.id)
            yield from ((*without(search.opts, BindReduce), BindReduce(r.arg.id, n)) for n in SIZES)


def exchanged_bytes(sig: Signature, nest: LoopNest) -> int:
    """Bytes of shared memory through which the work items exchange all sums of a tile, where they have no other way."""
    across = [u for u in sig.reduces if any(r in nest.reduce_bound for r in u.src[1:])]
    sums = sum(math.prod(nest.tile_of(r) for r in ranges_of(u)) for u in across)
    return sums * math.prod(nest.group) * EXCHANGE_BYTES


def _cannot_bind(sig: Signature, nest: LoopNest, k: UOp) -> str | None:
    at = f"range {k.arg.id} cannot be dealt out to work items"
    if k in nest.dots or k in nest.skipped or any(k in pair for pair in (*nest.online, *nest.kept)):
        return f"{at}: it is multiplied in groups, skipped in parts, online or kept"
    if any(r is k for r, *_ in nest.shared):
        return f"{at}: a group shares what is read along it"
    over = [u for u in sig.reduces if k in u.src[1:]]
    if any(x is not k and x in nest.reduce_bound for u in over for x in u.src[1:]):
        return f"{at}: another range of that REDUCE is"
    if any(ranges_of(v) & {*u.src[1:]} for u in over for v in sig.reduces):
        return f"{at}: a REDUCE inside of it depends on it"
    written = {s.src[0].src[0].arg for s in sig.stores}
    if any(v.op is Ops.LOAD and v.src[0].src[0].arg in written for u in over for v in u.src[0].toposort()):
        return f"{at}: the kernel writes what it reads, and the work items do not wait for the store"
    return None
