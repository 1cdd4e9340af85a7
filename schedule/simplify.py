"""simplify: algebra and clean-up on the per-device tensor graph, before fusion is decided.

Precondition: no sharded value is left. Postcondition: the same values from fewer nodes; markers that only gradients
needed (DETACH, CUSTOM) are gone; a large reduction with few outputs stands as two.

    REDUCE(ADD, (65536,) -> (1,))  ==>  REDUCE(ADD, (256, 1) -> (1, 1)) of CONTIGUOUS(x),
                                        x = REDUCE(ADD, (256, 256) -> (256, 1))
"""

from __future__ import annotations

from math import prod
from typing import Any

from manygrad.schedule.desugar import is_buffer
from manygrad.schedule.join import join_padded
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, PatternMatcher, UOp, UPat, graph_rewrite

SPLIT_FROM = 32768  # elements reduced into one output
SPLIT_OUTPUTS = 2048  # at most so many outputs
SPLIT_PARTS = 256
PARTS = 64  # a reduction of what lies in memory in order: at least so many, in rows of these lengths
ROWS = (*range(4096, 511, -64), *range(4096, 511, -1))


def constant(u: UOp) -> Any:
    """The value of a broadcast constant, or None."""
    while u.op in (Ops.RESHAPE, Ops.EXPAND, Ops.PERMUTE, Ops.SHRINK, Ops.FLIP):
        u = u.src[0]
    return u.arg if u.op is Ops.CONST else None


def same_shape(x: UOp, u: UOp) -> UOp | None:
    """x in place of u, if shapes agree."""
    return x if x.shape == u.shape and x.dtype is u.dtype else None


def fold_binary(u: UOp) -> UOp | None:
    """x + 0, x * 1, x - 0, x / 1 -> x; int x * 0 -> 0."""
    a, b = u.src
    ca, cb = constant(a), constant(b)
    if ca is None and cb is None:
        return None
    if ca is not None and cb is not None and u.op in FOLD and not u.dtype.is_half:
        return broadcast(UOp.const(u.dtype, FOLD[u.op](ca, cb)), u.shape) if _safe(u, ca, cb) else None
    if u.op is Ops.ADD:
        return same_shape(a, u) if cb == 0 else same_shape(b, u) if ca == 0 else None
    if u.op is Ops.SUB and cb == 0:
        return same_shape(a, u)
    if u.op is Ops.MUL:
        if cb == 1 or ca == 1:
            return same_shape(a if cb == 1 else b, u)
        if (cb == 0 or ca == 0) and not u.dtype.is_float:
            return broadcast(UOp.const(u.dtype, 0), u.shape)
    if u.op is Ops.FDIV and cb == 1:
        return same_shape(a, u)
    return None


FOLD: dict[Ops, Any] = {
    Ops.ADD: lambda a, b: a + b,
    Ops.SUB: lambda a, b: a - b,
    Ops.MUL: lambda a, b: a * b,
    Ops.MAX: max,
    Ops.CMPLT: lambda a, b: a < b,
    Ops.CMPEQ: lambda a, b: a == b,
    Ops.CMPNE: lambda a, b: a != b,
}


def _safe(u: UOp, a: Any, b: Any) -> bool:
    return (a == a and b == b and u.dtype is not dtypes.bool) or u.op in GroupOp.COMPARE


def broadcast(u: UOp, shape: tuple[Any, ...]) -> UOp:
    if u.shape == shape:
        return u
    flat = UOp(Ops.RESHAPE, u.dtype, (u,), (1,) * len(shape))
    return UOp(Ops.EXPAND, u.dtype, (flat,), shape) if flat.shape != shape else flat


def fold_where(u: UOp) -> UOp | None:
    """WHERE(True, a, b) -> a; WHERE(c, a, a) -> a."""
    c = constant(u.src[0])
    if c is not None:
        return u.src[1] if c else u.src[2]
    return u.src[1] if u.src[1] is u.src[2] else None


def fold_cast(u: UOp) -> UOp | None:
    """CAST of a constant; CAST to the type it has; bool -> x -> y as bool -> y."""
    x = u.src[0]
    if x.dtype is u.dtype:
        return x
    c = constant(x)
    if c is not None and c == c and abs(c) != float("inf"):
        return broadcast(UOp.const(u.dtype, c), u.shape)
    if x.op is Ops.CAST and x.src[0].dtype.is_bool:
        return x.src[0].cast(u.dtype)
    return None


def merge_movement(u: UOp) -> UOp | None:
    """A movement op that moves nothing, or two of a kind in a row."""
    x = u.src[0]
    if u.op in (Ops.RESHAPE, Ops.EXPAND) and x.shape == u.shape:
        return x
    if u.op is x.op:
        if u.op in (Ops.RESHAPE, Ops.EXPAND):
            return u.replace(src=x.src)
        if u.op is Ops.PERMUTE:
            return UOp(Ops.PERMUTE, u.dtype, x.src, tuple(x.arg[i] for i in u.arg))
        if u.op is Ops.FLIP:
            return UOp(Ops.FLIP, u.dtype, x.src, tuple(a != b for a, b in zip(u.arg, x.arg)))
    if u.op is Ops.PERMUTE and u.arg == tuple(range(len(u.arg))):
        return x
    if u.op is Ops.FLIP and not any(u.arg):
        return x
    return None


