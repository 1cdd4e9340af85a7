"""What a GPU runs a kernel with: which loops its threads run side by side, and what they share.

A warp's threads read and write at once what lies side by side in memory, so neighbouring threads have neighbouring
vectors of the loop along which results lie side by side; a sum that runs along its operands is dealt out to the threads
of a group; a product has a block of its result in each group, whose operands the group shares.

Each of these is tried in several sizes, the best first, and the first list that the kernel can take is chosen. Whether
a sum is dealt out follows from the pattern of its accesses and from its own length alone, as on a processor, so that a
batch of any size gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from manygrad.runtime.codegen.analysis.describe import size_max
from manygrad.runtime.codegen.choose.facts import Facts, order_of, tiles_along
from manygrad.runtime.codegen.choose.reductions import Split, accumulate_in_lanes, split_of
from manygrad.runtime.codegen.choose.threads import run_in_order
from manygrad.runtime.codegen.kernel.dots import is_dot, is_product
from manygrad.runtime.codegen.opts import Opts, Parallel, Reorder, Tile, Unroll, Vectorize, WarpMatrix, legal
from manygrad.runtime.codegen.opts.bind import DIMS, Bind
from manygrad.runtime.codegen.opts.bind_reduce import BindReduce
from manygrad.runtime.codegen.opts.cache_shared import CacheShared
from manygrad.runtime.codegen.opts.in_order import injective
from manygrad.runtime.codegen.opts.opt import chosen, without
from manygrad.runtime.codegen.target import Dot
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

GROUP = 256  # threads, where nothing else says how many
MOST_MEMBERS = 256  # threads to which a sum is dealt out
VECTORS_A_MEMBER = 4  # of a sum, at least, before more threads take part
# (rows, columns) of a thread's part of a product, and how many threads have one below the other, and side by side
PRODUCTS = ((8, 8, 16, 16), (4, 8, 16, 16), (4, 4, 16, 16), (4, 4, 8, 16), (4, 4, 8, 8), (2, 4, 8, 8))
SHARED_ITERATIONS = (16, 8, 4)
Sizes = tuple[int, int, int, int]
# the same of a product by matrix instructions: a warp has 8 threads one below the other, 4 side by side
WARP_PRODUCTS = ((8, 8, 16, 16), (8, 8, 16, 8), (4, 8, 16, 8), (4, 4, 16, 8), (4, 4, 8, 8), (4, 4, 8, 4))
LEAST_WAVES = 1.0  # groups for each multiprocessor, below which a product's blocks get smaller


def bind_groups(facts: Facts, opts: Opts) -> Opts:
    """The first of the lists below that is legal."""
    split = split_of(facts)
    for candidate in candidates(facts, opts, split):
        if legal(facts.sig, candidate) is None:
            return candidate
    return (*opts, Parallel(1)) if facts.sig.loops else opts


def candidates(facts: Facts, opts: Opts, split: Split) -> Iterator[Opts]:
    """Lists, the best first; not all of them are legal."""
    if any(s.arg is not None for s in facts.sig.stores):
        yield from in_order(facts, opts)
        return
    if facts.main is not None:
        if facts.main not in split:
            yield from products(facts, opts, facts.main)
        if split:
            yield from dealt_out(facts, opts, split)
    yield from side_by_side(facts, opts)


def in_order(facts: Facts, opts: Opts) -> Iterator[Opts]:
    """Stores that may meet at one address: threads for all loops along which they never do, those of a group for
    vectors of one of them."""
    own = run_in_order(facts, opts)
    if chosen(own, Parallel) is not None:
        own = without(own, Tile)
        r = order_of(facts, own)[0]
        items = min(GROUP, _power_above(tiles_along(own, r, size_max(r))))
        others = [x for x in facts.sig.loops if x is not r and all(injective(s.src[0], x) for s in facts.sig.stores)]
        moved = tuple(Reorder(x.arg.id, r.arg.id) for x in others)
        bound = (Bind(r.arg.id, items),) if items >= 2 else ()
        yield (*without(own, Parallel), *moved, Parallel(1 + len(moved)), *bound)
    yield own


# *** results side by side ***


def side_by_side(facts: Facts, opts: Opts) -> Iterator[Opts]:
    """Neighbouring threads have neighbouring results; a vector each, where all that is read fits it."""
    loops = facts.sig.loops
    if not loops:
        return
    along = next((r for r in reversed(loops) if facts.stored_along(r)), loops[-1])
    wide = (*opts, Vectorize(along.arg.id, facts.lanes))
    if size_max(along) >= facts.lanes and facts.contiguous(facts.loads, along):
        yield (*wide, Parallel(len(loops)), *bound(facts, wide, along))
    across = next((r for r in reversed(loops) if r is not along and _read_along(facts, r, along)), None)
    yield (*opts, Parallel(len(loops)), *bound(facts, opts, along, across))
    yield (*opts, Parallel(len(loops)))


def _read_along(facts: Facts, r: UOp, along: UOp) -> bool:
    """Whether something lies side by side along `r` that does not along the results (a transpose)."""
    return any(facts.stride(u.src[0], r) == 1 and facts.stride(u.src[0], along) not in (0, 1) for u in facts.loads)


def bound(facts: Facts, opts: Opts, along: UOp, across: UOp | None = None, items: int = GROUP) -> Opts:
    """A group of `items` threads: along that loop, then along the innermost other ones, as long as there are tiles. A
    group reads whole sectors of what lies side by side `across`: fewer of its threads are along the results."""
    found: list[Bind] = []
    others = [r for r in reversed(facts.sig.loops) if r is not along and r is not across]
    for r in (along, *([] if across is None else [across]), *others):
        most = min(items, facts.machine.warp_items) if across is not None else items
        count = min(most, _power_above(tiles_along(opts, r, size_max(r))))
        if count >= 2 and len(found) < DIMS:
            found.append(Bind(r.arg.id, count))
            items //= count
    return tuple(found)


# *** sums ***


def dealt_out(facts: Facts, opts: Opts, split: Split) -> Iterator[Opts]:
    """The sums that run along what they read, dealt out to neighbouring threads, each of which has vectors of it; what
    is stored along a loop inside of them is dealt out to the same threads."""
    sig = facts.sig
    ranges = list(dict.fromkeys(split.get(u, u.src[-1]) for u in sig.reduces))
    rows = {r for u in sig.reduces for r in ranges_of(u)}
    outer = max((i + 1 for i, r in enumerate(sig.loops) if r in rows), default=0)
    parallel = (Parallel(outer),) if outer else ()
    for lanes in (True, False):
        own = accumulate_in_lanes(facts, opts, split) if lanes else opts
        vectors = min(-(-size_max(r) // (facts.lanes if lanes else 1)) for r in ranges)
        members = max(2, min(MOST_MEMBERS, _power_below(vectors // VECTORS_A_MEMBER)))
        across = tuple(BindReduce(r.arg.id, members) for r in ranges)
        inside = _along_rows(facts, outer) if lanes else ()
        last = sig.loops[outer - 1] if outer else None
        groups = math.gcd(size_max(last), _power_below(max(1, GROUP // members))) if last is not None else 1
        for store in (inside, ()) if inside else ((),):
            if last is not None and groups >= 2:
                yield (*own, *store, *parallel, *across, Bind(last.arg.id, groups))
            yield (*own, *store, *parallel, *across)


def _along_rows(facts: Facts, outer: int) -> Opts:
    """Vectors of what is stored along a loop inside of the rows."""
    for r in facts.sig.loops[outer:]:
        loads = [u for u in facts.loads if r in ranges_of(u)]
        if facts.stored_along(r) and facts.contiguous(loads, r) and size_max(r) % facts.lanes == 0:
            return (Vectorize(r.arg.id, facts.lanes),)
    return ()


# *** products ***


def products(facts: Facts, opts: Opts, main: UOp) -> Iterator[Opts]:
    """A block of the result for each group, a smaller one for each of its threads; a part of both operands is copied to
    shared memory by all threads and read there by each."""
    term, loads = facts.term(main), facts.loads_of[main]
    by_matrices = is_dot(term)
    if main.arg is not Ops.ADD or not is_product(term) or (len(loads) != 2 and not by_matrices):
        return
    loops, own = facts.sig.loops, [ranges_of(u) for u in (term.src if by_matrices else loads)]
    columns = next((r for r in reversed(loops) if facts.stored_along(r) and (r in own[0]) != (r in own[1])), None)
    if columns is None:
        return
    other = own[0] if columns in own[1] else own[1]
    rows = next((r for r in reversed(loops) if r in other and not (r in own[0] and r in own[1])), None)
    if rows is None or rows is columns:
        return
    sizes = [s for s in PRODUCTS if s[0] * s[2] <= size_max(rows) and s[1] * s[3] <= size_max(columns)]
    slots = sorted({u.src[0].src[0].arg for u in loads})
    k = main.src[-1]
    if by_matrices:
        yield from by_warps(facts, opts, term.arg, k, rows, columns)
    if len(loads) != 2:
        return
    for down, side, below, beside in by_waves(facts, rows, columns, sizes):
        lanes = min(facts.lanes, side)
        tiles = (Tile(rows.arg.id, down), Vectorize(columns.arg.id, lanes), Tile(columns.arg.id, side))
        bind = (Bind(rows.arg.id, below), Bind(columns.arg.id, beside))
        block = (*opts, *tiles, Parallel(len(loops)), *bind)
        for n in SHARED_ITERATIONS:
            yield (*block, *(CacheShared(k.arg.id, s, n) for s in slots))
    for down, side, below, beside in by_waves(facts, rows, columns, sizes):
        contiguous = facts.contiguous([u for u in loads if columns in ranges_of(u)], columns)
        vectors = (Vectorize(columns.arg.id, min(facts.lanes, side)),) if contiguous else ()
        part = (Tile(rows.arg.id, down), *vectors, Tile(columns.arg.id, side))
        yield (*opts, *part, Parallel(len(loops)), Bind(rows.arg.id, below), Bind(columns.arg.id, beside))


def by_warps(facts: Facts, opts: Opts, dot: Dot, k: UOp, rows: UOp, columns: UOp) -> Iterator[Opts]:
    """Matrix instructions of warps, the largest parts that still give each multiprocessor one."""
    for down, side, below, beside in by_waves(facts, rows, columns, WARP_PRODUCTS):
        tiles = (Tile(rows.arg.id, down), Vectorize(columns.arg.id, 4), Tile(columns.arg.id, side))
        bind = (Bind(rows.arg.id, below), Bind(columns.arg.id, beside))
        terms = Unroll(k.arg.id, dot.block_terms), WarpMatrix(k.arg.id)
        yield (*opts, *tiles, *terms, Parallel(len(facts.sig.loops)), *bind)


def by_waves(facts: Facts, rows: UOp, columns: UOp, sizes: Sequence[Sizes]) -> list[Sizes]:
    """The largest that give each multiprocessor a group first, then those that do not, the smallest first."""
    full = [s for s in sizes if _groups(facts, rows, columns, s) >= LEAST_WAVES * facts.machine.cores]
    return [*full, *reversed([s for s in sizes if s not in full])]


def _groups(facts: Facts, rows: UOp, columns: UOp, sizes: Sizes) -> int:
    """How many groups a product is cut into."""
    down, side, below, beside = sizes
    others = math.prod(size_max(r) for r in facts.sig.loops if r not in (rows, columns))
    return others * -(-size_max(rows) // (down * below)) * -(-size_max(columns) // (side * beside))


def _power_below(n: int) -> int:
    """The greatest power of two that is not more than `n`."""
    return 1 << max(0, n.bit_length() - 1)


def _power_above(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())
