"""Decisions about memory traffic, after all others: what is kept of a row, prefetched, stored past the caches.

None of them changes a bit of the result.
"""

from __future__ import annotations

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import is_fixed, size_max, volume
from manygrad.runtime.codegen.choose.facts import Facts, largest_bytes, order_of, slot, tile_of, tiles_along, touched
from manygrad.runtime.codegen.kernel.dots import is_total
from manygrad.runtime.codegen.opts import (
    Block,
    CacheRead,
    ComputeAt,
    NontemporalStore,
    Opts,
    Prefetch,
    ReadAhead,
    RFactor,
    Tensorize,
    Tile,
    Unroll,
    Vectorize,
    loop_nest,
)
from manygrad.runtime.codegen.opts.alignment import begins_anywhere, whole_vectors
from manygrad.runtime.codegen.opts.keep import kept_values
from manygrad.runtime.codegen.opts.opt import chosen, without
from manygrad.runtime.codegen.target import LINE_BYTES
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.uop import UOp

Passes = dict[int, list[UOp]]  # argument -> the ranges along which passes read its rows, and do not keep them, in order


def reuse_row_values(facts: Facts, opts: Opts) -> Opts:
    """What a REDUCE over a row computes at some expense (the exponentials of a softmax) is kept for the REDUCEs after
    it and the loops inside that compute it again."""
    sig, vector = facts.sig, chosen(opts, Vectorize)
    if chosen(opts, Block) is not None:
        return opts
    found: dict[UOp, ComputeAt] = {}  # by the range that reads
    for w in sig.reduces:
        r = w.src[1]
        if len(w.src) != 2 or r in found or size_max(r) > cost.KEPT_ROW:
            continue
        after = [v.src[1] for v in sig.reduces if len(v.src) == 2 and w in v.src[0].toposort()]
        after += [x for x in sig.loops if x not in ranges_of(w)]
        for again in after:
            values = kept_values(sig, r, again, facts.written) if again not in found else {}
            around = {x.arg.id for u in values.values() for x in ranges_of(u)}
            if values and (vector is None or vector.axis not in around):
                found[again] = ComputeAt(r.arg.id, again.arg.id)
    return (*opts, *found.values())


def prefetch_rows(facts: Facts, opts: Opts, passes: Passes) -> Opts:
    """A late pass over rows that several passes go over prefetches the next tile's, each pass one row: memory is busy
    all the time. So does the only pass where it goes row by row. Where a row is a burst that a core can wait
    for, of an array that no cache holds, the first pass over each prefetches the next row, which comes in while the
    others compute."""
    early = in_bursts(facts, opts, passes)
    taken: list[UOp] = []
    for number, ranges in passes.items():
        turns = ranges if early else ranges[::-1]
        taken.append(next((r for r in turns if r not in taken), turns[0]))
        opts = (*opts, Prefetch(taken[-1].arg.id, number))
    return opts


