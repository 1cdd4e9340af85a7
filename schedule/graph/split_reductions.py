"""split_reductions: a large reduction with few outputs becomes two: its parts, which run in parallel, then their sum.

Precondition: simplified per-device graph. Postcondition: the same values, floats rounded in another order.

    REDUCE(ADD, (65536,) -> (1,))  ==>  REDUCE(ADD, (256, 1) -> (1, 1)) of CONTIGUOUS(x),
                                        x = REDUCE(ADD, (256, 256) -> (256, 1))
"""

from __future__ import annotations

from math import prod

from manygrad.schedule.facts.devices import is_wide
from manygrad.schedule.graph.simplify import constant
from manygrad.tensor.uop import GroupOp, Ops, PatternMatcher, ReduceArg, UOp, UPat, graph_rewrite
from manygrad.tensor.uop.shape import is_buffer

SPLIT_FROM = 32768  # elements reduced into one output
SPLIT_OUTPUTS = 2048  # at most so many outputs
SPLIT_PARTS = 256
WIDE_SPLIT_FROM = 512  # on a wide device, where one thread would go down a whole column
WIDE_SPLIT_OUTPUTS = 16384
PARTS = 64  # a reduction of what lies in memory in order: at least so many, in rows of these lengths
ROWS = (*range(4096, 511, -64), *range(4096, 511, -1))


def split_reduce(u: UOp, ctx: bool) -> UOp | None:
    """A large reduction with few outputs becomes two: the parts in parallel, then their sum. `ctx`: whether there are
    wide devices."""
    op, axes, blocks = u.arg.op, u.arg.axes, u.arg.blocks
    x = u.src[0]
    if not all(isinstance(d, int) for d in x.shape) or x.dtype.is_half:
        return None
    size = prod([x.shape[a] for a in axes])
    if size < WIDE_SPLIT_FROM:
        return None
    columns = ctx and len(x.shape) - 1 not in axes and is_wide(u.device)
    if size < SPLIT_FROM and not columns:
        return None
    if (
        blocks is None
        and axes == tuple(range(axes[0], len(x.shape)))
        and lies_flat(x)
        and (row := row_of(size)) is not None
    ):
        return in_parts(u, op, (*x.shape[: axes[0]], size // row, row), axes[0], (axes[0] + 1,))
    if prod(u.shape) // (blocks or 1) > (WIDE_SPLIT_OUTPUTS if columns else SPLIT_OUTPUTS):
        return None
    divisors = [
        (d, a) for a in axes for d in range(2, min(SPLIT_PARTS, x.shape[a]) + 1) if x.shape[a] % d == 0 and d < size
    ]
    if not divisors:
        return None
    parts, axis = max(divisors, key=lambda p: (p[0], -p[1]))
    shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    inner_axes = tuple(sorted({a if a <= axis else a + 1 for a in axes if a != axis} | {axis + 1}))
    return in_parts(u, op, shape, axis, inner_axes)


def in_parts(u: UOp, op: Ops, shape: tuple[int, ...], parts: int, inside: tuple[int, ...]) -> UOp:
    """The reduction of its value in another shape, first over the dims `inside` of the parts, then over these."""
    x = UOp(Ops.RESHAPE, u.src[0].dtype, u.src, shape)
    inner = UOp(Ops.CONTIGUOUS, u.dtype, (UOp(Ops.REDUCE, u.dtype, (x,), ReduceArg(op, inside)),))
    return UOp(Ops.RESHAPE, u.dtype, (UOp(Ops.REDUCE, u.dtype, (inner,), ReduceArg(op, (parts,))),), u.shape)


def row_of(size: int) -> int | None:
    """A divisor that is a good length of a row: read in one stream, the next one asked for meanwhile."""
    return next((n for n in ROWS if size % n == 0 and size >= PARTS * n), None)


def lies_flat(x: UOp) -> bool:
    """Whether `x` is computed element by element from numbers and what lies in memory in the same order."""
    below = x.toposort(lambda v: v.op in GroupOp.ELEMENTWISE or v.op is Ops.RESHAPE)
    return all(
        v.op in GroupOp.ELEMENTWISE or v.op in (Ops.RESHAPE, Ops.CONTIGUOUS) or is_buffer(v) or constant(v) is not None
        for v in below
    )


pm_split_reduce = PatternMatcher([(UPat(Ops.REDUCE, "u"), split_reduce)])


def split_reductions(sink: UOp) -> UOp:
    nodes = sink.toposort()
    wide = any(is_buffer(u) and is_wide(u.device) for u in nodes)
    large = any(u.op is Ops.REDUCE and split_reduce(u, wide) is not None for u in nodes)
    return graph_rewrite(sink, pm_split_reduce, wide) if large else sink
