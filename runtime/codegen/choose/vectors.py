"""Which loop is vectorized: the one whose accesses, or, in a product, whose packing, cost least."""

from __future__ import annotations

import math
from collections.abc import Mapping

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import size_max, volume
from manygrad.runtime.codegen.choose.facts import Facts, touched, touched_bytes
from manygrad.runtime.codegen.choose.operands import can_pack, can_turn, row_loops
from manygrad.runtime.codegen.choose.reductions import Split
from manygrad.runtime.codegen.kernel.dots import is_product
from manygrad.runtime.codegen.opts import Opts, Vectorize
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


def vectorize_loop(facts: Facts, opts: Opts, vectorized: UOp | None) -> Opts:
    """The loop with the cheapest accesses runs in vectors: of the main reduction, where an operand that is not
    contiguous along the loop is worth packing; of a product for a matrix unit the one beside which it reads the other
    operand as it lies. None where one element at a time is as fast, or reductions are accumulated in lanes of their
    own."""
    return opts if vectorized is None else (*opts, Vectorize(vectorized.arg.id, facts.lanes))


def cheapest_loop(facts: Facts, opts: Opts, split: Split) -> UOp | None:
    """The loop to vectorize."""
    taken = {r for u in split for r in ranges_of(u)}
    main = facts.main
    candidates = [r for r in reversed(facts.sig.loops) if r not in taken and size_max(r) > 1]
    candidates = [r for r in candidates if all(facts.stride(s.src[0], r) not in (0, None) for s in facts.sig.stores)]
    if main is not None and main not in split:
        own = [r for r in candidates if r in ranges_of(main)]
        times = {r: time for r in own if (time := product_time(facts, opts, main, r)) is not None}
        if times:
            return min(times, key=lambda r: times[r])
    best, least = None, cost.SCALAR_SHARE * accesses_time(facts, None)
    for r in candidates:
        time = accesses_time(facts, r)
        if time < least:
            best, least = r, time
    return best


def accesses_time(facts: Facts, r: UOp | None) -> float:
    """FMAs that the accesses and the arithmetic take with vectors along `r`; None: without."""
    total = 0.0
    for u in facts.operations:
        access = u.op in (Ops.LOAD, Ops.STORE)
        if not access and u.op not in GroupOp.ALU:
            continue
        ranges = ranges_of(u)
        trips = math.prod(float(size_max(x)) for x in ranges)
        if r is None or r not in ranges:
            total += trips
            continue
        vectors = trips / size_max(r) * -(-size_max(r) // facts.lanes)
        stride = facts.stride(u.src[0], r) if access else 1
        elementwise_load = u.op is Ops.LOAD and not facts.sig.reduces
        turned = elementwise_load and any(fills_vectors(facts, u.src[0], x) for x in ranges - {r})
        total += vectors * cost.access_time(stride, turned, facts.lanes)
    return total


def fills_vectors(facts: Facts, index: UOp, r: UOp) -> bool:
    """Whether vectors along `r` are contiguous: across it, squares of them are turned."""
    return size_max(r) >= facts.lanes and facts.stride(index, r) == 1


def product_time(facts: Facts, opts: Opts, main: UOp, r: UOp) -> float | None:
    """FMAs that one of a product takes with vectors along `r`, its operands packed where they are not contiguous along
    it; None: not worth it, or not possible."""
    loads = facts.loads_of[main]
    strides = {u: facts.stride(u.src[0], r) for u in loads if r in ranges_of(u)}
    if not any(s != 0 for s in strides.values()):
        return None
    product = main.arg is Ops.ADD and is_product(facts.term(main)) and len(loads) >= 2
    time = 1.0
    for u, s in strides.items():
        if s in (0, 1):
            continue
        uses = volume(ranges_of(main) - ranges_of(u))
        if uses < 2 or not product or not can_pack(facts, opts, u, main, r):
            return None
        along = any(facts.stride(u.src[0], k) == 1 for k in main.src[1:])
        # (the other operand would be packed instead, and this one read once, by one tile with all of that)
        once = uses <= cost.PANEL_VECTORS * facts.lanes and touched_bytes(u) > facts.machine.cache_bytes
        packed = cost.pack_time(along, once, uses)
        time += min(packed, cost.turn_time(facts.lanes, uses)) if can_turn(facts, u, main, r) else packed
    for u in loads:
        time += reread_time(facts, u, main, r) if r not in ranges_of(u) else 0.0
    scattered = max(result_time(facts, s, main, r) for s in facts.sig.stores)
    vectors = -(-size_max(r) // facts.lanes)
    return time * vectors * facts.lanes / size_max(r) + scattered / volume(frozenset(main.src[1:]))


def reread_time(facts: Facts, load: UOp, main: UOp, r: UOp) -> float:
    """FMAs that one of a product waits for rows that come in small pieces from beyond the cache, again for each panel
    along `r`."""
    in_pieces = len(main.src) > 2 and all(
        facts.stride(load.src[0], k) != 1 or size_max(k) < facts.lanes for k in main.src[1:]
    )
    if not in_pieces or touched_bytes(load) <= facts.machine.cache_bytes:
        return 0.0
    panels = -(-size_max(r) // (cost.PANEL_VECTORS * facts.lanes))
    times = volume(ranges_of(main) - ranges_of(load) - {r}) * panels
    return touched(load) * (times - 1) * facts.lanes / volume(ranges_of(main) | frozenset(main.src[1:]))


def result_time(facts: Facts, s: UOp, main: UOp, vectorized: UOp, tiles: Mapping[UOp, int] | None = None) -> int:
    """FMAs that a stored vector takes beyond a plain store: scattered, or turned in registers where positions of the
    tile (if it is not known yet: of the loops that may be its rows) lie side by side."""
    step = facts.stride(s.src[0], vectorized)
    if step == 1:
        return 0
    most = {r: size_max(r) for r in row_loops(facts, main, vectorized)} if tiles is None else tiles
    side = 1  # positions
    for along, r in sorted(((facts.stride(s.src[0], r) or 0, r) for r in most), key=lambda x: x[0]):
        if along == side:
            side *= most[r]
    return cost.store_time(step, side, facts.lanes)
