"""Buffer: memory of one device, allocated when first needed and freed with its last user."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad.runtime.devices import Device, get_device
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.dtype import DType


class Buffer:
    """`count` elements of `dtype` on `device`; with `base`, a view at `offset` bytes.

    The memory lives as long as a Buffer, a view of it, or a captured JIT call refers to it.
    """

    __slots__ = ("__weakref__", "_handle", "_owner", "agreed", "base", "count", "device", "dtype", "nbytes", "offset")

    def __init__(self, device: str, count: int, dtype: DType, base: Buffer | None = None, offset: int = 0):
        self.base = base  # (these first: `__del__` asks for them, and there may be no such device)
        self._handle: Any = None
        self.device: Device = get_device(device) if base is None else base.device
        self.count, self.dtype, self.offset = count, dtype, offset
        self.nbytes = count * dtype.itemsize
        self._owner: Any = None  # of memory that is not the device's own
        self.agreed = False  # found equal on all workers, or not to be compared
        if base is not None and not 0 <= offset <= offset + self.nbytes <= base.nbytes:
            raise ValueError(
                f"a view of {self.nbytes} bytes at {offset} does not lie in a buffer of {base.nbytes} bytes"
            )

    @property
    def is_allocated(self) -> bool:
        return self._handle is not None or (self.base is not None and self.base.is_allocated)

    @property
    def handle(self) -> Any:
        """The device's handle; allocates on first use."""
        if self._handle is None:
            if self.base is not None:
                self._handle = self.device.view(self.base.handle, self.offset, self.nbytes)
            else:
                self._handle = self.device.alloc(max(self.nbytes, 1))
                GlobalCounters.mem_used += self.nbytes
        return self._handle

    def clear(self) -> bool:
        """Allocates it with all elements 0, if that can be had without writing them."""
        if self._handle is None and self.base is None:
            self._handle = self.device.memory.zeroed(self.nbytes)
            GlobalCounters.mem_used += self.nbytes if self._handle is not None else 0
            return self._handle is not None
        return False

    def view(self, count: int, dtype: DType, offset: int) -> Buffer:
        base = self.base if self.base is not None else self
        return Buffer(self.device.name, count, dtype, base, self.offset + offset)

    def copyin(self, data: np.ndarray) -> Buffer:
        if data.nbytes != self.nbytes:
            raise ValueError(f"copyin of {data.nbytes} bytes into a buffer of {self.nbytes} bytes")
        if self.nbytes:
            self.device.copyin(self.handle, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
        return self

    def copyout(self) -> np.ndarray:
        raw = self.device.as_numpy(self.handle, self.nbytes) if self.nbytes else None
        if raw is None:
            raw = np.empty(self.nbytes, np.uint8)
            if self.nbytes:
                self.device.copyout(memoryview(raw), self.handle)
            return raw.view(self.dtype.np)
        return raw.view(self.dtype.np).copy()

    @staticmethod
    def over(device: str, array: np.ndarray, dtype: DType) -> Buffer | None:
        """A Buffer that is the memory of a contiguous array; None where the device's memory is not the host's."""
        handle = get_device(device).adopt(array)
        if handle is None:
            return None
        out = Buffer(device, array.size, dtype)
        out._handle, out._owner = handle, array
        return out

    def as_numpy(self) -> np.ndarray | None:
        """The memory as an array without a copy, where the host can see it; the array keeps it alive."""
        raw = self.device.as_numpy(self.handle, self.nbytes)
        if raw is None:
            return None
        held = _BufferArray(raw, self)
        return np.asarray(held).view(self.dtype.np)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # (at the end modules go before buffers)
        if self.base is None and self._handle is not None and self._owner is None and not ends():
            GlobalCounters.mem_used -= self.nbytes
            self.device.free(self._handle, max(self.nbytes, 1))

    def __repr__(self) -> str:
        return (
            f"<Buffer {self.count} {self.dtype.name} on "
            f"{self.device.name}{'' if self.is_allocated else ', not allocated'}>"
        )


class _BufferArray:
    """An array interface that keeps a Buffer alive."""

    def __init__(self, raw: np.ndarray, buffer: Buffer):
        self.__array_interface__, self.buffer = raw.__array_interface__, buffer


def copy_buffer(dst: Buffer, src: Buffer) -> None:
    """dst = src across devices; directly where both are host memory, or of a kind that copies on its own."""
    if dst.nbytes != src.nbytes:
        raise ValueError(f"copy of {src.nbytes} bytes into {dst.nbytes} bytes")
    if dst.nbytes:
        copy_memory(dst.device, dst.handle, src.device, src.handle, dst.nbytes)


def copy_memory(to: Device, target: Any, at: Device, source: Any, nbytes: int) -> None:
    """`copy_buffer` of handles."""
    copy = to.allocator.copy if to.kind == at.kind else None
    if copy is not None:
        copy(target, source, nbytes)
        return
    view, seen = to.as_numpy(target, nbytes), at.as_numpy(source, nbytes)
    if view is not None:
        at.copyout(memoryview(view), source)
    elif seen is not None:
        to.copyin(target, memoryview(seen))
    else:
        data = np.empty(nbytes, np.uint8)
        at.copyout(memoryview(data), source)
        to.copyin(target, memoryview(data))
