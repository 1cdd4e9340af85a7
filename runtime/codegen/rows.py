"""Decisions about memory traffic, after all others: what is kept of a row, asked for ahead, stored past the caches.

None of them changes a bit of the result.
"""

from __future__ import annotations

from manygrad.runtime.codegen.describe import Signature, size_max, volume
from manygrad.runtime.codegen.dots import is_total
from manygrad.runtime.codegen.keep import kept_values
from manygrad.runtime.codegen.lines import begins_anywhere, whole_vectors
from manygrad.runtime.codegen.opts import (
    Align,
    Block,
    CacheRead,
    ComputeAt,
    NontemporalStore,
    Opt,
    Prefetch,
    Reorder,
    Tile,
    Vectorize,
    legal,
    loop_nest,
)
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.runtime.codegen.products import LARGE_BYTES
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

ROW = 16384  # elements of a row that is kept: several fit the second cache
CACHE_BYTES = 24 << 10  # of the first cache, for a tile's rows: half of it, as rows of 4 KiB share its sets
STREAM_BYTES = 64 << 20  # an output of at least this much has left the caches before it is read
RECORD_BYTES = 1 << 20  # the same beside an update in place, whose lines stay in the caches instead
TRANSPOSED_BYTES = 4 << 20  # the same of a transpose, which writes many rows in turns


def memory_opts(sig: Signature, opts: tuple[Opt, ...], burst_bytes: int = 0) -> tuple[Opt, ...]:
    """`opts` with what is decided here; `burst_bytes`: see `Machine`."""
    kept = keep(sig, opts)
    ahead = prefetch(sig, opts, kept)
    rows = rows_held(sig, kept, ahead)
    if kept and ahead and in_bursts(sig, opts, ahead, burst_bytes):
        ahead, rows = prefetch(sig, opts, kept, early=True), 1
    return (*fewer_rows(sig, opts, rows), *kept, *ahead, *stream(sig, opts))


def in_bursts(sig: Signature, opts: tuple[Opt, ...], ahead: tuple[Prefetch, ...], burst_bytes: int) -> bool:
    """Whether a row is a good burst, of an array that no cache holds."""
    length = {u.arg[0]: size_max(u) for u in sig.nodes if u.op is Ops.RANGE}
    row_bytes = max(length[o.axis] * sig.params[o.argument].itemsize for o in ahead)
    return (
        burst_bytes // 2 <= row_bytes <= burst_bytes
        and row_bytes * size_max(loop_nest(sig, opts).loops[0]) >= LARGE_BYTES
    )


