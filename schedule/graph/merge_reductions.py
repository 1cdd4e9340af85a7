"""merge_reductions: a reduction of a reduction becomes one over the dims of both.

Precondition: a clean graph, over global shapes: so all workers merge alike, however a dim is cut over devices.
Postcondition: the same values, floats rounded in another order, without the inner reduction.

    REDUCE(ADD, (2), RESHAPE((4, 3), REDUCE(ADD, (1), x (4, 3, 2))))  ==>  RESHAPE(.., REDUCE(ADD, (1, 2), x (4, 3, 2)))

Both are of one op, nobody else reads the inner one, and between them dims of size 1 at most come and go. What they are
taken of is read in the order in which it lies in memory, to the last dim: a kernel for it is as fast as for the inner
one. A contraction, which reads elements many times over, and a sum of rows and then of columns stay two kernels.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from manygrad.schedule.graph.split_reductions import SPLIT_FROM, lies_flat, row_of
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import Ops, ReduceArg, UOp
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, rewrite_once

ONE_CHAIN = (
    1 << 12
)  # elements of a sum; a longer row is one chain of additions, where short ones are summed side by side


def merge_reductions(sink: UOp) -> UOp:
    order = sink.toposort()
    if not any(u.op is Ops.REDUCE and _inner(u) is not None for u in order):
        return sink
    readers = Counter(s for u in order for s in u.src)
    return rewrite_once(sink, _RULES, readers)


def _merge(u: UOp, old: UOp, ctx: Counter[UOp]) -> UOp | None:
    return _merged(u) if all(ctx[x] == 1 for x in _reshaped(old.src[0])) else None


def _reshaped(x: UOp) -> list[UOp]:
    """`x` and what it is a RESHAPE of."""
    found = [x]
    while found[-1].op is Ops.RESHAPE:
        found.append(found[-1].src[0])
    return found


def _inner(u: UOp) -> UOp | None:
    """The REDUCE of the same op that the REDUCE `u` reads, seen through RESHAPEs."""
    x = _reshaped(u.src[0])[-1]
    return x if x.op is Ops.REDUCE and x.arg.op is u.arg.op and x.arg.blocks is u.arg.blocks is None else None


def _merged(u: UOp) -> UOp | None:
    """The REDUCE `u` of a REDUCE as one, in the shape of `u`."""
    inner = _inner(u)
    if inner is None:
        return None
    before, after = _longer_than_one(inner.shape), _longer_than_one(u.src[0].shape)
    if [inner.shape[i] for i in before] != [u.src[0].shape[i] for i in after]:
        return None
    x, outer = inner.src[0], [b for b, a in zip(before, after) if a in u.arg.axes]
    axes = tuple(sorted({*inner.arg.axes, *outer}))
    if not _in_order(x, axes):
        return None
    out = inherit(UOp(Ops.REDUCE, u.dtype, (x,), ReduceArg(u.arg.op, axes)), u)
    return out if out.shape == u.shape else inherit(UOp(Ops.RESHAPE, u.dtype, (out,), u.shape), u)


def _longer_than_one(shape: tuple[object, ...]) -> list[int]:
    return [i for i, d in enumerate(shape) if d != 1]


def _in_order(x: UOp, axes: tuple[int, ...]) -> bool:
    """Whether a reduction of `x` over `axes` goes through memory in order, in one kernel or in equal rows
    (`split_reductions`), and so on each device of those that have parts of it."""
    if axes != tuple(range(axes[0], len(x.shape))) or not all(isinstance(d, int) for d in x.shape):
        return False
    size = prod(x.shape[a] for a in axes)
    is_short, is_split = size <= ONE_CHAIN, size >= SPLIT_FROM and row_of(size) is not None
    return (is_short or is_split) and lies_flat(x) and not any(map(_cut_inside, x.toposort()))


def _cut_inside(u: UOp) -> bool:
    """Whether `u` is memory that is cut along another dim than the first: how far a part runs on in memory, and with
    it the order of a sum, would depend on the number of devices."""
    return u.op in (Ops.PARAM, Ops.BUFFER) and bool(u.arg.axis)


_RULES = PatternMatcher([(UPat(Ops.REDUCE, "u"), _merge)])