def merge_reduce(u: UOp) -> UOp | None:
    """REDUCE(x) over dims of size 1 -> x; REDUCE(REDUCE(x, a), b) of one op -> REDUCE(x, a + b)."""
    x = u.src[0]
    if x.shape == u.shape and x.dtype is u.dtype:
        return x
    if x.op is Ops.REDUCE and x.arg[0] is u.arg[0] and len(x.arg) == len(u.arg) == 2:  # (one in blocks keeps its order)
        return UOp(Ops.REDUCE, u.dtype, x.src, (u.arg[0], tuple(sorted(set(u.arg[1]) | set(x.arg[1])))))
    return None


def split_reduce(u: UOp) -> UOp | None:
    """A large reduction with few outputs becomes two: the parts in parallel, then their sum."""
    op, axes, *blocks = u.arg
    x = u.src[0]
    if not all(isinstance(d, int) for d in x.shape) or x.dtype.is_half:
        return None
    size = prod([x.shape[a] for a in axes])
    if size < SPLIT_FROM or prod(u.shape) // (blocks[0] if blocks else 1) > SPLIT_OUTPUTS:
        return None
    if (
        not blocks
        and axes == tuple(range(axes[0], len(x.shape)))
        and lies_flat(x)
        and (row := row_of(size)) is not None
    ):
        return in_parts(u, op, (*x.shape[: axes[0]], size // row, row), axes[0], (axes[0] + 1,))
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
    inner = UOp(Ops.CONTIGUOUS, u.dtype, (UOp(Ops.REDUCE, u.dtype, (x,), (op, inside)),))
    return UOp(Ops.RESHAPE, u.dtype, (UOp(Ops.REDUCE, u.dtype, (inner,), (op, (parts,))),), u.shape)


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


def same_device(u: UOp) -> UOp | None:
    """COPY to where the value already is -> the value."""
    return u.src[0] if u.src[0].device == u.arg else None


def pad_empty(u: UOp) -> UOp | None:
    """PAD(x) of an empty x, as a device with an empty part of a cut value has it -> zeros."""
    return broadcast(UOp.const(u.dtype, 0), u.shape) if 0 in u.src[0].shape and 0 not in u.shape else None


def whole_buffers(u: UOp) -> UOp | None:
    """MSTACK(CONTIGUOUS(RESHAPE(b)), ...) of whole buffers -> MSTACK(RESHAPE(b), ...): a collective reads them where
    they are."""
    src = tuple(x.src[0] if x.op is Ops.CONTIGUOUS and is_whole_buffer(x.src[0]) else x for x in u.src)
    return None if src == u.src else u.replace(src=src)


def is_whole_buffer(u: UOp) -> bool:
    while u.op is Ops.RESHAPE:
        u = u.src[0]
    return is_buffer(u)


pm_clean = PatternMatcher(
    [
        (UPat(Ops.DETACH, "u"), lambda u: u.src[0]),  # DETACH(x) -> x
        (UPat(Ops.CUSTOM, "u"), lambda u: u.src[0]),  # CUSTOM(out, ...inputs) -> out
    ]
)

pm_simplify = PatternMatcher(
    [
        (UPat(Ops.COPY, "u"), same_device),
        (UPat(Ops.CONTIGUOUS, "u"), lambda u: u.src[0] if u.src[0].op in (Ops.CONTIGUOUS, Ops.COPY) else None),
        (UPat(Ops.MSTACK, "u"), whole_buffers),
        (UPat(Ops.PAD, "u"), pad_empty),
        (UPat(GroupOp.MOVEMENT, "u"), merge_movement),
        (UPat(Ops.REDUCE, "u"), merge_reduce),
        (UPat(Ops.ADD, "u"), join_padded),
        (UPat(GroupOp.BINARY, "u"), fold_binary),
        (UPat(Ops.WHERE, "u"), fold_where),
        (UPat(Ops.CAST, "u"), fold_cast),
    ]
)

pm_split_reduce = PatternMatcher([(UPat(Ops.REDUCE, "u"), split_reduce)])


def clean(sink: UOp) -> UOp:
    return graph_rewrite(sink, pm_clean) if any(u.op in (Ops.DETACH, Ops.CUSTOM) for u in sink.toposort()) else sink


def simplify(sink: UOp) -> UOp:
    sink = graph_rewrite(sink, pm_simplify)
    large = any(u.op is Ops.REDUCE and split_reduce(u) is not None for u in sink.toposort())
    return graph_rewrite(sink, pm_split_reduce) if large else sink
