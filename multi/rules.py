"""Sharding rules: for each op, how its sources must lie and how its result then lies.

`rule(u, placements)` gives (placement wanted of each source, placement of the result). A source that lies otherwise is
resharded by `multi.lower_shards`. What cannot stay cut is gathered first; that is always right, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

from manygrad.multi.placement import REPLICATE, Partial, Placement, Replicate, Shard
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import numel
from manygrad.tensor.uop.table import inferred, memo

Answer = tuple[Sequence[Placement], Placement]
MANY = 8  # values for an element of the base: from there on tables of so many blocks are no larger than the values


def elementwise(u: UOp, ps: list[Placement]) -> Answer:
    """All sources cut like the largest cut one."""
    first = ps[0]
    if isinstance(first, Shard) and ps.count(first) == len(ps) and all(s.shape for s in u.src):
        return [first] * len(ps), first
    if u.op in (Ops.NEG,) and isinstance(ps[0], Partial) and ps[0].op is Ops.ADD:
        return ps, ps[0]
    if u.op is Ops.ADD and all(p == Partial(Ops.ADD) for p in ps):
        return ps, ps[0]
    cut = [(numel(s.shape), -i, p) for i, (s, p) in enumerate(zip(u.src, ps)) if isinstance(p, Shard)]
    if not cut:
        return [REPLICATE] * len(ps), REPLICATE
    out = max(cut, key=lambda c: c[:2])[2]
    return [out if s.shape else REPLICATE for s in u.src], out


def reshape(u: UOp, ps: list[Placement]) -> Answer:
    """The cut dim may keep its size, absorb inner dims, or give some off; its elements must stay whole rows."""
    p = ps[0]
    if not isinstance(p, Shard):
        return ps, p
    found = reshaped(p.axis, p.bounds, p.origin, u.src[0].shape, u.arg)
    return ([REPLICATE], REPLICATE) if found is None else (ps, found)


@lru_cache(4096)  # layers of one kind ask for the same
def reshaped(
    axis: int, bounds: tuple[int, ...], origin: int, old: tuple[Any, ...], new: tuple[Any, ...]
) -> Shard | None:
    """How a Shard lies in the shape `new`; None where it does not."""
    before, (inner, unknown) = factors(old[:axis]), factors(old[axis + 1 :])
    for i, d in enumerate(new):
        if factors(new[:i]) == before and not (isinstance(d, int) and d == 1 and old[axis] != 1):
            rest, same = factors(new[i + 1 :])
            cuts = scaled(bounds, inner, rest) if rest and same == unknown else None
            if cuts and isinstance(d, int) and cuts[-1] == d:
                return Shard(i, cuts, origin)
            break
    return None


def factors(dims: Sequence[Any]) -> tuple[int, tuple[UOp, ...]]:
    """Of the product of dims: a number, and the symbolic ones, in one order."""
    return prod(d for d in dims if isinstance(d, int)), tuple(
        sorted((d for d in dims if not isinstance(d, int)), key=lambda d: d.key)
    )


def scaled(bounds: tuple[int, ...], factor: int, divisor: int) -> tuple[int, ...] | None:
    """bounds * factor / divisor, where all of them divide."""
    if any(b * factor % divisor for b in bounds):
        return None
    return tuple(b * factor // divisor for b in bounds)


def permute(u: UOp, ps: list[Placement]) -> Answer:
    """Cut along the same dim, at its new place."""
    p = ps[0]
    return (ps, Shard(u.arg.index(p.axis), p.bounds, p.origin)) if isinstance(p, Shard) else (ps, p)


def expand(u: UOp, ps: list[Placement]) -> Answer:
    """Cut as the source, unless the cut dim is the one that is expanded: then each device holds all of it."""
    p = ps[0]
    if isinstance(p, Shard) and u.src[0].shape[p.axis] == u.arg[p.axis]:
        return ps, p
    return [REPLICATE], REPLICATE


def pad_or_shrink(u: UOp, ps: list[Placement]) -> Answer:
    """Cut as the source, unless the cut dim is the one that is padded or shrunk: then it is gathered first."""
    p = ps[0]
    if isinstance(p, Shard):
        whole = (0, u.src[0].shape[p.axis]) if u.op is Ops.SHRINK else (0, 0)
        if tuple(u.arg[p.axis]) == whole:
            return ps, p
    return [REPLICATE], REPLICATE


def flip(u: UOp, ps: list[Placement]) -> Answer:
    """Cut as the source, unless the cut dim is the one that is flipped: then it is gathered first."""
    p = ps[0]
    return (ps, p) if isinstance(p, Shard) and not u.arg[p.axis] else ([REPLICATE], REPLICATE)


def reduce(u: UOp, ps: list[Placement]) -> Answer:
    """Over the cut dim: a term on each device, the sum of which is due. Over others: cut as the source."""
    p = ps[0]
    if not isinstance(p, Shard):
        return [REPLICATE], REPLICATE
    return (ps, Partial(u.arg.op)) if p.axis in u.arg.axes else (ps, p)


def gather(u: UOp, ps: list[Placement]) -> Answer:
    """Cut along an index dim, or along a dim of x that is not indexed. Row by row (`x.gather(1, i)`: an index that
    counts the rows) x and the indices are cut alike; the local rows then begin at 0 (`multi.lower_shards.local_node`).
    """
    k, n = len(u.src) - 1, len(u.src[1].shape)
    x = ps[0]
    if isinstance(x, Shard) and x.axis < k:
        rows = counted_axis(u.src[1 + x.axis])
        if rows is not None and u.src[1].shape[rows] == x.bounds[-1]:
            cut = Shard(rows, x.bounds, x.origin)
            return [x] + [cut] * k, cut
    index = next((p for p in ps[1:] if isinstance(p, Shard)), None)
    if index is not None:
        return [REPLICATE] + [index] * k, index
    if isinstance(x, Shard) and x.axis >= k:
        return [x] + [REPLICATE] * k, Shard(n + x.axis - k, x.bounds, x.origin)
    return [REPLICATE] * (k + 1), REPLICATE


def scatter(u: UOp, ps: list[Placement]) -> Answer:
    """Row by row: base, values and indices are cut alike. Adding: each device scatters its own values, the terms are
    then summed; floats, whose order counts, so only where they are many, and else column by column. Else on whole
    values, each device into its part of the base; what is outside of a part is not written.
    """
    k, n = len(u.src) - 2, len(u.src[2].shape)
    value = next((p for p in ps[1:] if isinstance(p, Shard)), None)
    for j, i in enumerate(u.src[2:]):
        rows = counted_axis(i)
        if rows is not None and u.src[2].shape[rows] == u.src[0].shape[j]:
            cut = next(
                (
                    p
                    for p, axis in [(ps[0], j), *((p, rows) for p in ps[1:])]
                    if isinstance(p, Shard) and p.axis == axis
                ),
                None,
            )
            if cut is not None:
                row = Shard(rows, cut.bounds, cut.origin)
                base = Shard(j, cut.bounds, cut.origin)
                return [base] + [row] * (k + 1), base
    if isinstance(value, Shard) and value.axis < n and u.arg == "add":
        if not u.dtype.is_float or numel(u.src[1].shape) >= MANY * numel(u.shape):
            return [Partial(Ops.ADD), *[value] * (k + 1)], Partial(Ops.ADD)
        return by_columns(u)
    if isinstance(ps[1], Shard) and ps[1].axis >= n:
        base = Shard(k + ps[1].axis - n, ps[1].bounds, ps[1].origin)
        return [base, ps[1]] + [REPLICATE] * k, base
    if isinstance(ps[0], Shard):
        p = ps[0]
        return [p, REPLICATE if p.axis < k else Shard(n + p.axis - k, p.bounds, p.origin)] + [REPLICATE] * k, p
    return [REPLICATE] * len(ps), REPLICATE


def by_columns(u: UOp) -> Answer:
    """A SCATTER of which each device does some columns, for all rows in their order: what does not depend on the place
    of a row, the longest such dim. What moves are the values once, from cut along rows to cut along columns, and the
    result once; terms, which are as large as the result, would move twice."""
    assert isinstance(u.device, tuple)
    n, indices, devices = len(u.src[2].shape), u.src[2:], len(u.device)
    of_value = u.src[1].shape
    columns = [(n + a, len(indices) + a, False) for a in range(len(of_value) - n)]
    for j, i in enumerate(indices):
        axis = counted_axis(i)
        if axis is not None and of_value[axis] == u.shape[j]:
            columns.append((axis, j, True))
    sized = [(of_value[c[0]], c) for c in columns if isinstance(of_value[c[0]], int) and of_value[c[0]] >= devices]
    if not sized:
        return [REPLICATE] * len(u.src), REPLICATE
    size, (axis, at, in_indices) = max(sized, key=lambda s: s[0])
    base, value = Shard.even(at, size, devices), Shard.even(axis, size, devices)
    return [base, value, *[value if in_indices else REPLICATE] * len(indices)], base


def counted_axis(index: UOp) -> int | None:
    """The axis along which an index tensor counts 0, 1, ..
    (an IOTA that was reshaped, expanded and cast), None if it is anything else."""
    moves, u = [], index
    while u.op in (Ops.RESHAPE, Ops.EXPAND, Ops.PERMUTE, Ops.CAST):
        moves.append(u)
        u = u.src[0]
    if u.op is not Ops.IOTA or u.arg == 1 or any(m.dtype.is_int and m.dtype.max < u.arg - 1 for m in (u, *moves)):
        return None  # (in a type that does not hold the count it starts again from 0)
    axis = 0
    for m in reversed(moves):
        if m.op is Ops.RESHAPE:
            if prod(m.src[0].shape) != u.arg or u.arg not in m.shape:
                return None
            axis = m.shape.index(u.arg)
        elif m.op is Ops.PERMUTE:
            axis = m.arg.index(axis)
    return axis


def cat(u: UOp, ps: list[Placement]) -> Answer:
    """Cut along another dim than the one along which values are joined; terms of one kind stay terms."""
    if all(isinstance(p, Partial) and p == ps[0] for p in ps):
        return ps, ps[0]
    cut = next((p for p in ps if isinstance(p, Shard) and p.axis != u.arg), None)
    return ([cut] * len(ps), cut) if cut is not None else ([REPLICATE] * len(ps), REPLICATE)


def wire(u: UOp, ps: list[Placement]) -> Answer:
    """As the source; a sum that is due is said how to travel."""
    p = ps[0]
    return ps, Partial(p.op, u.arg) if isinstance(p, Partial) and p.op is Ops.ADD else p


def finish(u: UOp, ps: list[Placement]) -> Answer:
    """Of a sum that is due: carried out, whole or cut as the arg says."""
    return ps, REPLICATE if u.arg.axis is None else Shard.of(u.arg.axis, u.arg.bounds)


def keep(u: UOp, ps: list[Placement]) -> Answer:
    """As the source; a sum that is due is carried out."""
    p = ps[0]
    return ([REPLICATE], REPLICATE) if isinstance(p, Partial) else ([p], p)


def beside(u: UOp, ps: list[Placement]) -> Answer:
    """The value is the first source's; the second one stays as it lies."""
    (kept,), out = keep(u, ps)
    return [kept, ps[1]], out