def rows_held(sig: Signature, kept: tuple[ComputeAt, ...], ahead: tuple[Prefetch, ...]) -> int | None:
    """As many rows as a part of the first cache holds with what is kept of them and with the next ones; at least 2.
    None: any number."""
    length = {u.arg[0]: size_max(u) for u in sig.nodes if u.op is Ops.RANGE}
    row_bytes = sum(2 * length[o.axis] * sig.params[o.argument].itemsize for o in ahead)
    row_bytes += sum(4 * length[o.axis] for o in kept[:1])
    return max(2, CACHE_BYTES // row_bytes) if ahead else None


def fewer_rows(sig: Signature, opts: tuple[Opt, ...], rows: int | None) -> tuple[Opt, ...]:
    """At most so many rows in a tile."""
    if rows is None:
        return opts
    outer = loop_nest(sig, opts).loops[0].arg[0]
    tile = chosen(opts, Tile, outer)
    if tile is None or chosen(opts, Vectorize, outer) is not None:
        return opts
    fewer = Tile(outer, min(tile.size, rows))
    return tuple(fewer if o is tile else o for o in opts if o is not tile or fewer.size > 1)


def keep(sig: Signature, opts: tuple[Opt, ...]) -> tuple[ComputeAt, ...]:
    """What a REDUCE computes at some expense, for the REDUCEs after it and the loops inside that compute it again."""
    vector = chosen(opts, Vectorize)
    if chosen(opts, Block) is not None:
        return ()
    found: dict[UOp, ComputeAt] = {}  # by the range that reads
    for w in sig.reduces:
        r = w.src[1]
        if len(w.src) != 2 or r in found or size_max(r) > ROW:
            continue
        after = [v.src[1] for v in sig.reduces if len(v.src) == 2 and w in v.src[0].toposort()]
        after += [x for x in sig.loops if x not in ranges_of(w)]
        for again in after:
            values = kept_values(sig, r, again) if again not in found else {}
            if values and not any(
                vector is not None and x.arg[0] == vector.axis for u in values.values() for x in ranges_of(u)
            ):
                found[again] = ComputeAt(r.arg[0], again.arg[0])
    return tuple(found.values())


def prefetch(
    sig: Signature, opts: tuple[Opt, ...], kept: tuple[ComputeAt, ...], early: bool = False
) -> tuple[Prefetch, ...]:
    """Of rows that several passes go over, a late pass over each asks for the next tile's, each pass for one row:
    memory is busy all the time. So does the only pass where it goes row by row. `early`: the first pass over each asks
    for the next row, in a burst; it comes in while the others compute."""
    if not sig.loops or not sig.reduces:
        return ()
    nest = loop_nest(sig, opts)
    loops, outer = nest.loops, nest.loops[0]
    by_id = {u.arg[0]: u for u in sig.nodes if u.op is Ops.RANGE}
    taken = {v for o in kept for v in kept_values(sig, by_id[o.axis], by_id[o.again])}
    packed = {o.argument for o in opts if isinstance(o, CacheRead)}
    order = [*(w.src[1] for w in sig.reduces if len(w.src) == 2 and not is_total(w)), *loops[1:]]
    passes: dict[int, set[UOp]] = {}  # argument -> ranges it is read along
    for u in sig.nodes[-1].toposort(lambda u: u not in taken):
        if u.op is Ops.LOAD and outer in ranges_of(u) and len(ranges_of(u)) == 2:
            passes.setdefault(u.src[0].src[0].arg, set()).update(ranges_of(u) - {outer})
    found: dict[int, UOp] = {}
    for slot, ranges in sorted((slot, ranges) for slot, ranges in passes.items() if slot not in packed):
        last = [r for r in order if r in ranges]
        alone = len(last) == len(order) == 1 and last[0] in nest.reduce_lanes and nest.tile_of(outer) == 1
        if (len(last) > 1 or alone) and {r.src[0] for r in last} == {last[0].src[0]} and size_max(last[0]) <= ROW:
            turns = last if early else last[::-1]
            found[slot] = next((r for r in turns if r not in found.values()), turns[0])
    return tuple(Prefetch(r.arg[0], slot) for slot, r in found.items())


def stream(sig: Signature, opts: tuple[Opt, ...]) -> tuple[Opt, ...]:
    """Large outputs go past the caches: their lines are not read before they are written.

    So do smaller ones of a kernel that updates other memory in place: a gradient kept for the record beside the
    parameters' update.
    """
    read = {u.src[0].src[0].arg for u in sig.nodes if u.op is Ops.LOAD}
    nest = loop_nest(sig, opts)
    if nest.lane is None:
        return ()
    written = [s.src[0].src[0].arg for s in sig.stores]
    least = RECORD_BYTES if read & set(written) else STREAM_BYTES
    large = {
        slot: s
        for s, slot in zip(sig.stores, written)
        if s.arg is None and nbytes(sig, s) >= least and slot not in read
    }
    past = {slot for slot, s in large.items() if whole_vectors(s, nest.lane, nest.lanes)}
    if not past and large.keys() == set(written) and begins_anywhere(sig, nest):
        past = set(large)
    return tuple(NontemporalStore(slot) for slot in sorted(past - set(nest.streamed)))


def nbytes(sig: Signature, store: UOp) -> int:
    return volume(frozenset(sig.loops)) * store.src[1].dtype.itemsize


def turned(sig: Signature, lane: UOp, crossing: UOp, lanes: int) -> tuple[Opt, ...] | None:
    """A transpose: squares of two lines each, in vectors that begin at lines also where rows do not. A large one goes
    along the source's rows and is stored past the caches."""
    store = sig.stores[0]
    slot = store.src[0].src[0].arg
    if len(sig.stores) > 1 or size_max(crossing) < lanes or size_max(lane) < 4 * lanes:
        return None
    squares: tuple[Opt, ...] = (Tile(crossing.arg[0], lanes), Tile(lane.arg[0], 2 * lanes))
    if not whole_vectors(store, lane, lanes):
        squares = (*squares, Align(lane.arg[0]))
        if legal(sig, (Vectorize(lane.arg[0], lanes), *squares)) is not None:
            return None
    if nbytes(sig, store) < TRANSPOSED_BYTES or any(
        u.op is Ops.LOAD and u.src[0].src[0].arg == slot for u in sig.nodes
    ):
        return squares
    squares = (*squares, NontemporalStore(slot))
    inner = sig.loops.index(crossing) > sig.loops.index(lane)
    return squares if inner else (Reorder(lane.arg[0], crossing.arg[0]), *squares)
