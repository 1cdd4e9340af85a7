"""split_updates: an update by joined values, each of which is cheaper computed again than read, becomes an update by
each part.

Precondition: storage lowered. Postcondition: the same effects.

    g = AFTER(t, STORE(t[:n], a), STORE(t[n:], b));  STORE(w, w - g)
    ==>  STORE(w[:n], w[:n] - a);  STORE(w[n:], w[n:] - b)

An optimiser's step over flat parameters reads the gradients that another kernel has joined. The gradient of a linear
layer's weights for one sample is a product of two vectors: computed where it is used, in the kernel that also stores it
(`merge_kernels`), it is not read. A part is cheap if its elements come from less memory than they fill and from no
reduction over each of them; if the cheap parts are most of all, the others are read from where they were joined. What
depends on a split update reads the part that was written (states, then the parameters), so that the update of a part is
one kernel, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manygrad.schedule.facts.buffers import base_buffer
from manygrad.schedule.facts.work import EXPENSIVE, is_leaf, work
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, rewrite_once, substitute, with_sources
from manygrad.tensor.uop.shape import is_buffer, numel

MOSTLY = 0.75  # of the elements of all parts


def split_updates(sink: UOp) -> UOp:
    order = sink.toposort()
    if not any(_parts(u) and _is_cheap(u) for u in order):
        return sink
    return rewrite_once(sink, _RULES, set(), _over_pieces)


def _over_pieces(u: UOp, src: tuple[UOp, ...]) -> UOp:
    """`u` with the pieces of a STORE, a SINK of them, in its place."""
    return with_sources(u, tuple(e for s in src for e in (s.src if s.op is Ops.SINK else (s,))))


def _split(u: UOp, ctx: set[UOp]) -> UOp | None:
    """SINK of a STORE for each part."""
    if u.arg is not None or not is_buffer(u.src[0]) or len(u.src[0].shape) != 1:
        return None
    joined = _joined_below(u.src[1], ctx)
    if joined is None or _wait_for_each_other(joined, u.src[0]):
        return None
    return UOp(Ops.SINK, dtypes.void, tuple(_piece(u, part) for part in _parts(joined)))


def _left(u: UOp, old: UOp, done: Mapping[UOp, UOp], ctx: set[UOp]) -> None:
    """Takes note of what a split update leaves in memory."""
    if any(done[s].op is Ops.SINK for s in old.src):
        ctx.add(u)


def _parts(u: UOp) -> tuple[UOp, ...]:
    """The STOREs of AFTER(t, STORE(t[a:b], x), ...) if they fill the flat `t`, one after the other, at fixed places."""
    if u.op is not Ops.AFTER or not is_buffer(u.src[0]) or len(u.src) < 3 or len(u.shape) != 1:
        return ()
    ends = [_cut(s, u.src[0]) for s in u.src[1:]]
    if not all(isinstance(x, int) for e in ends for x in e):
        return ()
    return u.src[1:] if all(a[1] == b[0] for a, b in zip(((0, 0), *ends), (*ends, (u.shape[0], 0)))) else ()


def _cut(store: UOp, buffer: UOp) -> tuple[Any, Any]:
    """Which elements of a flat buffer a STORE writes; (None, None) for other STOREs."""
    target = store.src[0]
    while target.op is Ops.RESHAPE:
        target = target.src[0]
    flat = store.op is Ops.STORE and store.arg is None and target.op is Ops.SHRINK and target.src[0] is buffer
    return target.arg[0] if flat else (None, None)


def _is_cheap(joined: UOp) -> bool:
    total = sum(numel(s.src[1].shape) for s in _parts(joined) if recomputed(s.src[1]))
    return total >= MOSTLY * joined.shape[0]


def recomputed(u: UOp) -> bool:
    """Whether an element of `u` takes little work and, in all, less memory than `u` itself: an outer product, something
    broadcast."""
    below: list[UOp] = [u]
    seen = {u}
    while below:
        x = below.pop()
        if _widens(x):
            continue  # narrower than `u`: stored, or computed in a row
        if x.op is Ops.CONST:
            continue
        if is_leaf(x) or not (x.op in GroupOp.ELEMENTWISE or x.op in GroupOp.MOVEMENT):
            return False
        for s in x.src:
            if s not in seen:
                seen.add(s)
                below.append(s)
    return _elementwise_work(u) <= EXPENSIVE


def _elementwise_work(u: UOp) -> int:
    narrow = {x for x in u.toposort(lambda x: x.op is not Ops.EXPAND) if x.op is Ops.EXPAND}
    return work(u, narrow, EXPENSIVE)


def _joined_below(value: UOp, split: set[UOp]) -> UOp | None:
    """The joined values of cheap parts, or what a split update left, that an elementwise value reads as they lie."""
    for u in value.toposort(lambda u: u.op in GroupOp.ELEMENTWISE):
        if _parts(u) and (u in split or _is_cheap(u)):
            return u
    return None


def _wait_for_each_other(joined: UOp, buffer: UOp) -> bool:
    """Whether parts to compute again need, in a circle, what the update of one another overwrites."""
    cuts = [_cut(s, joined.src[0]) for s in _parts(joined)]
    reads = {k: _reads(s.src[1], buffer) for k, s in enumerate(_parts(joined)) if recomputed(s.src[1])}
    needs = {
        k: {j for j, (begin, end) in enumerate(cuts) if j != k and any(b < end and begin < e for b, e in spans)}
        for k, spans in reads.items()
    }
    while free := [k for k in needs if not needs[k] & needs.keys()]:
        for k in free:
            del needs[k]
    return bool(needs)


def _reads(value: UOp, buffer: UOp) -> list[tuple[Any, Any]]:
    """Which elements of the flat buffer a part is computed from. A value that holds a reduction is stored before it is
    broadcast, unless it may be given back to the row that it reduces (`rows.py`)."""
    found: list[tuple[Any, Any]] = []
    for x in value.toposort(lambda u: not _widens(u)):
        if _widens(x):
            below = x.toposort(lambda u: u.op not in (Ops.AFTER, Ops.CONTIGUOUS))
            row = x.src[0].toposort(lambda u: u.op in GroupOp.ELEMENTWISE)
            if not any(u.op is Ops.REDUCE for u in below) or any(
                u.op is Ops.REDUCE and u.src[0].shape == x.shape for u in row
            ):
                found += [u.arg[0] if u.op is Ops.SHRINK else (0, buffer.shape[0]) for u in below if buffer in u.src]
    return found


def _widens(u: UOp) -> bool:
    return u.op is Ops.EXPAND and 2 * numel(u.src[0].shape) <= numel(u.shape)


def _piece(store: UOp, part: UOp) -> UOp:
    """`store` of the elements of one part, over the dims in which that part is computed."""
    value = part.src[1]
    while recomputed(part.src[1]) and value.op is Ops.RESHAPE:
        value = value.src[0]
    cut, shape = _cut(part, base_buffer(part.src[0])), value.shape

    def of(u: UOp) -> UOp:
        """The part of a leaf of the update."""
        if u.op is Ops.CONST:
            return u
        if u.op is Ops.EXPAND and numel(u.src[0].shape) == 1:
            one = UOp(Ops.RESHAPE, u.dtype, (u.src[0],), (1,) * len(shape))
            return UOp(Ops.EXPAND, u.dtype, (one,), shape)
        own = next((s for s in _parts(u) if _cut(s, u.src[0]) == cut), None)
        if own is part and recomputed(part.src[1]):
            return value
        view = at(u if own is None else u.src[0])
        return view if own is None else UOp(Ops.AFTER, u.dtype, (view, own))

    def at(u: UOp) -> UOp:
        view = UOp(Ops.SHRINK, u.dtype, (u,), (cut,))
        return view if view.shape == shape else UOp(Ops.RESHAPE, u.dtype, (view,), shape)

    below = store.src[1].toposort(lambda u: u.op in GroupOp.ELEMENTWISE)
    leaves = {u: of(u) for u in below if u.op not in GroupOp.ELEMENTWISE}
    return inherit(store.replace(src=(at(store.src[0]), substitute(store.src[1], leaves))), store)


_RULES = PatternMatcher([(UPat(Ops.STORE, "u"), _split), (UPat(Ops.AFTER, "u"), _left)])
