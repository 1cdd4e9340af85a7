"""Values of one device: the ops that cut, join and place them."""

from __future__ import annotations

from math import prod
from typing import Any

from manygrad.multi.placement import Shard
from manygrad.tensor.dtype import DType
from manygrad.tensor.uop import Ops, UOp


def local_name(device: str) -> str:
    """The name of an own device without its node: `CPU:0@2` -> `CPU:0`."""
    return device.partition("@")[0]


def reshape(x: UOp, shape: tuple[Any, ...]) -> UOp:
    return x if x.shape == shape else UOp(Ops.RESHAPE, x.dtype, (x,), shape)


def cut_shape(shape: tuple[Any, ...], p: Shard, i: int) -> tuple[Any, ...]:
    return (*shape[: p.axis], p.bounds[i + 1] - p.bounds[i], *shape[p.axis + 1 :])


def join(pieces: list[UOp], axis: int) -> UOp:
    return UOp(Ops.CAT, pieces[0].dtype, tuple(pieces), axis) if len(pieces) > 1 else pieces[0]


def pack(x: UOp, p: Shard) -> UOp:
    """Flat, with what each device will hold lying together."""
    if prod(x.shape[: p.axis]) == 1 or not prod(x.shape):
        return reshape(x, (prod(x.shape),))
    return join(
        [
            reshape(y, (prod(y.shape),))
            for y in (shrink(x, p.axis, a, b) for a, b in zip(p.bounds, p.bounds[1:]) if a < b)
        ],
        0,
    )


def shrink(x: UOp, axis: int, begin: int, end: int) -> UOp:
    if (begin, end) == (0, x.shape[axis]):
        return x
    return UOp(Ops.SHRINK, x.dtype, (x,), tuple((begin, end) if a == axis else (0, d) for a, d in enumerate(x.shape)))


def among_zeros(x: UOp, p: Shard, i: int) -> UOp:
    """Device i's slice in the shape of the whole value."""
    pads = tuple((p.bounds[i], p.bounds[-1] - p.bounds[i + 1]) if a == p.axis else (0, 0) for a in range(len(x.shape)))
    return UOp(Ops.PAD, x.dtype, (x,), pads)


def is_on(x: UOp, device: str) -> bool:
    """Whether local value `x` lies on local `device`; buffers of the world keep their global names."""
    return isinstance(x.device, str) and local_name(x.device) == device


def on(x: UOp, device: str) -> UOp:
    return x if x.device is None or is_on(x, device) else UOp(Ops.COPY, x.dtype, (x,), device)


def stored_on(x: UOp, device: str) -> UOp:
    """`x` in memory of `device`."""
    return UOp(Ops.CONTIGUOUS, x.dtype, (x,)) if is_on(x, device) else UOp(Ops.COPY, x.dtype, (x,), device)


def broadcast(u: UOp, shape: tuple[Any, ...]) -> UOp:
    return u if not shape else UOp(Ops.EXPAND, u.dtype, (UOp(Ops.RESHAPE, u.dtype, (u,), (1,) * len(shape)),), shape)


def const_like(u: UOp, value: int) -> UOp:
    return broadcast(UOp.const(u.dtype, value), u.shape)


def cast(x: UOp, dtype: DType) -> UOp:
    return x if x.dtype is dtype else UOp(Ops.CAST, dtype, (x,))
