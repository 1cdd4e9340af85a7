"""Memory of a GPU, and the stream in which everything on it happens in order."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manygrad.runtime.devices.cuda.driver import Gpu, checked


class CUDAStream:
    """The queue of one device: kernels and copies, one after the other. Which data is where follows from it alone."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        own = gpu.enter()
        self.handle = checked(own.cuStreamCreate(own.CUstream_flags.CU_STREAM_NON_BLOCKING), name)
        self._scratch: OwnedRange | None = None

    def finish(self) -> None:
        """Waits for all that was started."""
        checked(self.gpu.enter().cuStreamSynchronize(self.handle), self.name)

    def after(self, other: CUDAStream) -> None:
        """What comes next here waits for what the other one has been given."""
        own = other.gpu.enter()
        event = checked(own.cuEventCreate(own.CUevent_flags.CU_EVENT_DISABLE_TIMING), self.name)
        checked(own.cuEventRecord(event, other.handle), self.name)
        checked(self.gpu.enter().cuStreamWaitEvent(self.handle, event, 0), self.name)
        checked(own.cuEventDestroy(event), self.name)  # (the driver keeps it until it has happened)

    def scratch(self, nbytes: int) -> OwnedRange:
        """Memory that kernels use one after the other; who starts them keeps it."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = OwnedRange(self, self.alloc(nbytes), nbytes)
        return self._scratch

    def alloc(self, nbytes: int) -> int:
        """The address of fresh memory. Raises MemoryError."""
        what = f"{self.name}: {nbytes} bytes"
        return int(checked(self.gpu.enter().cuMemAllocAsync(max(1, nbytes), self.handle), what))

    def free(self, address: int) -> None:
        """Kernels that were started before may still use it."""
        checked(self.gpu.enter().cuMemFreeAsync(address, self.handle), self.name)


@dataclass(eq=False)
class MemoryRange:
    """`nbytes` at an address. A handle knows its device's stream, so that a kernel shared by all devices runs on the
    right one."""

    stream: CUDAStream
    address: int
    nbytes: int

    def part(self, offset_bytes: int, nbytes: int) -> MemoryRange:
        assert 0 <= offset_bytes and offset_bytes + nbytes <= self.nbytes, (
            f"view of bytes {offset_bytes}..{offset_bytes + nbytes} of {self.nbytes}"
        )
        return MemoryRange(self.stream, self.address + offset_bytes, nbytes)

    def fill(self, data: memoryview) -> None:
        """Copies from the host; it is there when this returns."""
        if data.nbytes:
            own, at = self.stream.gpu.enter(), _address(data)
            checked(own.cuMemcpyHtoDAsync(self.address, at, data.nbytes, self.stream.handle), self.stream.name)
            self.stream.finish()

    def read(self, data: memoryview) -> None:
        """Copies to the host, when all that was started has ended."""
        if data.nbytes:
            own, at = self.stream.gpu.enter(), _address(data)
            checked(own.cuMemcpyDtoHAsync(at, self.address, data.nbytes, self.stream.handle), self.stream.name)
            self.stream.finish()

    def copy_from(self, other: MemoryRange, nbytes: int) -> None:
        ours = other.stream is self.stream
        if not ours:
            self.stream.after(other.stream)
        own = self.stream.gpu.enter()
        checked(own.cuMemcpyDtoDAsync(self.address, other.address, nbytes, self.stream.handle), self.stream.name)
        if not ours:  # (what comes next in the other stream may write there)
            other.stream.after(self.stream)


class OwnedRange(MemoryRange):
    """Memory that is given back when nobody has it any more."""

    def __del__(self, ended: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ended():
            self.stream.free(self.address)


def _address(data: memoryview) -> int:
    if data.readonly:
        return int(np.frombuffer(data, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
