"""Reductions: accumulators in registers for every position of the tile, folded at the end where they are vectors.

Order: ascending in the ranges; with lanes, element k goes to partial sum k mod lanes, and those are folded pairwise.
It does not depend on the tiles of the loops.

A maximum of floats over a row takes the greater of a vector and an accumulator, which forgets NaNs, and remembers
beside it in which lanes there was one: an instruction less than a maximum that is NaN where either is.

A blocked reduction keeps its accumulators in local memory between blocks of its outermost range, so that a block of the
operands stays in the cache while all tiles of a loop use it. The order of the sums is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from manygrad.runtime.codegen.cost import MASK_REGISTERS
from manygrad.runtime.codegen.dots import is_product
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.places import Placer
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

IDENTITY = {Ops.ADD: lambda d: 0, Ops.MUL: lambda d: 1, Ops.MAX: lambda d: d.min}


@dataclass
class Accumulator:
    """The partial sums of a REDUCE at one tile position."""

    reduce: UOp
    position: dict[UOp, int]
    parts: list[Inst]
    ordered: Inst | None = None  # of a MAX of floats: the lanes in which no NaN has been; None: the parts tell


class Reducer(Placer):
    def __init__(self, ast: UOp, nest: LoopNest) -> None:
        super().__init__(ast, nest)
        self.inside: frozenset[UOp] = (
            frozenset()
        )  # ranges of the innermost of them: only what depends on these is nested

    def reduces_ready(self) -> None:
        """Emits the REDUCEs whose value needs no loop that is not open yet, those over the same ranges in one loop."""
        while True:
            ready = [u for u in self.open_reduces if ranges_of(u) <= self.origin.keys() and self.inner_done(u)]
            if self.inside:
                ready = [u for u in ready if ranges_of(u) & self.inside]
            if not ready:
                return
            # one of several that share their ranges waits for the others
            first = next(
                (u for u in ready if all(v in ready for v in self.open_reduces if v.src[1:] == u.src[1:])), ready[0]
            )
            group = [
                u
                for u in ready
                if u.src[1:] == first.src[1:] and (self.lane in ranges_of(u)) == (self.lane in ranges_of(first))
            ]
            self.open_reduces = [u for u in self.open_reduces if u not in group]
            self.running.update(group)
            self.reduce(group)
            self.running.difference_update(group)

    def inner_done(self, u: UOp) -> bool:
        """Whether all REDUCEs that `u` reads and that do not depend on its own ranges have been emitted."""
        own = frozenset(u.src[1:])
        below = u._cache.get("reduces_below")
        if below is None:
            below = u._cache["reduces_below"] = [v for v in u.src[0].toposort() if v.op is Ops.REDUCE]
        return not any(
            (v in self.open_reduces or v in self.running) and not (ranges_of(v) & own) and self.within(v, u)
            for v in below
        )

    def within(self, v: UOp, u: UOp) -> bool:
        """Whether `v` can be emitted before `u`'s loops: always so unless it needs a range that only an inner REDUCE
        opens."""
        return ranges_of(v) <= (self.origin.keys() | frozenset(u.src[1:]))

    def reduce(self, group: list[UOp]) -> None:
        """The REDUCEs of `group`, which share their ranges, in one nest of loops."""
        with self.lane_of(group) as split:
            accumulators = self.accumulators(group, split)
            self.accumulate_all(group, accumulators, split)
            self.finish(accumulators, split)

    @contextmanager
    def lane_of(self, group: list[UOp]) -> Iterator[UOp | None]:
        """Lanes along the current range where the reduction depends on it, else along one of its own; gives that
        one."""
        before = (self.lane, self.lanes)
        split = None
        if self.lane is None or self.lane not in ranges_of(group[0]):
            split = next((r for r in group[0].src[1:] if r in self.nest.reduce_lanes), None)
            self.use_lane(split, self.nest.reduce_lanes[split] if split is not None else 1)
        yield split
        self.use_lane(*before)

    def parts(self, group: list[UOp], split: UOp | None) -> Iterator[tuple[UOp, dict[UOp, int]]]:
        """(REDUCE, tile position) of every partial sum."""
        count = self.nest.tile[split] // self.step_of(split) if split is not None else 1
        for u in group:
            for position in self.positions(ranges_of(u)):
                for _ in range(count):
                    yield u, position

    def accumulators(
        self, group: list[UOp], split: UOp | None, first: Callable[[int, UOp, int], Inst] | None = None
    ) -> list[Accumulator]:
        """New accumulators, set to the identity or to `first(number, REDUCE, lanes)`."""
        lanes = self.lanes if self.lane is not None else 1
        found: list[Accumulator] = []
        for i, (u, position) in enumerate(self.parts(group, split)):
            start = (
                first(i, u, lanes)
                if first is not None
                else self.const(u.dtype.const(IDENTITY[u.arg](u.dtype)), u.dtype, lanes)
            )
            if not found or found[-1].reduce is not u or found[-1].position != position:
                found.append(Accumulator(u, position, []))
            found[-1].parts.append(self.emit(Low.ACC, u.dtype, (start,), None, lanes, here=True))
        if first is None and split is not None and len(found) <= MASK_REGISTERS:
            true = self.const(True, dtypes.bool, lanes)
            for acc in found:
                if acc.reduce.arg is Ops.MAX and acc.reduce.dtype.is_float:
                    acc.ordered = self.emit(Low.ACC, dtypes.bool, (true,), None, lanes, here=True)
        return found

    def accumulate_all(self, group: list[UOp], accumulators: list[Accumulator], split: UOp | None) -> None:
        ranges = group[0].src[1:]

        def body(i: int) -> None:
            if i < len(ranges):
                self.loop(ranges[i], lambda: body(i + 1))
                return
            for at in self.positions(frozenset(ranges)):
                part = at.get(split, 0) // self.step_of(split) if split is not None else 0
                with self.unless_masked(masks, at) as reached:
                    for row in self.apart(masks, at) if reached else ():
                        with self.unless_masked(masks, {**row, **at}) as some:
                            for acc in accumulators if some else ():
                                if row.items() <= acc.position.items():
                                    self.accumulate(acc, {**acc.position, **at}, part)

        masks = self.masks([u.src[0] for u in group], frozenset(ranges))
        around, self.inside = self.inside, frozenset(ranges)
        self.by_place(masks, lambda: body(0))
        self.inside = around

    def finish(self, accumulators: list[Accumulator], split: UOp | None) -> None:
        """Folds the partial sums and makes the results known in the current block."""
        for acc in accumulators:
            u = acc.reduce
            join = self.greater if acc.ordered is not None else partial(self.alu, u.arg, u.dtype)
            parts = [self.emit(Low.GET, u.dtype, (a,), None, a.lanes, here=True) for a in acc.parts]
            found = self.folded(parts, join, split is not None)
            if acc.ordered is not None:
                ordered = self.emit(Low.GET, dtypes.bool, (acc.ordered,), None, acc.ordered.lanes, here=True)
                nan = self.emit(Low.ANY, dtypes.bool, (self.alu(Ops.NOT, dtypes.bool, ordered),))
                found = self.alu(Ops.WHERE, u.dtype, nan, self.const(math.nan, u.dtype), found)
            self.blocks[-1].values[self.key(u, acc.position)] = found

    def folded(self, values: list[Inst], join: Callable[[Inst, Inst], Inst], lanes: bool) -> Inst:
        """`values` joined in pairs; `lanes`: and then their lanes."""
        while len(values) > 1:
            half = (len(values) + 1) // 2
            folded = [join(a, b) for a, b in zip(values, values[half:])]
            values = folded + values[len(folded) : half]
        found = values[0]
        while lanes and found.lanes > 1:
            lower, upper = (self.emit(Low.HALVES, found.dtype, (found,), i, found.lanes // 2) for i in (0, 1))
            found = join(lower, upper)
        return found

    def greater(self, a: Inst, b: Inst) -> Inst:
        """`b` where either is NaN."""
        return self.alu(Ops.WHERE, a.dtype, self.alu(Ops.CMPLT, dtypes.bool, b, a), a, b)

    def accumulate(self, accumulator: Accumulator, position: dict[UOp, int], part: int) -> None:
        u, acc = accumulator.reduce, accumulator.parts[part]
        old = self.emit(Low.GET, u.dtype, (acc,), None, acc.lanes, here=True)
        v = u.src[0]
        if (r := next((r for r in u.src[1:] if r in self.nest.dots), None)) is not None:
            a, b = (self.splat(self.quads(s, r, position), acc.lanes) for s in v.src)
            new = self.emit(Low.DOT, u.dtype, (a, b, old), v.arg, acc.lanes, here=True)
            self.emit(Low.SET, dtypes.void, (acc, new), here=True)
            return
        if u.arg is Ops.ADD and is_product(v) and u.dtype.is_float:
            if v in self.kept:  # rounded, as where it is read; in the sum it is not
                self.value(v, position)
            a, b = (
                self.splat(self.alu(Ops.CAST, u.dtype, x) if x.dtype is not u.dtype else x, acc.lanes)
                for x in (self.value(s, position) for s in v.src)
            )
            new = self.emit(Low.FMA, u.dtype, (a, b, old), None, acc.lanes, here=True)
        elif accumulator.ordered is not None:
            x = self.splat(self.value(v, position), acc.lanes)
            self.remember_nans(accumulator.ordered, x, position)
            new = self.greater(x, old)
        else:
            new = self.emit(
                u.arg, u.dtype, (self.splat(self.value(v, position), acc.lanes), old), None, acc.lanes, here=True
            )
        if self.lane in u.src[1:] and (mask := self.ragged_mask(position)) is not None:
            new = self.emit(Ops.WHERE, u.dtype, (mask, new, old), None, acc.lanes, here=True)
        self.emit(Low.SET, dtypes.void, (acc, new), here=True)

    def remember_nans(self, acc: Inst, x: Inst, position: dict[UOp, int]) -> None:
        number = self.emit(Ops.CMPEQ, dtypes.bool, (x, x), None, acc.lanes, here=True)
        old = self.emit(Low.GET, dtypes.bool, (acc,), None, acc.lanes, here=True)
        new = self.emit(Ops.AND, dtypes.bool, (old, number), None, acc.lanes, here=True)
        if (mask := self.ragged_mask(position)) is not None:
            new = self.emit(Ops.WHERE, dtypes.bool, (mask, new, old), None, acc.lanes, here=True)
        self.emit(Low.SET, dtypes.void, (acc, new), here=True)
