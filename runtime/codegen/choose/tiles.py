"""How many iterations of which loops stand in registers at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import is_fixed, part_held, size_max, volume
from manygrad.runtime.codegen.choose.conditions import conditions, part_done
from manygrad.runtime.codegen.choose.facts import Facts, largest_bytes, reordered, slot
from manygrad.runtime.codegen.choose.operands import panel_overflows, row_loops, rows_apart
from manygrad.runtime.codegen.choose.vectors import result_time
from manygrad.runtime.codegen.kernel.dots import is_product
from manygrad.runtime.codegen.opts import (
    Align,
    NontemporalStore,
    Opts,
    Reorder,
    RFactor,
    Tile,
    Unroll,
    Vectorize,
    legal,
)
from manygrad.runtime.codegen.opts.alignment import whole_vectors
from manygrad.runtime.codegen.opts.opt import chosen, without
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

# *** products ***

Parts = list[tuple[int, int]]  # (rows of a tile, number of such tiles)


def tile_rows_and_vectors(facts: Facts, opts: Opts, main: UOp, vectorized: UOp, accumulators: int) -> Opts:
    """A product along a vectorized loop: the tile of rows x vectors of accumulators that takes least time: few loads an
    FMA, little waste at the ends, stores side by side.

    The rows are loops on which no vector that is loaded depends: each vector is used once a row. Where the first of
    them is short, a tile has all of it and some iterations of another one.
    """
    columns = -(-size_max(vectorized) // facts.lanes)  # vectors
    free = tileable_rows(facts, main, vectorized)
    packed = bool(free) and rows_apart(facts, main, free[0])
    best: tuple[dict[UOp, int], int] = ({}, 1)
    least = math.inf
    for vectors in cost.TILE_VECTORS:
        if vectors > max(1, columns) or vectors > accumulators or not width_fits(facts, main, vectorized, vectors):
            continue
        for rows, parts in row_tiles(main, free, min(accumulators // vectors, cost.TILE_ROWS)):
            time = tile_time(facts, main, vectorized, rows, parts, vectors, packed)
            if time < least - 1e-9:
                best, least = (rows, vectors), time
    rows, vectors = best
    wide = (Tile(vectorized.arg.id, vectors * facts.lanes),) if vectors > 1 else ()
    return (*opts, *wide, *(Tile(r.arg.id, m) for r, m in rows.items() if m > 1))


def tileable_rows(facts: Facts, main: UOp, vectorized: UOp) -> list[UOp]:
    """The loops that may be rows, the best first: those with enough iterations, or the most, then the innermost
    ones."""
    return sorted(
        row_loops(facts, main, vectorized),
        key=lambda r: (min(size_max(r), cost.ENOUGH_ROWS), facts.sig.loops.index(r)),
        reverse=True,
    )


def rows_of(facts: Facts, opts: Opts, main: UOp, vectorized: UOp) -> list[UOp]:
    """The loops that are a tile's rows."""
    free = tileable_rows(facts, main, vectorized)
    tiled = [o.axis for o in opts if isinstance(o, Tile)]
    found = [next(r for r in free if r.arg.id == axis) for axis in tiled if axis != vectorized.arg.id]
    return found or free[:1]


