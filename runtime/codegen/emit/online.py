"""Lowering of `online` (see `online.py`): a maximum and a sum of exponentials below it, in one pass.

A tile of the row at a time: its elements raise the running maximum of their lane; what has been added up is scaled down
to that, and the tile's exponentials are added. At the end the lanes are scaled to the largest of them and folded.
Infinities and NaN make the result differ from that of two passes, so where the maximum or the sum is not finite these
two are run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.sums import folded, greater
from manygrad.runtime.codegen.emit.values import ragged_mask, remember, value, value_of
from manygrad.runtime.codegen.kernel.online import Pair
from manygrad.runtime.codegen.loops.tree import OnlineReduce
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

LOWEST = {dtypes.float32: -3.4028234663852886e38, dtypes.float64: -1.7976931348623157e308}


def online(e: Emission, node: OnlineReduce, body: Callable[[], None], otherwise: Callable[[], None]) -> None:
    results = one_pass(e, node, body)
    variables = [(u, at, e.emit(Low.ACC, found.dtype, (found,), here=True)) for u, at, found in results]
    good = e.conjunction(*(is_finite(e, found) for *_, found in results))
    assert good is not None
    e.open(Low.IF, (e.alu(Ops.NOT, dtypes.bool, good),))
    otherwise()
    for u, at, acc in variables:
        e.emit(Low.SET, dtypes.void, (acc, value(e, u, at)), here=True)
    e.close()
    for u, at, acc in variables:
        remember(e, u, at, e.emit(Low.GET, acc.dtype, (acc,), here=True))


def one_pass(e: Emission, node: OnlineReduce, body: Callable[[], None]) -> list[tuple[UOp, dict[UOp, int], Inst]]:
    """The results at each tile position."""
    pair = node.pair
    u, w, d = pair.maximum, pair.total, pair.maximum.dtype
    results = []
    with e.within(e.with_lanes(node.lanes)):
        lanes, positions = node.lanes.count, list(e.positions(ranges_of(w)))
        start = [e.const(v, d, lanes) for v in (LOWEST[d], 0.0)]
        running = [[e.emit(Low.ACC, d, (x,), None, lanes, here=True) for x in start] for _ in positions]

        def tile() -> None:
            for position, (largest, total) in zip(positions, running):
                add_tile(e, pair, position, largest, total)

        e.adding.append(tile)
        body()
        e.adding.pop()
        for position, accumulators in zip(positions, running):
            largest, total = (e.emit(Low.GET, d, (acc,), None, lanes, here=True) for acc in accumulators)
            top = folded(e, [largest], partial(greater, e), True)
            scaled = e.alu(Ops.MUL, d, total, scale(e, pair, largest, top))
            results.append((u, position, top))
            results.append((w, position, folded(e, [scaled], partial(e.alu, Ops.ADD, d), True)))
    return results


def add_tile(e: Emission, pair: Pair, position: dict[UOp, int], largest: Inst, total: Inst) -> None:
    """Adds the current tile of the row to the accumulators."""
    w, (x, maximum) = pair.total, pair.below.src
    places = [{**position, **at} for at in e.positions(frozenset(w.src[1:]))]
    new = old = e.emit(Low.GET, w.dtype, (largest,), None, largest.lanes, here=True)
    for at in places:
        found = e.splat(value(e, x, at), largest.lanes)
        if (mask := ragged_mask(e, at)) is not None:
            lowest = e.const(LOWEST[w.dtype], w.dtype)
            found = e.alu(Ops.WHERE, w.dtype, mask, found, lowest)
            remember(e, x, at, found)
        new = greater(e, found, new)
    added = e.emit(Low.GET, w.dtype, (total,), None, total.lanes, here=True)
    added = e.alu(Ops.MUL, w.dtype, added, scale(e, pair, old, new))
    e.open()  # for the moment the maximum is the running one
    remember(e, maximum, position, new)
    for at in places:
        added = e.alu(Ops.ADD, w.dtype, added, value(e, w.src[0], at))
    e.close()
    e.emit(Low.SET, dtypes.void, (largest, new), here=True)
    e.emit(Low.SET, dtypes.void, (total, added), here=True)


def scale(e: Emission, pair: Pair, old: Inst, new: Inst) -> Inst:
    """exp(old - new), as the sum computes it."""
    return value_of(e, pair.total.src[0], pair.below, e.alu(Ops.SUB, old.dtype, old, new))


def is_finite(e: Emission, x: Inst) -> Inst:
    """Above the lowest number, with which maxima begin, and below infinity."""
    least, most = (e.const(v, x.dtype) for v in (LOWEST[x.dtype], math.inf))
    return e.alu(Ops.AND, dtypes.bool, e.alu(Ops.CMPLT, dtypes.bool, least, x), e.alu(Ops.CMPLT, dtypes.bool, x, most))
