"""GATHER and SCATTER: along which dims they stay cut, and indices counted from where a device's part begins."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from manygrad.multi.local import broadcast, const_like, shrink
from manygrad.multi.placement import REPLICATE, Partial, Placement, Shard
from manygrad.multi.rules.reduce import held_blocks, in_tree
from manygrad.multi.rules.rule import Answer, LocalPart
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import numel

MANY = 8  # values for an element of the base: from there on tables of so many blocks are no larger than the values


def gather(u: UOp, ps: list[Placement]) -> Answer:
    """Cut along an index dim, or along a dim of x that is not indexed. Row by row (`x.gather(1, i)`: an index that
    counts the rows) x and the indices are cut alike; the local rows then begin at 0 (`local_gather`).
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


def local_gather(u: UOp, src: tuple[UOp, ...], part: LocalPart) -> UOp:
    """GATHER from the device's part."""
    return u.replace(src=local_rows(u, src, part))


def local_scatter(u: UOp, src: tuple[UOp, ...], part: LocalPart) -> UOp:
    """SCATTER into the device's part; or a term of the sum, its values added in blocks as REDUCE adds."""
    cut = part.wants[1]
    if isinstance(cut, Shard) and (mine := held_blocks(u, Ops.ADD, cut, part)):
        return scatter_in_blocks(u, src, cut, mine, part.i)
    return u.replace(src=local_rows(u, src, part))


def local_rows(u: UOp, src: tuple[UOp, ...], part: LocalPart) -> tuple[UOp, ...]:
    """The sources of a GATHER or SCATTER with the index of a cut dim counted from where this
    device's part begins."""
    begin = part.result.bounds[part.i] if isinstance(part.result, Shard) else 0
    first = 1 if u.op is Ops.GATHER else 2
    cut = next(
        (first + j for j, (a, b) in enumerate(zip(src[0].shape, u.src[0].shape)) if j < len(src) - first and a != b),
        None,
    )
    if cut is None or not begin:
        return src
    start = broadcast(UOp.const(src[cut].dtype, begin), src[cut].shape)
    return (*src[:cut], UOp(Ops.SUB, src[cut].dtype, (src[cut], start)), *src[cut + 1 :])


def scatter_in_blocks(u: UOp, src: tuple[UOp, ...], p: Shard, mine: int, i: int) -> UOp:
    """Values added at their places in the order of a sum over the cut dim (`reduce_in_blocks`): each block in a table
    of its own, the first one over the base, and the tables in a tree."""
    base, *rows = src
    tables: list[UOp | None] = []
    for a, b in pairwise(p.blocks[i * mine : (i + 1) * mine + 1]):
        part = [shrink(x, p.axis, a - p.bounds[i], b - p.bounds[i]) for x in rows]
        start = const_like(u, 0) if tables else base
        tables.append(u.replace(src=(start, *part)) if a < b else None if tables else start)
    total = in_tree(tables, Ops.ADD)
    assert total is not None
    return total
