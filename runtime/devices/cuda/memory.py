"""Memory of a GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manygrad.runtime.devices.cuda.driver import checked
from manygrad.runtime.devices.cuda.stream import CUDAStream


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
        """Copies from the host, which may change it when this returns."""
        if data.nbytes:
            self.stream.staging.up(self.address, _address(data), data.nbytes)

    def read(self, data: memoryview) -> None:
        """Copies to the host, when all that was started has ended."""
        if data.nbytes:
            self.stream.staging.down(_address(data), self.address, data.nbytes)

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


def scratch_of(stream: CUDAStream, nbytes: int) -> OwnedRange:
    """Memory that the kernels of a stream use one after the other; who starts them keeps it."""
    if stream.scratch is None or stream.scratch.nbytes < nbytes:
        stream.scratch = OwnedRange(stream, stream.alloc(nbytes), nbytes)
    found: OwnedRange = stream.scratch
    return found


def _address(data: memoryview) -> int:
    if data.readonly:
        return int(np.frombuffer(data, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
