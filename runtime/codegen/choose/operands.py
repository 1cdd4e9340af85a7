"""Properties of a product's operands: whether one can be packed, is worth it, and stays in a cache."""

from __future__ import annotations

import math

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import in_whole_tiles, is_fixed, part_held, size_max, volume
from manygrad.runtime.codegen.choose.conditions import conditions
from manygrad.runtime.codegen.choose.facts import Facts, is_masked, slot, touched_bytes
from manygrad.runtime.codegen.kernel.dots import is_dot, is_total
from manygrad.runtime.codegen.opts import Opts, RFactor
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


def can_pack(facts: Facts, opts: Opts, load: UOp, main: UOp, loop: UOp) -> bool:
    """Whether `load` can be packed at `loop`: it fits a thread's local memory, depends on fixed sizes only (or on one
    that the groups of an instruction cut evenly), and is the only read of that argument in any reduction."""
    depends, reduced = ranges_of(load), ranges_of(load) & frozenset(main.src[1:])
    if panel_overflows(facts, main, facts.lanes):
        reduced -= {main.src[1]}
    terms = main.src[0].arg.terms if is_dot(main.src[0]) else 0
    even = bool(terms) and len(main.src) == 2 and in_whole_tiles(main.src[1], terms)
    if loop not in depends or not (even or all(map(is_fixed, reduced))):
        return False
    if any(chosen(opts, RFactor, r.arg.id) is not None for r in depends):
        return False
    nbytes = 8 * volume(reduced) * cost.PANEL_VECTORS * facts.lanes
    reads = {v for u, loads in facts.loads_of.items() if not is_total(u) for v in loads if slot(v) == slot(load)}
    return nbytes <= cost.SCRATCH_PANEL_BYTES and len(reads) == 1


def panel_overflows(facts: Facts, main: UOp, columns: int) -> bool:
    """Whether a panel of so many columns is larger than what rests in the cache, and may be packed in blocks of the
    reduction's outermost range."""
    ranges = [*facts.sig.loops, *main.src[1:]]
    if len(main.src) == 2 or len(facts.sig.reduces) > 1 or not all(map(is_fixed, ranges)):
        return False
    held = math.prod(part_held(c) for c in conditions(main) if ranges_of(c) <= frozenset(main.src[1:]))
    nbytes = held * volume(frozenset(main.src[1:])) * columns * cost.ELEMENT_BYTES
    return nbytes > cost.panel_bytes(facts.machine) and ranges_of(main) >= frozenset(facts.sig.loops)


def can_turn(facts: Facts, load: UOp, main: UOp, vectorized: UOp) -> bool:
    """Whether squares of `load` can be turned in registers where they are used, instead of packed: they lie along the
    reduction, and a tile has all rows that they are used for. So must those of other products in the kernel."""
    rows = volume(ranges_of(main) - ranges_of(load)) * len(facts.sig.reduces)
    if rows > min(facts.machine.accumulators, cost.TILE_ROWS) or facts.lanes == 1:
        return False
    for u in facts.sig.reduces:
        k = u.src[1]
        if len(u.src) > 2 or ranges_of(u) != ranges_of(main) or is_dot(u.src[0]):
            return False
        if not is_fixed(k) or size_max(k) < facts.lanes:
            return False
        across = [v for v in facts.loads_of[u] if facts.stride(v.src[0], vectorized) not in (0, 1)]
        words = all(v.dtype.itemsize * facts.lanes == facts.machine.vector_bytes for v in across)
        if not words or any(is_masked(v) or facts.stride(v.src[0], k) != 1 for v in across):
            return False
    return True


def packs_across(facts: Facts, u: UOp) -> bool:
    """A product both of whose operands are contiguous along the reduction (a @ b.T): whether one can be packed across
    it, for many rows. Then no partial sums need be folded, and the operands are read in one stream."""
    loads = facts.loads_of[u]
    apart = [r for r in facts.sig.loops if r in ranges_of(u) and sum(r in ranges_of(v) for v in loads) < len(loads)]
    columns = [r for r in apart if facts.stored_along(r)]
    return len(apart) > 1 and any(can_pack(facts, (), v, u, r) for r in columns for v in loads if r in ranges_of(v))


def packs_along_own_loop(facts: Facts, u: UOp) -> bool:
    """A product both of whose operands, and a loop, are contiguous along the reduction (the gradient of a convolution's
    weights): whether one of them has a loop of its own (the filters) that fills vectors, along which it is packed for
    all others."""
    loads = facts.loads_of[u]
    own = {v: [r for r in facts.sig.loops if [w for w in loads if r in ranges_of(w)] == [v]] for v in loads}
    alone = [(v, rs[0]) for v, rs in own.items() if len(rs) == 1 and facts.stride(v.src[0], rs[0]) != 1]
    wide = [(v, r) for v, r in alone if size_max(r) >= facts.lanes]
    return all(own.values()) and any(can_pack(facts, (), v, u, r) for v, r in wide)


def is_thin(facts: Facts, main: UOp, vectorized: UOp) -> bool:
    """Whether a product has so few terms, of columns that the first cache holds, that what is stored bounds it: it runs
    as an elementwise kernel does."""
    loads = facts.loads_of[main]
    if vectorized not in ranges_of(main) or len(facts.sig.reduces) > 1 or volume(frozenset(main.src[1:])) > facts.lanes:
        return False
    plain = all(not is_masked(u) and facts.stride(u.src[0], vectorized) in (0, 1) for u in loads)
    columns = sum(touched_bytes(u) for u in loads if vectorized in ranges_of(u))
    return plain and facts.stored_along(vectorized) and columns <= cost.columns_bytes(facts.machine)


def rows_apart(facts: Facts, main: UOp, r: UOp) -> bool:
    """Whether rows along `r` are so scattered along the reduction that a block of them is packed: a page or more a
    step, beyond what the cache holds."""
    rows = [u for u in facts.loads_of[main] if r in ranges_of(u)]
    step = facts.stride(rows[0].src[0], main.src[-1]) if len(rows) == 1 else 1
    if step is None or step in (0, 1) or is_masked(rows[0]):
        return False
    nbytes = volume(facts.reduced(main)) * abs(step) * rows[0].dtype.itemsize
    return nbytes > cost.near_bytes(facts.machine)


def row_loops(facts: Facts, main: UOp, vectorized: UOp) -> list[UOp]:
    """The loops on which no vector that is loaded depends: each vector is used once for all of their iterations."""
    wide = [u for u in facts.loads_of[main] if vectorized in ranges_of(u)]
    own = [r for r in facts.sig.loops if r in ranges_of(main) and r is not vectorized and size_max(r) > 1]
    return [r for r in own if not any(r in ranges_of(u) for u in wide)]
