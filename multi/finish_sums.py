"""finish_sums: what is computed of a sum over devices and numbers alone is a part of the sum.

Precondition: the user's graph, without markers that only gradients need. Postcondition: the same values, bit for bit;
an expression over a sum that is due and numbers, which alone reads that sum, is one FINISH. The collective that becomes
of the sum computes it where it takes the last sum of each element, once, before others have it.

    s = REDUCE(ADD, x cut along 0, (0)); MUL(s, 0.25)    ==>    FINISH(s, x * 0.25), on all devices
    m + s * 0.25, m cut along 0                          ==>    m + FINISH(s, x * 0.25, cut along 0)

Where the result is stored as it is, this saves a kernel that reads and writes all of it. Where it is of a smaller type,
less moves, for it is the result that moves: CAST(s, bfloat16) is rounded by who sums, and an expression ends where its
type is smallest. Where it is wanted cut, an all-reduce becomes a reduce-scatter. All else stays with what reads it,
whose kernel computes it for nothing: so the kernels that sum are few, and the same for all sums of a size.

It is decided over the graph of all devices, so all workers decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from manygrad.multi.placement import Partial, Placement, Shard
from manygrad.multi.rules import RULES, answer, placement
from manygrad.tensor.dtype import to_dtype
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.args import FinishArg
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, rewrite_once, substitute
from manygrad.tensor.uop.shape import unviewed
from manygrad.tensor.uop.track import made_from

MOST = 32  # ops of an expression
STORES = frozenset({Ops.STORE, Ops.CONTIGUOUS, Ops.COPY, Ops.SHARD})


def finish_sums(sink: UOp) -> UOp:
    order = sink.toposort()
    if not any(type(u.device) is tuple for u in order if u.op is Ops.PARAM or u.op is Ops.SHARD):
        return sink
    found = expressions(order)
    if not found:
        return sink
    readers: dict[UOp, set[UOp]] = {}
    for u in order:
        for s in u.src:
            readers.setdefault(s, set()).add(u)
    finished: dict[UOp, UOp] = {}  # the end of an expression -> its sum
    cuts: dict[UOp, Shard | None] = {}
    for s, members in found.items():
        moved = moved_nbytes(s, placement(s))
        last_first = [u for u in reversed(members) if ends(s, u, members, readers)]
        end = min(last_first, key=lambda u: u.dtype.itemsize, default=None)
        if end is None or end.dtype.itemsize > moved:
            continue
        cuts[end] = cut = cut_of(end, readers.get(end, set()))
        if cut is not None or end.dtype.itemsize < moved or is_stored(end, readers):
            finished[end] = s
    if not finished:
        return sink
    return rewrite_once(sink, _RULES, (finished, cuts))


def _finish(
    u: UOp, old: UOp, done: Mapping[UOp, UOp], ctx: tuple[Mapping[UOp, UOp], Mapping[UOp, Shard | None]]
) -> UOp | None:
    finished, cuts = ctx
    if old not in finished:
        return None
    s, cut = finished[old], cuts[old]
    arg = FinishArg(expression(s, old), *((cut.axis, cut.bounds) if cut is not None else (None, ())))
    made_from(new := inherit(UOp(Ops.FINISH, old.dtype, (done[s],), arg), old), old)
    return new


def expressions(order: list[UOp]) -> dict[UOp, list[UOp]]:
    """For each sum that is due, the nodes that are computed of it and numbers alone, in order."""
    of: dict[UOp, UOp] = {}  # node -> its sum
    found: dict[UOp, list[UOp]] = {}
    for u in order:
        if u.op not in GroupOp.ELEMENTWISE or type(u.device) is not tuple or len(u.device) == 1:
            continue
        if isinstance(placement(u), Partial):
            continue
        sums = {of.get(s, s) for s in u.src if not is_number(s)}
        if len(sums) == 1:
            (s,) = sums
            if isinstance(placement(s), Partial) and s.shape == u.shape:
                of[u] = s
                found.setdefault(s, []).append(u)
    return found


def is_number(u: UOp) -> bool:
    return unviewed(u).op is Ops.CONST


def moved_nbytes(s: UOp, p: Placement) -> int:
    """Bytes that an element of a sum takes when it travels."""
    assert isinstance(p, Partial)
    return min(s.dtype.itemsize, to_dtype(p.wire).itemsize if p.wire else s.dtype.itemsize)


def ends(s: UOp, end: UOp, members: list[UOp], readers: dict[UOp, set[UOp]]) -> bool:
    """Whether nothing but `end` leaves the expression."""
    known, cone = {s, *members}, {end}
    for u in reversed(members):
        if u in cone:
            cone.update(x for x in u.src if x in known)
    return len(cone) <= MOST and all(readers[u] <= cone for u in cone if u is not end)


def is_stored(end: UOp, readers: dict[UOp, set[UOp]]) -> bool:
    """Whether a reader takes the result as it is, in whatever shape."""
    return any(r.op in STORES or (r.op is Ops.RESHAPE and is_stored(r, readers)) for r in readers.get(end, ()))


def cut_of(end: UOp, readers: set[UOp]) -> Shard | None:
    """How the one that reads the result wants it, if it wants it cut."""
    if len(readers) != 1:
        return None
    (reader,) = readers
    if reader.op is Ops.SHARD and reader.arg.devices == end.device:
        want = placement(reader)
        return want if isinstance(want, Shard) else None
    if reader.op not in RULES or type(reader.device) is not tuple:
        return None
    wants = {w for x, w in zip(reader.src, answer(reader)[0]) if x is end}
    (first, *others) = wants
    return first if isinstance(first, Shard) and not others else None


def expression(s: UOp, end: UOp) -> UOp:
    """`end` of one element of `s`, which is PARAM 0."""
    leaves = (x for x in end.toposort(lambda u: u is not s and u.op in GroupOp.ELEMENTWISE))
    numbers = {x: UOp.const(x.dtype, unviewed(x).arg) for x in leaves if x is not s and x.op not in GroupOp.ELEMENTWISE}
    return substitute(end, {s: UOp(Ops.PARAM, s.dtype, (), 0), **numbers})


_RULES = PatternMatcher([(UPat(GroupOp.ELEMENTWISE, "u"), _finish)])