def width_fits(facts: Facts, main: UOp, vectorized: UOp, vectors: int) -> bool:
    """Whether tiles may be so many vectors wide: of a size that is known at run time only powers of two (it is rather a
    multiple of these); of a panel larger than the cache, as long as every core has one and a cache holds a block."""
    if vectors & (vectors - 1) and not is_fixed(vectorized):
        return False
    if vectors == 1 or not panel_overflows(facts, main, vectors * facts.lanes):
        return True
    panels = -(-size_max(vectorized) // (vectors * facts.lanes))
    least_block = volume(frozenset(main.src[2:])) * vectors * facts.lanes * cost.ELEMENT_BYTES
    return panels >= facts.machine.cores and least_block <= facts.machine.cache_bytes


def tile_time(
    facts: Facts, main: UOp, vectorized: UOp, rows: dict[UOp, int], parts: Parts, vectors: int, packed: bool
) -> float:
    """FMAs that one takes in tiles of `rows` x `vectors`, those at the ends, masks and stores included; `packed`: of
    rows that are packed."""
    columns = -(-size_max(vectorized) // facts.lanes)
    inside, done = part_done(main, vectorized, rows, vectors)
    if rows:
        widths = ((vectors, columns // vectors), (columns % vectors, 1))
        work = [(n * m, k * v, cost.fma_time(m * inside, v)) for m, n in parts for v, k in widths]
        time = sum(m * v * unit for m, v, unit in work) / (sum(m * n for m, n in parts) * columns)
        time *= done * (cost.ODD_ROWS_TIME if packed and parts[0][0] % cost.PACKED_ROWS else 1.0)
    else:
        time = cost.rowless_time(-(-columns // vectors), vectors, columns, facts.machine.cores)
    return time + max(result_time(facts, s, main, vectorized, rows) for s in facts.sig.stores) / volume(
        frozenset(main.src[1:])
    )


def row_tiles(main: UOp, free: list[UOp], most: int) -> Iterator[tuple[dict[UOp, int], Parts]]:
    """Candidates of at most `most` rows: (rows of each loop, the tiles that this makes of them)."""
    if not free:
        yield {}, [(1, 1)]
        return
    whole = size_max(free[0])
    for m in range(1, min(whole, most) + 1):
        yield {free[0]: m}, [(m, whole // m), (whole % m, 1)]
    found = conditions(main)
    orders: list[tuple[UOp, ...]] = [tuple(free[:2])] if len(free) > 1 else []
    if found:
        orders = [*itertools.permutations(free, 2), *itertools.permutations(free, 3)]
    for *all_of, last in orders:
        whole, size = math.prod(size_max(r) for r in all_of), size_max(last)
        # positions that a condition always leaves out have no sums
        alive = math.prod(part_held(c) for c in found if ranges_of(c) <= frozenset(all_of))
        for m in range(2, min(size, int(most / (whole * alive) + 1e-6), cost.TILE_POSITIONS // whole) + 1):
            yield {**{r: size_max(r) for r in all_of}, last: m}, [(whole * m, size // m), (whole * (size % m), 1)]


def tile_outputs_of_dot_product(facts: Facts, opts: Opts, main: UOp, accumulators: int) -> Opts:
    """A reduction in lanes along itself: the accumulators of several outputs side by side, so that what is loaded
    serves more than one (of a matrix in blocks those of its rows, which have the same block of the other operand);
    of large rows one at a time, as they lie in memory."""
    own = [r for r in facts.sig.loops if r in ranges_of(main) and size_max(r) > 1]
    loads = facts.loads_of[main]

    def apart(m: UOp, n: UOp) -> bool:
        return any(m in ranges_of(u) and n not in ranges_of(u) for u in loads)

    if pairs := [(m, n) for m in own for n in own if m is not n and apart(m, n) and apart(n, m)]:
        tm, tn = next(tiles for least, tiles in cost.DOT_TILES.items() if accumulators >= least)
        at = facts.sig.loops.index
        area = lambda p: min(size_max(p[0]), tm) * min(size_max(p[1]), tn)  # noqa: E731
        m, n = max(pairs, key=lambda p: (area(p), at(p[0]) + at(p[1]), -at(p[0])))
        return (*opts, Tile(m.arg.id, even_tile(size_max(m), tm)), Tile(n.arg.id, even_tile(size_max(n), tn)))
    if not own:
        return opts
    large = largest_bytes(loads) >= cost.LARGE_BYTES
    long = size_max(main.src[-1]) * cost.ELEMENT_BYTES >= cost.LONG_ROW_BYTES
    if len(facts.sig.reduces) == 1 and large and long:
        return opts
    shared = [r for r in own if any(r not in ranges_of(u) for u in loads)] or own
    t = even_tile(size_max(shared[-1]), cost.dot_positions(accumulators))
    return (*opts, Tile(shared[-1].arg.id, t)) if t > 1 else opts


def write_out_blocks(facts: Facts, opts: Opts, split: Mapping[UOp, UOp], accumulators: int) -> Opts:
    """Sums in lanes over blocks that have something of their own (the scale of quantised weights): all of a block, as
    far as it is short, is written out, so that vectors are unpacked by known shifts and the block's own is there for
    all of them. One output at a time, as the blocks lie in memory; of several rows a tile, for which they are unpacked
    once."""
    for u, along in split.items():
        if inner := block_of(facts, u, along):
            opts = tile_rows_of_blocks(facts, without(opts, Tile), u, inner, accumulators)
            opts = (*opts, *(Unroll(r.arg.id, size_max(r)) for r in inner if chosen(opts, Unroll, r.arg.id) is None))
    return opts


def tile_rows_of_blocks(facts: Facts, opts: Opts, u: UOp, inner: list[UOp], accumulators: int) -> Opts:
    """The rows are the loops on which nothing depends that is read once a block; they run inside of the others."""
    own = [v for v in facts.loads_of[u] if not ranges_of(v) & {*inner}]
    order = [r for r in facts.sig.loops if r in ranges_of(u)]
    rows = [r for r in order if not any(r in ranges_of(v) for v in own) and size_max(r) > 1]
    columns = [r for r in order if r not in rows]
    if not rows or not columns:
        return opts
    most = next(n for least, n in cost.BLOCK_TILE_ROWS.items() if accumulators >= least)
    m = even_tile(size_max(rows[-1]), most)
    vectors = m * volume(frozenset(inner)) // facts.lanes
    n = 2 if 2 * vectors <= cost.BLOCK_TILE_BODY and 2 * m <= accumulators else 1
    tiles = [Tile(r.arg.id, size) for r, size in ((rows[-1], m), (columns[-1], n)) if size > 1]
    return (*reordered(facts, opts, [*columns, *rows]), *tiles)


def block_of(facts: Facts, u: UOp, split: UOp) -> list[UOp]:
    """The inner ranges of a REDUCE, not all of them, the innermost of which runs in lanes, that are short, if something
    is read once for all of them."""
    *outer, last = u.src[1:]
    loads = [ranges_of(v) for v in facts.loads_of[u]]
    if last is not split or not any(rs & {*outer} and last not in rs for rs in loads):
        return []
    vectors, inner = 1, list[UOp]()
    for r in reversed(u.src[1:]):
        vectors *= size_max(r) // facts.lanes if r is split else size_max(r)
        if not is_fixed(r) or vectors > cost.BLOCK_VECTORS or (r is split and size_max(r) % facts.lanes):
            break
        inner.append(r)
    return inner[: len(outer)]


def even_tile(size: int, most: int) -> int:
    """A tile of at most `most` that cuts `size` with the least rest."""
    return max(range(1, min(size, most) + 1), key=lambda t: (size / (-(-size // t) * most), t))


# *** elementwise kernels, and what is stored ***


def tile_elementwise(facts: Facts, opts: Opts, vectorized: UOp) -> Opts:
    """An elementwise kernel: as a transpose in squares, in tall tiles where a load runs along another loop, or several
    vectors at once."""
    crossing = [
        r for r in facts.sig.loops if r is not vectorized and size_max(r) > 1 and loaded_across(facts, r, vectorized)
    ]
    if crossing and not facts.sig.reduces:
        tall = Tile(crossing[-1].arg.id, min(facts.lanes, size_max(crossing[-1])))
        return squares(facts, opts, vectorized, crossing[-1]) or (*opts, tall)
    return several_vectors(facts, opts, vectorized)


def loaded_across(facts: Facts, r: UOp, vectorized: UOp) -> bool:
    """Whether a load is contiguous along `r` and strided along the vectorized loop."""
    return any(facts.stride(u.src[0], r) == 1 and facts.stride(u.src[0], vectorized) not in (0, 1) for u in facts.loads)


def several_vectors(facts: Facts, opts: Opts, vectorized: UOp) -> Opts:
    """Several vectors at once hide the latency of loads, the fewer the more is computed of each."""
    work = sum(u.op in GroupOp.ALU or u.op is Ops.LOAD for u in facts.operations)
    vectors = next((n for most, n in cost.VECTORS_OF_WORK if work <= most), 1)
    while vectors > 1 and size_max(vectorized) < vectors * facts.lanes:
        vectors //= 2
    return (*opts, Tile(vectorized.arg.id, vectors * facts.lanes)) if vectors > 1 else opts


def squares(facts: Facts, opts: Opts, vectorized: UOp, crossing: UOp) -> Opts | None:
    """A transpose: squares of two lines each, in vectors that begin at lines also where rows do not. A large one goes
    along the source's rows and is stored past the caches. None: the rows are too short, or there are more results."""
    sig, lanes = facts.sig, facts.lanes
    store = sig.stores[0]
    if len(sig.stores) > 1 or size_max(crossing) < lanes or size_max(vectorized) < cost.TURNED_LANE_VECTORS * lanes:
        return None
    found: Opts = (Tile(crossing.arg.id, lanes), Tile(vectorized.arg.id, cost.TURNED_LINES * lanes))
    if not whole_vectors(store, vectorized, lanes):
        found = (*found, Align(vectorized.arg.id))
        if legal(sig, (Vectorize(vectorized.arg.id, lanes), *found)) is not None:
            return None
    nbytes = volume(frozenset(sig.loops)) * store.src[1].dtype.itemsize
    if nbytes < cost.TRANSPOSED_BYTES or any(slot(u) == slot(store) for u in facts.loads):
        return (*opts, *found)
    found = (*found, NontemporalStore(slot(store)))
    inner = sig.loops.index(crossing) > sig.loops.index(vectorized)
    return (*opts, *found) if inner else (*opts, Reorder(vectorized.arg.id, crossing.arg.id), *found)


def tile_results_side_by_side(facts: Facts, opts: Opts, vectorized: UOp) -> Opts:
    """Where results do not lie side by side along the vectorized loop, but do along short other loops (max pools): all
    of these in a tile, which is turned in registers, the reduction written out. (A product has chosen its tile with
    regard to that.)"""
    if len(facts.sig.stores) > 1 or any(is_product(facts.term(u)) for u in facts.sig.reduces):
        return opts
    index = facts.sig.stores[0].src[0]
    strides = {r: facts.stride(index, r) for r in facts.sig.loops}
    side, tiles = 1, []
    for r in sorted(facts.sig.loops, key=lambda r: strides[r] or 0):
        if r is not vectorized and strides[r] == side and is_fixed(r) and side * r.src[0].arg <= facts.lanes:
            side *= r.src[0].arg
            tiles.append(Tile(r.arg.id, r.src[0].arg))
    if strides[vectorized] == 1 or side < cost.LEAST_TURNED:
        return opts
    opts = (*without(opts, Tile), *tiles)
    if chosen(opts, RFactor) is not None:
        return opts
    for u in facts.sig.reduces:
        for r in reversed(u.src[1:]) if volume(frozenset(u.src[1:])) <= facts.lanes else ():
            if is_fixed(r) and chosen(opts, Unroll, r.arg.id) is None:
                opts = (*opts, Unroll(r.arg.id, r.src[0].arg))
    return opts
