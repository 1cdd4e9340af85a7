"""bounds: between which two numbers the value of an integer expression lies, in a kernel or in a graph of tensors.

What arithmetic says is kept as long as it fits the type;
where it may wrap, and of what is loaded, the type's limits are all that is known.
"""

from __future__ import annotations

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.table import Table
from manygrad.tensor.uop.uop import UOp
from manygrad.tensor.uop.walk import toposort

Interval = tuple[int, int]
BOUNDS: Table[Interval] = Table("bounds")
BIG = 1 << 62  # of an index, and of what is no integer

# values of the first source
_SAME = GroupOp.VIEW | {Ops.CAST, Ops.DETACH, Ops.CUSTOM, Ops.WIRE, Ops.CONTIGUOUS, Ops.BARRIER, Ops.SHARD, Ops.COPY}
_FOLLOWED = _SAME | {
    Ops.PAD,
    Ops.CHECK,
    Ops.RANGE,
    Ops.NEG,
    Ops.ADD,
    Ops.SUB,
    Ops.MUL,
    Ops.MAX,
    Ops.IDIV,
    Ops.MOD,
    Ops.AND,
    Ops.WHERE,
}


def bounds(u: UOp) -> Interval:
    """The smallest and the largest value; ±2**62 where nothing is known."""
    found = BOUNDS.get(u)
    if found is None:
        for x in toposort((u,), _is_followed):
            if x not in BOUNDS:
                BOUNDS[x] = _bounds(x)
        found = BOUNDS[u]
    return found


def _is_followed(u: UOp) -> bool:
    return u not in BOUNDS and (u.op is Ops.RANGE or (u.op in _FOLLOWED and u.dtype.is_int))


def _bounds(u: UOp) -> Interval:
    if u.op is Ops.RANGE:
        return 0, max(BOUNDS[u.src[0]][1] - 1, 0)
    kind = u.dtype
    if kind.is_bool:
        return (int(u.arg), int(u.arg)) if u.op is Ops.CONST else (0, 1)
    if not kind.is_int:
        return -BIG, BIG
    limits = (-BIG, BIG) if kind is dtypes.index else (int(kind.min), int(kind.max))
    lo, hi = _of(u) or limits
    return (lo, hi) if limits[0] <= lo and hi <= limits[1] else limits


def _of(u: UOp) -> Interval | None:
    """Before it wraps; None if nothing is known."""
    op = u.op
    if op is Ops.CONST:
        return int(u.arg), int(u.arg)
    if op is Ops.DEFINE_VAR:
        return int(u.arg.min), int(u.arg.max)
    if op is Ops.BIND:
        return int(u.src[0].arg.min), int(u.src[0].arg.max)
    if op is Ops.IOTA:
        return 0, max(u.arg - 1, 0)
    if op not in _FOLLOWED or (op is not Ops.WHERE and not (u.src[0].dtype.is_int or u.src[0].dtype.is_bool)):
        return None
    (a, b), (c, d) = BOUNDS[u.src[0]], BOUNDS[u.src[-1]]
    if op in _SAME:
        return a, b
    if op is Ops.CHECK:
        spared = u.arg.spared
        lo, hi = max(a, u.arg.low), min(b, u.arg.size - 1)
        return (lo, hi) if spared is None else (min(lo, spared), max(hi, spared))
    if op is Ops.PAD:
        return min(a, 0), max(b, 0)
    if op is Ops.NEG:
        return -b, -a
    if op is Ops.ADD:
        return a + c, b + d
    if op is Ops.SUB:
        return a - d, b - c
    if op is Ops.MAX:
        return max(a, c), max(b, d)
    if op is Ops.MUL:
        corners = (a * c, a * d, b * c, b * d)
        return min(corners), max(corners)
    if op is Ops.WHERE:
        return _chosen(u)
    if op is Ops.AND and (a >= 0 or c >= 0):
        return 0, min([b] * (a >= 0) + [d] * (c >= 0))
    floors = u.dtype is dtypes.index or a >= 0
    if op is Ops.IDIV and c > 0:
        ends = [x // y if floors else _towards_zero(x, y) for x in (a, b) for y in (c, d)]
        return min(ends), max(ends)
    if op is Ops.MOD and c > 0:
        if floors and c == d and a // c == b // c:
            return a % c, b % c
        if floors:
            return 0, min(d - 1, b) if a >= 0 else d - 1
        return max(a, 1 - d), min(max(b, 0), d - 1)  # (of the dividend's sign)
    return None


def _chosen(u: UOp) -> Interval:
    """Interval of a WHERE: of both values, or of the smaller or larger of two."""
    condition, x, y = u.src
    (a, b), (c, d) = BOUNDS[x], BOUNDS[y]
    if condition.op is Ops.CMPLT and {*condition.src} == {x, y}:
        return (min(a, c), min(b, d)) if condition.src == (x, y) else (max(a, c), max(b, d))
    return min(a, c), max(b, d)


def _towards_zero(x: int, y: int) -> int:
    return abs(x) // y * (1 if x >= 0 else -1)
