"""How many tiles, and how much of a reduction, run before the next ones, so that what they read stays in a cache."""

from __future__ import annotations

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import is_fixed, size_max, volume
from manygrad.runtime.codegen.choose.facts import (
    Facts,
    is_masked,
    largest_bytes,
    order_of,
    tile_of,
    tiles_along,
    touched,
)
from manygrad.runtime.codegen.choose.operands import panel_overflows
from manygrad.runtime.codegen.kernel.dots import is_dot, is_total
from manygrad.runtime.codegen.opts import Block, Opts, ReduceBlock, Tensorize, Tile, Unroll
from manygrad.runtime.codegen.opts.opt import chosen, without
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


def even(count: int, most: int) -> int:
    """The size of blocks of at most `most`, all about the same, that `count` makes."""
    return -(-count // -(-count // most))


def fitting(count: int, most: int) -> int:
    """The largest blocks of at most `most` of `count` tiles that leave the last one hardly smaller: threads share
    blocks as if all were alike."""
    alike = (n for n in range(min(count, most), 1, -1) if -(-count // n) * n <= cost.UNEVEN_BLOCKS * count)
    return next(alike, 1)


def even_part(opts: Opts, k: UOp, most: int) -> int:
    """The size of parts of a reduction of at most `most` iterations, all about the same, of whole groups where an
    instruction adds up several."""
    grouped = chosen(opts, Tensorize, k.arg.id)
    terms = grouped.terms if grouped is not None else 1
    return even(-(-size_max(k) // terms), max(1, most // terms)) * terms


def block(facts: Facts, opts: Opts, main: UOp, r: UOp, nbytes: int, wanted: int, least: int = 0) -> Opts:
    """About as many tiles of `r` as fit `nbytes`, or `least`, at most those wanted, in blocks that are
    about the same."""
    each = volume(facts.reduced(main)) * tile_of(opts, r) * cost.ELEMENT_BYTES
    most = min(max(nbytes // each, least), wanted)
    tiles = fitting(tiles_along(opts, r, size_max(r)), most)
    fixed = facts.fixed_loops and ranges_of(main) >= frozenset(facts.sig.loops)
    if tiles < 2 or not fixed or sum(not is_total(u) for u in facts.sig.reduces) > len(facts.levels(main)):
        return ()
    return (Block(r.arg.id, tiles),)


def block_of_rows(facts: Facts, opts: Opts, main: UOp, r: UOp) -> Opts:
    """As many tiles of rows as rest in the cache, a block for every core, unless that makes them small."""
    count, least = tiles_along(opts, r, size_max(r)), cost.LEAST_PIECES
    wanted = max(-(-count // max(least, facts.machine.cores)), min(cost.BLOCKS, -(-count // least)))
    return block(facts, opts, main, r, cost.resting_rows_bytes(facts.machine), wanted)


def block_of_panels(facts: Facts, opts: Opts, main: UOp, vectorized: UOp, least: int = 0) -> Opts:
    """As many panels of columns as rest in the cache, or `least`, a block for every core (none where the rows lie in it
    anyhow, and what is stored would not, one by one); of a panel that is larger, as much of the reduction at a time."""
    nbytes, tile = cost.panel_bytes(facts.machine), tile_of(opts, vectorized)
    if is_dot(main.src[0]) and main.src[0].arg.in_parts:
        nbytes = nbytes * cost.ELEMENT_BYTES // cost.PARTS_BYTES
        if found := block_of_parts(facts, opts, main, vectorized, nbytes // (tile * cost.ELEMENT_BYTES)):
            return found
    if any(is_total(u) and vectorized in ranges_of(u) for u in facts.sig.reduces):
        return ()  # a block would add it up for each tile of rows
    if panel_overflows(facts, main, tile):
        k, each = main.src[1], volume(frozenset(main.src[2:])) * tile * cost.ELEMENT_BYTES
        return (Block(vectorized.arg.id, 1), ReduceBlock(k.arg.id, even_part(opts, k, nbytes // each)))
    rows = min(touched(u) for u in facts.loads_of[main] if vectorized not in ranges_of(u)) * cost.ELEMENT_BYTES
    if not facts.stored_along(vectorized) and rows <= cost.near_bytes(facts.machine):
        return ()
    return block(facts, opts, main, vectorized, nbytes, -(-size_max(vectorized) // (tile * facts.machine.cores)), least)


def block_of_parts(facts: Facts, opts: Opts, main: UOp, vectorized: UOp, rows: int) -> Opts:
    """Blocks of a product whose rows are packed in parts of bfloat16, where too few panels to pack them for rest in the
    cache (which holds `rows` of them): enough panels, as many for every core, and some of the reduction at a time."""
    k, unrolled = main.src[1], chosen(opts, Unroll, main.src[1].arg.id)
    panels, cores = tiles_along(opts, vectorized, size_max(vectorized)), facts.machine.cores
    most = range(cost.MOST_PARTS_PANELS, cost.PARTS_PANELS - 1, -1)
    alike = (n for n in most if -(-panels // (n * cores)) * n * cores <= cost.UNEVEN_BLOCKS * panels)
    wide, loops = next(alike, 0), frozenset(facts.sig.loops)
    if unrolled is None or not wide or rows >= cost.ENOUGH_PARTS_PANELS * size_max(k) or not ranges_of(main) >= loops:
        return ()
    if wide * volume(loops) // panels * cost.ELEMENT_BYTES > cost.RESTING_SUMS_BYTES:
        return ()
    units = even(size_max(k) // unrolled.times, max(1, rows // (wide * unrolled.times)))
    per = units * unrolled.times
    return (
        (Block(vectorized.arg.id, wide), ReduceBlock(k.arg.id, per))
        if cost.LEAST_PARTS_TERMS <= per < size_max(k)
        else ()
    )


def blocked_reduction(facts: Facts, opts: Opts, main: UOp, r: UOp, inside: list[UOp]) -> Opts:
    """Half of `r` (or a block of rows) at a time, and of the reduction as much as an eighth of the cache holds of it,
    so that a panel of the other operand stays in the first cache: for long reductions whose sums the cache holds, too,
    where so few pieces are enough for all cores."""
    machine, k, tile = facts.machine, main.src[1], tile_of(opts, r)
    count, length = tiles_along(opts, r, size_max(r)), volume(frozenset(main.src[1:]))
    tiles = -(-count // max(cost.LEAST_PIECES, machine.cores, -(-count // -(-cost.BLOCK_ROWS // tile))))
    size = tiles * tile
    sums = size * volume(frozenset(inside)) * cost.ELEMENT_BYTES
    fixed = facts.fixed_loops and all(map(is_fixed, main.src[1:])) and len(facts.sig.reduces) == 1
    short = size * length * cost.ELEMENT_BYTES < cost.near_bytes(machine)
    if not fixed or size < cost.LEAST_BLOCK_ROWS or sums > machine.cache_bytes or short:
        return ()
    most = min(cost.BLOCK_TERMS, cost.block_elements(machine) // size) * size_max(k) // length
    per = even_part(opts, k, most) if most >= cost.LEAST_BLOCK_TERMS else 0
    return (Block(r.arg.id, tiles), ReduceBlock(k.arg.id, per)) if 0 < per < size_max(k) else ()


def sum_rows_in_turn(facts: Facts, opts: Opts, main: UOp, vectorized: UOp, sharing: int) -> Opts:
    """Sums down the rows of what no cache holds: some rows of all columns at a time, in wide tiles, as they lie in
    memory, not all rows of a tile's columns. The sums (`sharing` REDUCEs) rest in the first cache, each core's for
    columns of its own."""
    k, sig, order = main.src[1], facts.sig, order_of(facts, opts)
    loads = facts.loads_of[main]
    fixed = facts.fixed_loops and all(map(is_fixed, main.src[1:])) and ranges_of(main) == frozenset(order)
    plain = all(not is_masked(u) and facts.stride(u.src[0], vectorized) == 1 for u in loads)
    alike = len(sig.reduces) <= sharing and all(u.dtype is main.dtype for u in sig.reduces)
    large = size_max(k) >= cost.TURNS * cost.ROWS_AT_ONCE and largest_bytes(loads) >= cost.LARGE_BYTES
    if not (fixed and plain and alike and large) or order[-1] is not vectorized:
        return opts
    vectors, machine = -(-size_max(vectorized) // facts.lanes), facts.machine
    pieces = volume(frozenset(order[:-1]))
    mine = vectors if pieces >= cost.CORE_PIECES * machine.cores else -(-vectors // machine.cores)
    wide = max(1, min(mine, cost.sums_in_registers(machine) // sharing))
    tiles = -(-min(mine, cost.sums_bytes(machine) // (machine.vector_bytes * sharing)) // wide)
    opts = (*without(opts, Tile, axis=vectorized.arg.id), Tile(vectorized.arg.id, wide * facts.lanes))
    return (*opts, Block(vectorized.arg.id, tiles), ReduceBlock(k.arg.id, cost.ROWS_AT_ONCE)) if tiles > 1 else opts
