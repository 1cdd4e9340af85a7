"""interval: between which two numbers the elements of an integer tensor lie, as far as its graph says so."""

from __future__ import annotations

from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.uop import UOp

Interval = tuple[int, int]

_SAME = GroupOp.VIEW | {Ops.CAST, Ops.DETACH, Ops.CUSTOM, Ops.CONTIGUOUS, Ops.BARRIER, Ops.SHARD, Ops.COPY}  # values of the first source
_FOLLOWED = _SAME | {Ops.PAD, Ops.CHECK, Ops.NEG, Ops.ADD, Ops.SUB, Ops.MUL, Ops.MAX, Ops.IDIV, Ops.MOD, Ops.AND, Ops.WHERE}


def interval(root: UOp) -> Interval:
    """The smallest and the largest value that `root` can have; its type's where it is anything but arithmetic on counts and constants."""
    found: dict[UOp, Interval] = {}
    for u in root.toposort(lambda u: u.op in _FOLLOWED and u.dtype.is_int):
        limits = (int(u.dtype.min), int(u.dtype.max)) if u.dtype.is_int else (0, 1) if u.dtype.is_bool else None
        if limits is None:
            continue  # (a float, or nothing that has values; `_of` does not look at it)
        lo, hi = _of(u, [found.get(s) for s in u.src]) or limits
        found[u] = (lo, hi) if limits[0] <= lo and hi <= limits[1] else limits
    return found[root]


def _of(u: UOp, b: list[Interval | None]) -> Interval | None:
    """From the intervals of the sources; None if they say nothing."""
    op = u.op
    if op is Ops.CONST:
        return int(u.arg), int(u.arg)
    if op is Ops.IOTA:
        return 0, max(u.arg - 1, 0)
    if op not in _FOLLOWED or b[0] is None:
        return None
    if op in _SAME:
        return b[0]
    if op is Ops.CHECK:
        low, size, spared = u.arg
        lo, hi = max(b[0][0], low), min(b[0][1], size - 1)
        return (lo, hi) if spared is None else (min(lo, spared), max(hi, spared))
    if op is Ops.PAD:
        return min(b[0][0], 0), max(b[0][1], 0)
    if op is Ops.NEG:
        return -b[0][1], -b[0][0]
    if op is Ops.WHERE and u.src[0].op is Ops.CMPLT and {*u.src[0].src} == {*u.src[1:]} and b[1] and b[2]:  # the smaller of two, or the larger
        pick = min if u.src[0].src == u.src[1:] else max
        return pick(b[1][0], b[2][0]), pick(b[1][1], b[2][1])
    if op is Ops.WHERE:
        return (min(b[1][0], b[2][0]), max(b[1][1], b[2][1])) if b[1] and b[2] else None
    if b[1] is None:
        return None
    (lo, hi), (first, last) = b[0], b[1]
    if op is Ops.ADD:
        return lo + first, hi + last
    if op is Ops.SUB:
        return lo - last, hi - first
    if op is Ops.MAX:
        return max(lo, first), max(hi, last)
    if op is Ops.MUL:
        corners = [x * y for x in (lo, hi) for y in (first, last)]
        return min(corners), max(corners)
    if op is Ops.AND and (first >= 0 or lo >= 0):
        return 0, min(x for x in (hi if lo >= 0 else None, last if first >= 0 else None) if x is not None)
    if op is Ops.MOD and first > 0:  # (the dividend's sign)
        return max(lo, 1 - last) if lo < 0 else 0, min(hi, last - 1) if hi > 0 else 0
    if op is Ops.IDIV and first > 0:
        corners = [abs(x) // y * (1 if x >= 0 else -1) for x in (lo, hi) for y in (first, last)]
        return min(corners), max(corners)
    return None
