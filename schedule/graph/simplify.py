"""simplify: algebra and clean-up on the per-device tensor graph, before fusion is decided.

Precondition: no sharded value is left. Postcondition: the same values from fewer nodes.

    MUL(x, 1)                  ==>  x
    RESHAPE(RESHAPE(x, a), b)  ==>  RESHAPE(x, b)
"""

from __future__ import annotations

import math
from typing import Any

from manygrad.schedule.facts.join import join_padded
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import GroupOp, Ops, PatternMatcher, UOp, UPat, graph_rewrite
from manygrad.tensor.uop.shape import is_buffer


def constant(u: UOp) -> Any:
    """The value of a broadcast constant, or None."""
    while u.op in (Ops.RESHAPE, Ops.EXPAND, Ops.PERMUTE, Ops.SHRINK, Ops.FLIP):
        u = u.src[0]
    return u.arg if u.op is Ops.CONST else None


def same_shape(x: UOp, u: UOp) -> UOp | None:
    """x in place of u, if shapes agree."""
    return x if x.shape == u.shape and x.dtype is u.dtype else None


def fold_binary(u: UOp) -> UOp | None:
    """x + 0, x * 1, x - 0, x / 1 -> x; int x * 0 -> 0. Of floats, x + -0.0 and x - 0.0 are x, also where x is -0.0."""
    a, b = u.src
    ca, cb = constant(a), constant(b)
    if ca is None and cb is None:
        return None
    if ca is not None and cb is not None and u.op in FOLD and not u.dtype.is_half:
        return broadcast(UOp.const(u.dtype, FOLD[u.op](ca, cb)), u.shape) if _safe(u, ca, cb) else None
    if u.op is Ops.ADD:
        return same_shape(a, u) if _is_zero(u, cb, -1) else same_shape(b, u) if _is_zero(u, ca, -1) else None
    if u.op is Ops.SUB and _is_zero(u, cb, 1):
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


def _is_zero(u: UOp, c: Any, sign: int) -> bool:
    """Whether the constant operand is 0, and in a sum or difference of floats has this sign."""
    return c == 0 and (not u.dtype.is_float or math.copysign(1, c) == sign)


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


def _is_finite(c: Any) -> bool:
    return c is not None and math.isfinite(c)


def fold_cast(u: UOp) -> UOp | None:
    """CAST of a constant, or of a choice of two; CAST to the type it has; bool -> x -> y as bool -> y."""
    x = u.src[0]
    if x.dtype is u.dtype:
        return x
    if _is_finite(constant(x)):
        return broadcast(UOp.const(u.dtype, constant(x)), u.shape)
    if x.op is Ops.WHERE and all(_is_finite(constant(s)) for s in x.src[1:]):
        return u.replace(op=Ops.WHERE, src=(x.src[0], *(s.cast(u.dtype) for s in x.src[1:])))
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


def drop_reduce(u: UOp) -> UOp | None:
    """REDUCE(x) over dims of size 1 -> x."""
    return same_shape(u.src[0], u)


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


def stored_constant(u: UOp) -> UOp | None:
    """STORE(b, CONTIGUOUS(c)) of a constant -> STORE(b, c): what else stores it need not read it there."""
    target, value, *rest = u.src
    if value.op is not Ops.CONTIGUOUS or constant(value.src[0]) is None:
        return None
    return u.replace(src=(target, value.src[0], *rest))


def is_whole_buffer(u: UOp) -> bool:
    while u.op is Ops.RESHAPE:
        u = u.src[0]
    return is_buffer(u)


pm_simplify = PatternMatcher(
    [
        (UPat(Ops.COPY, "u"), same_device),
        (UPat(Ops.CONTIGUOUS, "u"), lambda u: u.src[0] if u.src[0].op in (Ops.CONTIGUOUS, Ops.COPY) else None),
        (UPat(Ops.MSTACK, "u"), whole_buffers),
        (UPat(Ops.STORE, "u"), stored_constant),
        (UPat(Ops.PAD, "u"), pad_empty),
        (UPat(GroupOp.MOVEMENT, "u"), merge_movement),
        (UPat(Ops.REDUCE, "u"), drop_reduce),
        (UPat(Ops.ADD, "u"), join_padded),
        (UPat(GroupOp.BINARY, "u"), fold_binary),
        (UPat(Ops.WHERE, "u"), fold_where),
        (UPat(Ops.CAST, "u"), fold_cast),
    ]
)


def simplify(sink: UOp) -> UOp:
    return graph_rewrite(sink, pm_simplify)
