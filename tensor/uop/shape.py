"""Shape and device of a node, inferred from its sources and cached on it."""

from __future__ import annotations

from math import prod
from typing import Any

from manygrad.tensor.uop.args import ReduceArg
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.uop import DEVICE, SHAPE, UOp

Shape = tuple[Any, ...]

_ARG_SHAPE = frozenset({Ops.RESHAPE, Ops.EXPAND})
_SCALAR = frozenset(
    {
        Ops.CONST,
        Ops.DEFINE_VAR,
        Ops.BIND,
        Ops.RANGE,
        Ops.LOAD,
        Ops.INDEX,
        Ops.SINK,
        Ops.CHAIN,
        Ops.LINEAR,
        Ops.CALL,
        Ops.STORE,
    }
)


@SHAPE.by
def _shape(u: UOp) -> Shape:
    op, s = u.op, u.src
    if op in GroupOp.ELEMENTWISE:
        for x in s:
            if x.shape:
                return x.shape
        return ()
    if op in _ARG_SHAPE:
        return tuple(u.arg)
    if op in (Ops.BUFFER, Ops.PARAM):
        return u.arg.shape if hasattr(u.arg, "shape") else ()
    if op in _SCALAR or (not s and op is not Ops.IOTA):
        return ()
    if op is Ops.IOTA:
        return (u.arg,)
    if op is Ops.RESULT:
        return s[0].arg.src[u.arg].shape
    if op is Ops.FUNCTION:
        return ()
    if op is Ops.VIEW:
        return u.arg.shape
    if op is Ops.PERMUTE:
        return tuple(s[0].shape[i] for i in u.arg)
    if op is Ops.PAD:
        return tuple(b + d + a for d, (b, a) in zip(s[0].shape, u.arg))
    if op is Ops.SHRINK:
        return tuple(sub(e, b) for b, e in u.arg)
    if op is Ops.REDUCE:
        if not isinstance(u.arg, ReduceArg):  # a kernel's
            return ()
        axes = u.arg.axes
        return tuple(1 if i in axes else d for i, d in enumerate(s[0].shape))
    if op is Ops.GATHER:
        return s[1].shape + s[0].shape[len(s) - 1 :]
    if op is Ops.CAT:
        first = s[0].shape
        return (*first[: u.arg], sum(x.shape[u.arg] for x in s), *first[u.arg + 1 :])
    if op is Ops.MSELECT and s[0].op in (Ops.BUFFER, Ops.PARAM):
        return local_shape(s[0].arg, u.arg)
    if op is Ops.MSELECT and s[0].op in GroupOp.COLLECTIVE:
        return (s[0].arg.members.counts[u.arg],)
    return s[0].shape if s else ()


def local_shape(spec: Any, i: int) -> Shape:
    """Shape of device i's part of a buffer on several devices."""
    if spec.axis is None:
        return spec.shape
    part = spec.bounds[i + 1] - spec.bounds[i]
    return (*spec.shape[: spec.axis], part, *spec.shape[spec.axis + 1 :])


def sub(e: Any, b: Any) -> Any:
    """`e - b` where either may be symbolic."""
    if isinstance(e, int) and isinstance(b, int):
        return e - b
    from manygrad.tensor.uop import symbolic as sym

    return sym.to_sint(sym.add(sym.as_index(e), sym.mul(sym.as_index(b), -1)))


@DEVICE.by
def _device(u: UOp) -> str | tuple[str, ...] | None:
    if u.op in (Ops.BUFFER, Ops.PARAM):
        return u.arg.device if hasattr(u.arg, "device") else None
    if u.op is Ops.COPY:
        return u.arg
    if u.op is Ops.SHARD:
        return u.arg.devices
    if u.op is Ops.RESULT:
        return u.src[0].arg.src[u.arg].device
    if u.op is Ops.MSTACK:
        return tuple(x.device for x in u.src)  # type: ignore[misc]
    if u.op is Ops.MSELECT:
        d = u.src[0].device
        return d[u.arg] if isinstance(d, tuple) else d
    for x in u.src:
        d = x.device
        if d is not None:
            return d
    return None


def is_buffer(u: UOp) -> bool:
    """Whether `u` is memory by itself, or one device's part of such."""
    return u.op is Ops.BUFFER or u.op is Ops.PARAM or (u.op is Ops.MSELECT and u.src[0].op in (Ops.BUFFER, Ops.PARAM))


def unviewed(u: UOp) -> UOp:
    """The node that views, detached ones too, stand on."""
    while u.op in GroupOp.VIEW or u.op is Ops.DETACH:
        u = u.src[0]
    return u


def attached(u: UOp, past_leaves: bool = False) -> UOp:
    """A view without the DETACHes in it: what can be written to. `past_leaves`: the view of what a leaf that is in
    nobody's memory yet was made of."""
    while u.op is Ops.DETACH or (past_leaves and u.op is Ops.CONTIGUOUS and u.arg is not None):
        u = u.src[0]
    is_view = u.op in GroupOp.VIEW or u.op is Ops.BITCAST
    return u.replace(src=(attached(u.src[0], past_leaves),)) if is_view else u


def numel(shape: Shape) -> int:
    """Element count; a symbolic dim counts with its largest value."""
    if {*map(type, shape)} <= {int}:
        return prod(shape)
    from manygrad.tensor.uop.symbolic import vmax

    return prod(d if isinstance(d, int) else int(vmax(d)) for d in shape)
