"""Which operand of a product stays in a cache, packed, while the other one passes by.

The columns are the operand that is loaded in vectors, the rows the one of which each element is broadcast. Exactly one
of the decisions here is made for a product, `packing` says which."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import size_factor, size_max, volume
from manygrad.runtime.codegen.choose.blocks import block_of_panels, block_of_rows, blocked_reduction
from manygrad.runtime.codegen.choose.conditions import knows_conditions
from manygrad.runtime.codegen.choose.facts import Facts, is_masked, order_of, reordered, slot, tile_of
from manygrad.runtime.codegen.choose.operands import can_pack, can_turn, rows_apart
from manygrad.runtime.codegen.choose.vectors import product_time
from manygrad.runtime.codegen.kernel.dots import is_dot
from manygrad.runtime.codegen.opts import CacheRead, Matrix, Opts, Prefetch, ReduceBlock, Tensorize, Tile, Unroll
from manygrad.runtime.codegen.opts.opt import chosen, without
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class ProductTile:
    """A sum of products along a vectorized loop, its tile chosen, one operand of which has columns and one rows."""

    main: UOp
    vectorized: UOp
    row_loops: list[UOp]  # of the tile
    columns: UOp  # LOAD
    rows: UOp  # LOAD
    inner: list[UOp]  # loops of the rows alone, those of the tile last
    outer: list[UOp]  # the others of the product
    after: list[UOp]  # loops that the product does not depend on


def strided(facts: Facts, main: UOp, vectorized: UOp) -> list[UOp]:
    """The LOADs that are not contiguous along the vectorized loop: they must be packed."""
    return [u for u in facts.loads_of[main] if facts.stride(u.src[0], vectorized) not in (0, 1)]


def product_of(facts: Facts, opts: Opts, main: UOp, vectorized: UOp, row_loops: list[UOp]) -> ProductTile | None:
    """None: there are no rows, more than one operand has rows or columns, the columns cannot be packed, or what must be
    packed is not worth it."""
    if strided(facts, main, vectorized) and product_time(facts, opts, main, vectorized) is None:
        return None
    loads = facts.loads_of[main]
    moved = {u: any(r in ranges_of(u) for r in row_loops) for u in loads}
    columns = [u for u in loads if vectorized in ranges_of(u) and not moved[u]]
    rows = [u for u in loads if vectorized not in ranges_of(u) and moved[u]]
    if not row_loops or len(columns) != 1 or len(rows) != 1 or not can_pack(facts, opts, columns[0], main, vectorized):
        return None
    order = order_of(facts, opts)
    alone = [r for r in order if r in ranges_of(rows[0]) and r not in ranges_of(columns[0]) and r not in row_loops]
    inner = [*alone, *sorted(row_loops, key=order.index)]
    outer = [r for r in order if r in ranges_of(main) and r is not vectorized and r not in inner]
    after = [r for r in order if r not in ranges_of(main)]
    return ProductTile(main, vectorized, row_loops, columns[0], rows[0], inner, outer, after)


Packing = Callable[[Facts, Opts, ProductTile], Opts]


def packing(facts: Facts, opts: Opts, p: ProductTile) -> Packing:
    """Which decision a product takes."""
    if strided(facts, p.main, p.vectorized):
        if can_turn(facts, p.columns, p.main, p.vectorized) and not p.after:
            return turn_columns
    else:
        if columns_fit_first_cache(facts, p):
            return read_columns_in_place
        if volume(frozenset(p.inner)) < cost.SHARED_BY_ROWS:
            return split_columns_over_threads
    one = len(p.row_loops) == 1 and not loops_stored_closer(facts, p)
    apart = one and rows_apart(facts, p.main, p.row_loops[0]) and can_pack_rows(facts, opts, p)
    return keep_rows_in_cache if apart else keep_columns_in_cache


def pack_strided(facts: Facts, opts: Opts, main: UOp, vectorized: UOp) -> Opts:
    """Where a product has not one operand of rows and one of columns, what is not contiguous along the vectorized loop
    is packed, once for all loops that do not move it."""
    must = strided(facts, main, vectorized)
    if not must or product_time(facts, opts, main, vectorized) is None:
        return opts
    order = order_of(facts, opts)
    outer = [r for r in order if r is not vectorized and any(r in ranges_of(u) for u in must)]
    opts = reordered(facts, opts, [*outer, vectorized, *(r for r in order if r is not vectorized and r not in outer)])
    return (*opts, *(CacheRead(vectorized.arg.id, slot(u)) for u in must))


def read_columns_in_place(facts: Facts, opts: Opts, p: ProductTile) -> Opts:
    """All columns that a row meets fit the first cache: nothing is packed."""
    return (*opts, *prefetched_rows(facts, opts, p))


def split_columns_over_threads(facts: Facts, opts: Opts, p: ProductTile) -> Opts:
    """Too few rows for packing to pay: columns are read as they lie, by each thread its own."""
    return reordered(facts, opts, [*p.outer, p.vectorized, *p.inner, *p.after])


def turn_columns(facts: Facts, opts: Opts, p: ProductTile) -> Opts:
    """Columns that lie along the reduction (a @ b.T), for so few rows that a tile has them all: nothing would be read
    from a panel again, so squares of columns are turned in registers as they come."""
    tiles = [Tile(r.arg.id, size_max(r)) for r in p.inner if size_max(r) > 1]
    opts = reordered(facts, without(opts, Tile), [*p.outer, p.vectorized, *p.inner])
    squares = [Unroll(k.arg.id, facts.lanes) for k in dict.fromkeys(u.src[1] for u in facts.sig.reduces)]
    return (*opts, Tile(p.vectorized.arg.id, facts.lanes), *tiles, *squares)


def keep_rows_in_cache(facts: Facts, opts: Opts, p: ProductTile) -> Opts:
    """Rows that are pages apart along the reduction (a.T @ b): a block of them is packed and stays in the cache, for
    all columns. Of a long reduction both are packed some iterations at a time, the shorter one by every thread."""
    last = p.inner[-1]
    wide = size_max(p.vectorized) > cost.WIDE_PRODUCT * size_max(last)
    held, inside = (p.vectorized, p.inner) if wide else (last, [p.vectorized])
    blocks = blocked_reduction(facts, opts, p.main, held, inside) if not p.after else ()
    inner = [p.vectorized, *p.inner] if wide and blocks else [*p.inner, p.vectorized]
    packed = CacheRead(last.arg.id, slot(p.rows)), CacheRead(p.vectorized.arg.id, slot(p.columns))
    blocks = blocks or block_of_rows(facts, opts, p.main, last)
    return (*reordered(facts, opts, [*p.outer, *inner, *p.after]), *packed, *blocks)


def keep_columns_in_cache(facts: Facts, opts: Opts, p: ProductTile) -> Opts:
    """The columns stay in the cache, packed, in a block of panels that half of it holds, for all rows (a @ b, a @ b.T,
    convolutions). Rows that are read under conditions, converted, or joined again and again are packed, too; others are
    prefetched."""
    within = loops_stored_closer(facts, p)
    panel = (p.vectorized, *within)[-1]
    outer = [r for r in p.outer if r not in within]
    masked = is_masked(p.rows) and not product_knows_conditions(facts, opts, p)
    halves = p.rows.dtype.is_half and not is_dot(p.main.src[0])
    # groups of rows that lie apart would be joined again and again
    dot = p.main.src[0].arg if is_dot(p.main.src[0]) else None
    groups = dot is not None and (dot.in_parts or facts.stride(p.rows.src[0], p.main.src[-1]) != 1)
    pack_rows = (masked or halves or groups) and can_pack_rows(facts, opts, p)
    row: Opts = (CacheRead(p.inner[-1].arg.id, slot(p.rows)),) if pack_rows else prefetched_rows(facts, opts, p)
    least = 0
    if pack_rows and chosen(opts, Matrix) is not None:
        least = cost.PARTS_PANELS if dot is not None and dot.in_parts else cost.TURNED_PANELS
    blocks = block_of_panels(facts, opts, p.main, p.vectorized, least) if not within else ()
    order = [*outer, p.vectorized, *within, *p.inner, *p.after]
    return (*reordered(facts, opts, order), CacheRead(panel.arg.id, slot(p.columns)), *row, *blocks)


def unroll_product(facts: Facts, opts: Opts, p: ProductTile) -> Opts:
    """Some iterations of the reduction at once, if that leaves no rest: the loop itself takes a tenth of what the FMAs
    of one do."""
    k, n = p.main.src[-1], cost.PRODUCT_UNROLL
    blocked = chosen(opts, ReduceBlock, k.arg.id)
    even = size_factor(k) % n == 0 and (blocked is None or blocked.iterations % n == 0)
    if not even or any(chosen(opts, kind, k.arg.id) is not None for kind in (Unroll, Tensorize)):
        return opts
    return (*opts, Unroll(k.arg.id, n))


def columns_fit_first_cache(facts: Facts, p: ProductTile) -> bool:
    """Whether all columns that a row meets are few, and read as they lie."""
    nbytes = volume(facts.reduced(p.main) | {p.vectorized}) * p.columns.dtype.itemsize
    plain = not is_masked(p.columns) and not p.columns.dtype.is_half
    return nbytes <= cost.columns_bytes(facts.machine) and plain


def can_pack_rows(facts: Facts, opts: Opts, p: ProductTile) -> bool:
    """Groups for a dot instruction are not packed of what a condition leaves out along the reduction: all four would
    have to be asked."""
    mask = ranges_of(p.rows.src[0].src[2]) if is_masked(p.rows) else frozenset()
    if any(r in mask and chosen(opts, Tensorize, r.arg.id) is not None for r in p.main.src[1:]):
        return False
    return can_pack(facts, opts, p.rows, p.main, p.inner[-1]) and slot(p.rows) != slot(p.columns)


def product_knows_conditions(facts: Facts, opts: Opts, p: ProductTile) -> bool:
    rows = {r: tile_of(opts, r) for r in p.row_loops}
    return knows_conditions(p.main, p.vectorized, rows, -(-tile_of(opts, p.vectorized) // facts.lanes))


def prefetched_rows(facts: Facts, opts: Opts, p: ProductTile) -> tuple[Prefetch, ...]:
    """The next tile's rows are prefetched while this one's are read: each row is on other pages, where the processor
    does not look ahead by itself. For tiles whose FMAs leave the load ports the time; not for a matrix unit, which
    loads rows in squares."""
    if chosen(opts, Matrix) is not None:
        return ()
    k, vectors = p.main.src[-1], tile_of(opts, p.vectorized) // facts.lanes
    rows = math.prod(tile_of(opts, r) for r in p.row_loops)
    plain = len(p.main.src) == 2 and not is_masked(p.rows) and facts.stride(p.rows.src[0], k) == 1
    long = size_max(k) >= cost.PREFETCH_VECTORS * facts.lanes
    prefetches = plain and long and cost.load_ports_idle(rows, vectors)
    return (Prefetch(k.arg.id, slot(p.rows)),) if prefetches else ()


def loops_stored_closer(facts: Facts, p: ProductTile) -> list[UOp]:
    """Loops that only move the columns and whose results lie between those of the vectorized one: they run inside of
    it, so that what is stored side by side is stored soon after each other."""

    def closer(r: UOp) -> bool:
        steps = [(facts.stride(s.src[0], r), facts.stride(s.src[0], p.vectorized)) for s in facts.sig.stores]
        return all(a is not None and b is not None and 0 < abs(a) < abs(b) for a, b in steps)

    return [r for r in p.outer if r not in ranges_of(p.rows) and closer(r)]
