"""The memory that a value is, or stands on, as passes ask for it, and the temporary buffers that they make."""

from __future__ import annotations

from typing import Any

from manygrad.tensor.uop import BufferSpec, GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import is_buffer, numel


class Temps:
    """Numbers the temporary buffers of one schedule; negative ids, the same for the same graph."""

    def __init__(self) -> None:
        self.count = 0

    def new(self, shape: tuple[Any, ...], dtype: Any, device: Any) -> UOp:
        self.count += 1
        return UOp(Ops.BUFFER, dtype, (), BufferSpec(-self.count, tuple(shape), dtype, device))


def base_buffer(u: UOp) -> UOp:
    """The buffer a store target or read view belongs to."""
    while u.op in GroupOp.MOVEMENT or u.op in (Ops.AFTER, Ops.GATHER, Ops.VIEW):
        u = u.src[0]
    return u


def unmoved(u: UOp) -> UOp:
    """The value that movement ops stand on."""
    while u.op in GroupOp.MOVEMENT:
        u = u.src[0]
    return u


def in_memory(u: UOp) -> bool:
    return u.op is Ops.AFTER or is_buffer(u)


def device_of(u: UOp, sink: UOp) -> Any:
    """The device a value is computed on; constants go where the first output is."""
    if u.device is not None:
        return u.device
    return next(s.device for s in sink.src if s.device is not None)


def nbytes_of(buffer: UOp) -> int:
    return numel(buffer.arg.shape) * buffer.dtype.itemsize


def is_temporary(buffer: UOp) -> bool:
    return buffer.op is Ops.BUFFER and buffer.arg.uid < 0


def happened(u: UOp) -> frozenset[UOp]:
    """The effects a read of `u` comes after."""
    out: set[UOp] = set()
    seen: set[UOp] = set()
    todo = [u]
    while todo:
        u = todo.pop()
        while not is_buffer(u) and u not in seen:
            seen.add(u)
            if u.op is Ops.AFTER:
                out.update(u.src[1:])
                todo += [
                    e.src[0] for e in u.src[1:] if e.op is Ops.STORE
                ]  # a store into an assigned buffer carries the stores before it
            u = u.src[0]
    return frozenset(out)
