"""Host memory, shared by the backends whose kernels read it directly (CPU, PYTHON)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from manygrad.native.memory import aligned, bytes_at
from manygrad.runtime.devices.base import ALIGNMENT, Device


@dataclass(slots=True, eq=False)
class Memory:
    """`nbytes` at host `address`; `owner` keeps them alive."""

    address: int
    nbytes: int
    owner: Any = None


class HostDevice(Device):
    """A device whose memory is NumPy's: lazily backed, aligned, visible to the host."""

    def _alloc(self, nbytes: int) -> Memory:
        raw, address = aligned(nbytes, 4096 if nbytes >= 1 << 16 else ALIGNMENT)
        return Memory(address, nbytes, raw)

    def alloc(self, nbytes: int) -> Memory:
        handle: Memory = super().alloc(nbytes)
        handle.nbytes = nbytes  # of a block that may be larger: what is beyond is out of bounds
        return handle

    def trim(self, keep_bytes: int = 0, largest: int | None = None) -> None:
        super().trim(keep_bytes, largest)
        if (
            give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)
        ) is not None:  # what compiling left on glibc's heap
            give_back(0)

    def view(self, handle: Memory, offset_bytes: int, nbytes: int) -> Memory:
        assert 0 <= offset_bytes and offset_bytes + nbytes <= handle.nbytes, (
            f"view of bytes {offset_bytes}..{offset_bytes + nbytes} of {handle.nbytes}"
        )
        return Memory(handle.address + offset_bytes, nbytes, handle.owner)

    def copyin(self, handle: Memory, data: memoryview) -> None:
        if data.nbytes:
            bytes_at(handle.address, data.nbytes)[:] = np.frombuffer(data, dtype=np.uint8)

    def copyout(self, data: memoryview, handle: Memory) -> None:
        if data.nbytes:
            np.frombuffer(data, dtype=np.uint8)[:] = bytes_at(handle.address, data.nbytes)

    def as_numpy(self, handle: Memory, nbytes: int) -> np.ndarray:
        return bytes_at(handle.address, nbytes)

    def adopt(self, array: np.ndarray) -> Memory:
        return Memory(array.__array_interface__["data"][0], array.nbytes, array)

    def address(self, handle: Memory) -> int:
        return handle.address
