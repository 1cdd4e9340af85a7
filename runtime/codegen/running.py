"""Lowering of `online` (see `online.py`): a maximum and a sum of exponentials below it, in one pass.

A tile of the row at a time: its elements raise the running maximum of their lane; what has been added up is scaled down
to that, and the tile's exponentials are added. At the end the lanes are scaled to the largest of them and folded.
Infinities and NaN make the result differ from that of two passes, so where the maximum or the sum is not finite these
two are run.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.online import Pair, online_pair
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.reduction import Reducer
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

LOWEST = {dtypes.float32: -3.4028234663852886e38, dtypes.float64: -1.7976931348623157e308}


class Runner(Reducer):
    def __init__(self, ast: UOp, nest: LoopNest) -> None:
        super().__init__(ast, nest)
        self.pairs = {p.maximum: p for r, x in nest.online if (p := online_pair(self.sig, r, x)) is not None}

    def reduce(self, group: list[UOp]) -> None:
        if (pair := self.pairs.get(group[0])) is None or pair.total not in self.open_reduces:
            super().reduce(group)
            return
        u, w = pair.maximum, pair.total
        self.open_reduces = [v for v in self.open_reduces if v is not w]
        results = self.one_pass(pair)
        held = {key: self.emit(Low.ACC, value.dtype, (value,), here=True) for key, value in results.items()}
        good = self.conjunction(*(self.is_finite(value) for value in results.values()))
        assert good is not None
        self.open(Inst(Low.IF, dtypes.void, 1, (self.alu(Ops.NOT, dtypes.bool, good),), None, len(self.blocks)))
        super().reduce([u])
        super().reduce([w])
        for key, acc in held.items():
            self.emit(Low.SET, dtypes.void, (acc, self.blocks[-1].values[key]), here=True)
        self.close()
        for key, acc in held.items():
            self.blocks[-1].values[key] = self.emit(Low.GET, acc.dtype, (acc,), here=True)

    def one_pass(self, pair: Pair) -> dict[Any, Inst]:
        """The results, by their keys at each tile position."""
        u, w, r = pair.maximum, pair.total, pair.total.src[1]
        d, results = u.dtype, {}
        with self.lane_of([w]):
            lanes, positions = self.lanes, list(self.positions(ranges_of(w)))
            start = [self.const(v, d, lanes) for v in (LOWEST[d], 0.0)]
            running = [[self.emit(Low.ACC, d, (x,), None, lanes, here=True) for x in start] for _ in positions]

            def tile() -> None:
                for position, (largest, total) in zip(positions, running):
                    self.add_tile(pair, position, largest, total)

            around, self.inside = self.inside, frozenset((r,))
            self.loop(r, tile)
            self.inside = around
            for position, accumulators in zip(positions, running):
                largest, total = (self.emit(Low.GET, d, (acc,), None, lanes, here=True) for acc in accumulators)
                top = self.folded([largest], self.greater, True)
                scaled = self.alu(Ops.MUL, d, total, self.scale(pair, largest, top))
                results[self.key(u, position)] = top
                results[self.key(w, position)] = self.folded([scaled], partial(self.alu, Ops.ADD, d), True)
        return results

    def add_tile(self, pair: Pair, position: dict[UOp, int], largest: Inst, total: Inst) -> None:
        """What is in the current tile of the row, added to the accumulators."""
        w, (x, maximum), values = pair.total, pair.below.src, self.blocks[-1].values
        places = [{**position, **at} for at in self.positions(frozenset(w.src[1:]))]
        new = old = self.emit(Low.GET, w.dtype, (largest,), None, largest.lanes, here=True)
        for at in places:
            value = self.splat(self.value(x, at), largest.lanes)
            if (mask := self.ragged_mask(at)) is not None:
                value = values[self.key(x, at)] = self.alu(
                    Ops.WHERE, w.dtype, mask, value, self.const(LOWEST[w.dtype], w.dtype)
                )
            new = self.greater(value, new)
        added = self.emit(Low.GET, w.dtype, (total,), None, total.lanes, here=True)
        added = self.alu(Ops.MUL, w.dtype, added, self.scale(pair, old, new))
        values[self.key(maximum, position)] = new
        for at in places:
            added = self.alu(Ops.ADD, w.dtype, added, self.value(w.src[0], at))
        del values[self.key(maximum, position)]
        self.emit(Low.SET, dtypes.void, (largest, new), here=True)
        self.emit(Low.SET, dtypes.void, (total, added), here=True)

    def scale(self, pair: Pair, old: Inst, new: Inst) -> Inst:
        """exp(old - new), as the sum computes it."""
        known = {pair.below: self.alu(Ops.SUB, old.dtype, old, new)}
        for u in pair.total.src[0].toposort(lambda u: u is not pair.below):
            if u not in known:
                known[u] = (
                    self.const(u.arg, u.dtype) if u.op is Ops.CONST else self.combine(u, [known[s] for s in u.src])
                )
        return known[pair.total.src[0]]

    def is_finite(self, x: Inst) -> Inst:
        """Above the lowest number, with which maxima begin, and below infinity."""
        least, most = (self.const(v, x.dtype) for v in (LOWEST[x.dtype], math.inf))
        return self.alu(
            Ops.AND, dtypes.bool, self.alu(Ops.CMPLT, dtypes.bool, least, x), self.alu(Ops.CMPLT, dtypes.bool, x, most)
        )