RULES: dict[Ops, Any] = {
    **dict.fromkeys(GroupOp.ELEMENTWISE, elementwise),
    Ops.RESHAPE: reshape,
    Ops.PERMUTE: permute,
    Ops.EXPAND: expand,
    Ops.PAD: pad_or_shrink,
    Ops.SHRINK: pad_or_shrink,
    Ops.FLIP: flip,
    Ops.REDUCE: reduce,
    Ops.GATHER: gather,
    Ops.SCATTER: scatter,
    Ops.CAT: cat,
    Ops.CONTIGUOUS: keep,
    Ops.DETACH: keep,
    Ops.WIRE: wire,
    Ops.FINISH: finish,
    Ops.BARRIER: beside,
    Ops.CHECK: beside,
}


@inferred
def placement(u: UOp) -> Placement:
    """How a node on several devices lies; Replicate for nodes on one device."""
    if not isinstance(u.device, tuple) or u.op in (Ops.STORE, Ops.SINK, Ops.FUNCTION):
        return REPLICATE
    if u.op in (Ops.BUFFER, Ops.PARAM):
        return REPLICATE if u.arg.axis is None else Shard.of(u.arg.axis, u.arg.bounds)
    if u.op is Ops.SHARD:
        axis, bounds = u.arg.axis, u.arg.bounds
        if axis is None or bounds:
            return REPLICATE if axis is None else Shard.of(axis, bounds)
        return Shard.even(axis, u.src[0].shape[axis], len(u.arg.devices))
    if u.op is Ops.RESULT:
        return settled(placement(u.src[0].arg.src[u.arg]))
    if u.op in (Ops.AFTER, Ops.CUSTOM):
        return placement[u.src[0]]
    return answer(u)[1]


@memo
def answer(u: UOp) -> Answer:
    """Of the rule of a node on several devices."""
    found: Answer = RULES[u.op](u, [placement(s) for s in u.src])
    return found


def settled(p: Placement) -> Shard | Replicate:
    """How a value is stored: a pending sum is carried out."""
    return REPLICATE if isinstance(p, Partial) else p
