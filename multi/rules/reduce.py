"""REDUCE: a term on each device where the cut dim is summed, taken in blocks so that all numbers of devices give the
same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd, prod

from manygrad.multi.local import broadcast, reshape, shrink
from manygrad.multi.placement import REPLICATE, Partial, Placement, Shard
from manygrad.multi.rules.rule import Answer, LocalPart
from manygrad.tensor.dtype import to_dtype
from manygrad.tensor.uop import Ops, ReduceArg, UOp


def reduce(u: UOp, ps: list[Placement]) -> Answer:
    """Over the cut dim: a term on each device, the sum of which is due. Over others: cut as the source."""
    p = ps[0]
    if not isinstance(p, Shard):
        return [REPLICATE], REPLICATE
    return (ps, Partial(u.arg.op)) if p.axis in u.arg.axes else (ps, p)


def finish(u: UOp, ps: list[Placement]) -> Answer:
    """A sum that is due is carried out, whole or cut as the arg says."""
    return ps, REPLICATE if u.arg.axis is None else Shard.of(u.arg.axis, u.arg.bounds)


def local_reduce(u: UOp, src: tuple[UOp, ...], part: LocalPart) -> UOp:
    """A term of the sum; of no elements, what changes no sum."""
    cut = part.wants[0]
    if isinstance(cut, Shard) and (mine := held_blocks(u, u.arg.op, cut, part)):
        return reduce_in_blocks(u, src[0], cut, mine, part.i)
    if prod(d for d in src[0].shape if isinstance(d, int)) == 0:
        identity = {Ops.ADD: 0, Ops.MUL: 1, Ops.MAX: u.dtype.min}[u.arg.op]
        return broadcast(UOp.const(u.dtype, identity), _reduced(src[0], u.arg.axes))
    return u.replace(src=src)


def _reduced(x: UOp, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a reduction of `x`."""
    return tuple(1 if a in axes else d for a, d in enumerate(x.shape))


def held_blocks(u: UOp, op: Ops, cut: Shard, part: LocalPart) -> int:
    """How many blocks a device holds of the dim along which floats are summed or multiplied; 0 where the order of terms
    does not count, or there are no blocks."""
    due = isinstance(part.result, Partial) and u.dtype.is_float and op in (Ops.ADD, Ops.MUL)
    return blocks_of(cut, part.devices) if due else 0


def blocks_of(p: Shard, ranks: int) -> int:
    """How many of the blocks that sums over the cut dim are taken in each device holds; 0 where these are no whole
    subtree of the tree in which the blocks are added."""
    blocks = len(p.blocks) - 1
    mine = blocks // ranks
    if blocks < 1 or (ranks > 1 and mine & (mine - 1)) or p.bounds != p.blocks[::mine] or not p.bounds[-1]:
        return 0
    return mine


def reduce_in_blocks(u: UOp, x: UOp, p: Shard, mine: int, i: int) -> UOp:
    """A sum (or product) over the cut dim in an order that follows from global positions, not from the number of
    devices, each of which holds `mine` blocks.

    The dim is seen as SUM_BLOCKS blocks, cut where so many devices would be cut; each block is reduced on its own, then
    blocks are added in a tree that is split at the largest power of two. Devices hold whole subtrees where they are
    SUM_BLOCKS over a power of two (by default 1, 2, 4, 8), and the all-reduce goes on with the same tree over ranks:
    the same bits on all of them, for any size.

    Where blocks differ in size they do so alike in every group of them:
    12 rows in 8 blocks are 4 groups of 2 rows and 1 row,

        REDUCE(x, (12, n))  ==>  x as (4, 3, n):  tree(REDUCE(x[:, :2]) + REDUCE(x[:, 2:]))
    """
    in_group = (len(p.blocks) - 1) // groups_of(p.blocks)
    cuts = p.blocks[: in_group + 1]
    op, axes = u.arg.op, u.arg.axes
    shape = _reduced(x, axes)
    first = i * mine % in_group  # of the blocks of a group, where a device holds fewer than a group
    held = min(mine, in_group)
    own = mine // held  # groups
    x = reshape(x, (*x.shape[: p.axis], own, x.shape[p.axis] // own, *x.shape[p.axis + 1 :]))
    inner = tuple(a if a < p.axis else a + 1 for a in axes)
    sums = [
        reduce_rows(u, op, shrink(x, p.axis + 1, a - cuts[first], b - cuts[first]), inner, mine)
        for a, b in pairwise(cuts[first : first + held + 1])
    ]
    if own > 1:  # (of what is added in a tree of REDUCEs one row alone, if it is a product, is rounded as others are)
        sums = [rounded(s) if s is not None and prod(s.src[0].shape[a] for a in inner) == 1 else s for s in sums]
    y = in_tree(sums, op)
    if y is None:
        none = UOp.const(u.dtype, 0 if op is Ops.ADD else 1)
        return broadcast(none, shape)
    if own & (own - 1):
        y = in_tree([shrink(y, p.axis, k, k + 1) for k in range(own)], op)
        assert y is not None
    else:  # the levels of the tree nest in one kernel
        levels = own.bit_length() - 1
        y = reshape(y, (*y.shape[: p.axis], *(2,) * levels, *y.shape[p.axis + 1 :]))
        for level in reversed(range(levels)):
            y = UOp(Ops.REDUCE, u.dtype, (y,), ReduceArg(op, (p.axis + level,), blocks=1))
    return reshape(y, shape)


def groups_of(blocks: tuple[int, ...]) -> int:
    """Into how many equal groups, cut alike, the blocks of a dim fall: (0, 2, 3, 5, 6) -> 2. Groups are whole
    subtrees: of a power of two of blocks, or of all."""
    n, size = len(blocks) - 1, blocks[-1]
    for groups in range(gcd(n, size), 1, -1):
        if (
            n % groups == 0
            and not n // groups & (n // groups - 1)
            and size % groups == 0
            and all(blocks[k + n // groups] - blocks[k] == size // groups for k in range(n + 1 - n // groups))
        ):
            return groups
    return 1


def reduce_rows(u: UOp, op: Ops, x: UOp, axes: tuple[int, ...], blocks: int) -> UOp | None:
    """The sum of one block (of each group); None of no rows."""
    return None if 0 in x.shape else UOp(Ops.REDUCE, u.dtype, (x,), ReduceArg(op, axes, blocks))


def rounded(u: UOp) -> UOp:
    """`u` as if it had been stored: a sum over it adds rounded products."""
    bits = to_dtype(f"int{8 * u.dtype.itemsize}")
    return UOp(Ops.BITCAST, u.dtype, (UOp(Ops.BITCAST, bits, (u,)),))


def in_tree(terms: Sequence[UOp | None], op: Ops) -> UOp | None:
    """The sum (or product) as the collectives take it over ranks: split at the largest power of two below the number of
    terms; None is no term."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    a, b = in_tree(terms[:half], op), in_tree(terms[half:], op)
    return UOp(op, a.dtype, (a, b)) if a is not None and b is not None else a or b