def limit_rows_of_tile(facts: Facts, opts: Opts, passes: Passes) -> Opts:
    """A tile has as many of the rows that are prefetched as a part of the first cache holds with what is kept of them
    and with the next ones, at least 2; or one, where they come in bursts."""
    tile = chosen(opts, Tile, order_of(facts, opts)[0].arg.id) if passes else None
    if tile is None or chosen(opts, Vectorize, tile.axis) is not None:
        return opts
    rows = 1
    if not in_bursts(facts, opts, passes):
        nbytes = sum(2 * row_bytes(facts, number, ranges) for number, ranges in passes.items())
        if (kept := chosen(opts, ComputeAt)) is not None:
            row = next(u for u in facts.sig.nodes if u.op is Ops.RANGE and u.arg.id == kept.axis)
            nbytes += cost.ELEMENT_BYTES * size_max(row)
        rows = max(cost.LEAST_ROWS_HELD, cost.rows_bytes(facts.machine) // nbytes)
    fewer = Tile(tile.axis, min(tile.size, rows))
    return tuple(fewer if o is tile else o for o in opts if o is not tile or fewer.size > 1)


def read_ahead(facts: Facts, opts: Opts) -> Opts:
    """What a reduction reads in order, a piece a tile of the outermost loop, is asked for before it is reached: a
    processor looks ahead less far than memory is away where something is computed of what it reads. Rows that a tile
    reads side by side are followed by the next tile's. Of rows that a product reads element by element, a line is
    written out, for it to be asked for once."""
    sig, main = facts.sig, facts.main
    outer = next((r for r in order_of(facts, opts) if tiles_along(opts, r, size_max(r)) > 1), None)
    if outer is None or main is None or facts.machine.group_items > 1:
        return opts
    vector = chosen(opts, Vectorize)
    product = vector is not None and any(r.arg.id == vector.axis for r in ranges_of(main)) and len(main.src) == 2
    rows, terms = tile_of(opts, outer), volume(ranges_of(main) | {*main.src[1:]})
    taken = {o.argument for o in opts if isinstance(o, CacheRead | Prefetch)} | set(map(slot, sig.stores))
    for number in sorted(set(map(slot, facts.loads)) - taken):
        loads = [u for u in facts.loads if slot(u) == number]
        if largest_bytes(loads) < cost.AHEAD_OF_BYTES or terms > cost.AHEAD_USES * max(map(touched, loads)):
            continue
        piece = max(piece_bytes(u, outer, rows) for u in loads)
        if rows > 1 and piece <= (cost.PRODUCT_AHEAD_BYTES if product else cost.TILE_AHEAD_BYTES):
            opts = (*opts, ReadAhead(number, -(-cost.AHEAD_BYTES // piece) * piece))
            opts = line_written_out(facts, opts, loads) if product else opts
        elif piece <= cost.PIECE_BYTES:
            opts = (*opts, ReadAhead(number, cost.AHEAD_BYTES))
    return opts


def line_written_out(facts: Facts, opts: Opts, loads: list[UOp]) -> Opts:
    """A line's iterations of each sum that runs along `loads`: of one range that is not in lanes, so that its order
    stays."""
    for k in dict.fromkeys(u.src[1] for u in facts.sig.reduces if len(u.src) == 2):
        unrolled, in_lanes = chosen(opts, Unroll, k.arg.id), chosen(opts, RFactor, k.arg.id)
        taken = in_lanes is not None or (unrolled is not None and unrolled.times > cost.PRODUCT_UNROLL)
        if chosen(opts, Tensorize, k.arg.id) is not None and not is_fixed(k):
            continue  # (its terms must leave no rest, which more of them together may)
        if not taken and any(facts.stride(v.src[0], k) == 1 for v in loads):
            opts = (*without(opts, Unroll, axis=k.arg.id), Unroll(k.arg.id, LINE_BYTES // loads[0].dtype.itemsize))
    return opts


def stream_results(facts: Facts, opts: Opts) -> Opts:
    """Large outputs go past the caches: their lines are not read before they are written. So do smaller ones of a
    kernel that updates other memory in place: a gradient kept for the record beside the parameters' update."""
    sig, nest = facts.sig, loop_nest(facts.sig, opts)
    if nest.vectorized is None:
        return opts
    read = set(map(slot, facts.loads))
    written = {slot(s): s for s in sig.stores}
    least = cost.RECORD_BYTES if read & written.keys() else cost.STREAM_BYTES
    elements = volume(frozenset(sig.loops))
    large = {
        number: s
        for number, s in written.items()
        if s.arg is None and elements * s.src[1].dtype.itemsize >= least and number not in read
    }
    past = {number for number, s in large.items() if whole_vectors(s, nest.vectorized, nest.lanes)}
    if not past and large.keys() == written.keys() and begins_anywhere(sig, nest):
        past = set(large)
    return (*opts, *map(NontemporalStore, sorted(past - set(nest.streamed))))


# *** what is read in order ***


def piece_bytes(load: UOp, outer: UOp, tile: int) -> int:
    """Bytes between the first and the last that a tile of the outermost loop reads."""
    first = outer.replace(src=(UOp.const(dtypes.index, min(tile, size_max(outer))),))
    low, high = bounds(substitute(load.src[0].src[1], {outer: first}))
    return (high - low + 1) * load.dtype.itemsize


# *** rows ***


def row_passes(facts: Facts, opts: Opts) -> Passes:
    """The arguments whose rows, one an iteration of the outermost loop, are worth prefetching."""
    sig, loops = facts.sig, order_of(facts, opts)
    if not loops or not sig.reduces:
        return {}
    outer = loops[0]
    ranges = {u.arg.id: u for u in sig.nodes if u.op is Ops.RANGE}
    keeps = [(ranges[o.axis], ranges[o.again]) for o in opts if isinstance(o, ComputeAt)]
    kept = {v for r, again in keeps for v in kept_values(sig, r, again, facts.written)}
    along: dict[int, set[UOp]] = {}
    for u in facts.ast.toposort(lambda u: u not in kept):
        if u.op is Ops.LOAD and outer in ranges_of(u) and len(ranges_of(u)) == 2:
            along.setdefault(slot(u), set()).update(ranges_of(u) - {outer})
    packed = {o.argument for o in opts if isinstance(o, CacheRead)}
    order = [*dict.fromkeys(w.src[1] for w in sig.reduces if len(w.src) == 2 and not is_total(w)), *loops[1:]]
    found: Passes = {}
    for number in sorted(along.keys() - packed):
        turns = [r for r in order if r in along[number]]
        if not turns or size_max(turns[0]) > cost.KEPT_ROW or {r.src[0] for r in turns} != {turns[0].src[0]}:
            continue
        alone = len(order) == 1 and chosen(opts, RFactor, turns[0].arg.id) is not None and tile_of(opts, outer) == 1
        if len(turns) > 1 or alone:
            found[number] = turns
    return found


def in_bursts(facts: Facts, opts: Opts, passes: Passes) -> bool:
    """Whether the rows that are prefetched are good bursts, of an array that no cache holds, and something is kept of
    them."""
    if not facts.machine.burst_bytes or not passes or chosen(opts, ComputeAt) is None:
        return False
    nbytes = max(row_bytes(facts, number, ranges) for number, ranges in passes.items())
    large = nbytes * size_max(order_of(facts, opts)[0]) >= cost.LARGE_BYTES
    return large and cost.is_burst(nbytes, facts.machine)


def row_bytes(facts: Facts, number: int, ranges: list[UOp]) -> int:
    return size_max(ranges[0]) * facts.sig.params[number].itemsize
