from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, is_fixed
from manygrad.runtime.codegen.opts.bind import Bind, uneven
from manygrad.runtime.codegen.opts.cache_read import staged_values
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, at_least_one
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

SIZES = (8, 16, 32)


@dataclass(frozen=True, repr=False)
class CacheShared(RangeOpt):
    """What the work items of a group read of an argument in `iterations` of a reduction lies in memory that they share:
    each copies a part of it there, and reads what the others copied.

    All loops of the grid are cut evenly, so that no work item is missing at a barrier.

    before:  group for m: group for n: for k in 512: c += a[m, k] * b[k, n]
    after:   group for m: group for n: for 16 of k: { shared = a[all m of the group, 16 of k]; barrier;
             for k in 16: c += shared[m, k] * b[k, n]; barrier }                            # cache_shared(k, a, 16)
    """

    kind = "cache_shared"
    argument: int
    iterations: int

    @property
    def unique(self) -> tuple[str, int]:
        return self.kind, self.argument

    def wrong(self) -> str | None:
        return at_least_one(self, self.iterations)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        entry = (self.reduced(self.axis, ranges), self.argument, self.iterations)
        return replace(nest, shared=tuple(sorted((*nest.shared, entry), key=lambda e: e[1])))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        if not nest.shared:
            return None
        if not nest.bound:
            return "only the work items of a group share memory (bind)"
        if (reason := uneven(sig, nest)) is not None:
            return reason
        if len({(k, n) for k, _, n in nest.shared}) > 1:
            return "all that is shared is copied for the same iterations of one reduction"
        return next((why for k, slot, n in nest.shared if (why := _cannot_share(sig, nest, k, slot, n))), None)

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [CacheShared(k.arg.id, slot, n) for k, slot, n in nest.shared]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        if not any(isinstance(o, Bind) for o in search.opts):
            return
        loads = [v for u in search.sig.reduces for v in u.src[0].toposort() if v.op is Ops.LOAD]
        for slot in sorted({v.src[0].src[0].arg for v in loads}):
            others = tuple(o for o in search.opts if not (isinstance(o, CacheShared) and o.argument == slot))
            yield others
            sizes = {o.iterations for o in others if isinstance(o, CacheShared)} or SIZES
            for k in search.reduced:
                for n in sizes:
                    yield (*others, CacheShared(k.arg.id, slot, n))


def _cannot_share(sig: Signature, nest: LoopNest, k: UOp, slot: int, n: int) -> str | None:
    at = f"argument {slot} cannot be shared along {k.arg.id}"
    if not is_fixed(k) or k.src[0].arg % n or n % nest.tile_of(k):
        return f"{at}: {n} iterations do not divide it, or its tile does not divide them"
    if k in nest.reduce_lanes or k in nest.dots or k in nest.skipped or any(k in pair for pair in nest.online):
        return f"{at}: it has lanes of its own, is skipped in parts, or online"
    if any(s.src[0].src[0].arg == slot for s in sig.stores):
        return f"{at}: the kernel writes it"
    over = [u for u in sig.reduces if k in u.src[1:]]
    if any(u.src[1:] != (k,) for u in over) or any(v.op is Ops.REDUCE for u in over for v in u.src[0].toposort()):
        return f"{at}: the reduction has other ranges, too, or reads another one"
    values = staged_values(sig, slot)
    if not values or any(ranges != (k,) for _, ranges in values):
        return f"{at}: nothing is read of it there, or along another reduction, too"
    for u, _ in values:
        load = u.src[0] if u.op is Ops.CAST else u
        if load.op is not Ops.LOAD or len(load.src[0].src) > 2:
            return f"{at}: it is read under a condition, or computed with"
        if not ranges_of(u) - {k} <= frozenset(nest.loops[: nest.parallel]):
            return f"{at}: it changes with a loop that is not in the grid"
    return None


def shared_bytes(sig: Signature, nest: LoopNest) -> int:
    """Bytes of the memory that a group shares."""
    return sum(
        -(-math.prod((n, *(part_size(nest, r) for r in ranges_of(u) - {k}))) * u.dtype.itemsize // 64)
        * 64
        * nest.ring.get(k, 1)
        for k, slot, n in nest.shared
        for u, _ in staged_values(sig, slot)
    )


def part_size(nest: LoopNest, r: UOp) -> int:
    """The iterations of a loop that a group runs."""
    return nest.tile_of(r) * nest.part_of(r)
