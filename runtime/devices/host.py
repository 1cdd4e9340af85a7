"""Host memory, for backends whose kernels read it directly: NumPy's, backed by the system page by page as it is
written."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from manygrad.native.memory import aligned, bytes_at, copy
from manygrad.runtime.devices.base import ALIGNMENT, Allocator, HostAccess

PAGE_BYTES = 4096
PAGED_BYTES = 1 << 16  # memory of so many bytes begins at a page
HUGE_BYTES = 1 << 22  # memory of so many is asked for in huge pages, as NumPy does


@dataclass(slots=True, eq=False)
class Memory:
    """`nbytes` at host `address`; `owner` keeps them alive."""

    address: int
    nbytes: int
    owner: Any = None


def alloc(nbytes: int) -> Memory:
    raw, address = aligned(nbytes, PAGE_BYTES if nbytes >= PAGED_BYTES else ALIGNMENT)
    return Memory(address, nbytes, raw)


def zeroed(nbytes: int) -> Memory:
    """Fresh pages: the system has them read as zeros, and provides one when it is written."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # (a kernel that has none)
            pages.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(pages, np.uint8)
    return Memory(raw.ctypes.data, nbytes, raw)


def sized(handle: Memory, nbytes: int) -> None:
    """Puts what is beyond `nbytes` out of bounds."""
    handle.nbytes = nbytes


def trim() -> None:
    """Gives back what compiling left on glibc's heap."""
    if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give_back(0)


def view(handle: Memory, offset_bytes: int, nbytes: int) -> Memory:
    assert 0 <= offset_bytes and offset_bytes + nbytes <= handle.nbytes, (
        f"view of bytes {offset_bytes}..{offset_bytes + nbytes} of {handle.nbytes}"
    )
    return Memory(handle.address + offset_bytes, nbytes, handle.owner)


def _address(data: memoryview) -> int:
    if not data.readonly:  # (a twentieth of the time)
        return ctypes.addressof(ctypes.c_char.from_buffer(data))
    address: int = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return address


def copyin(handle: Memory, data: memoryview) -> None:
    if data.nbytes:
        copy(handle.address, _address(data), data.nbytes)


def copyout(data: memoryview, handle: Memory) -> None:
    if data.nbytes:
        copy(_address(data), handle.address, data.nbytes)


def as_numpy(handle: Memory, nbytes: int) -> np.ndarray:
    return bytes_at(handle.address, nbytes)


def address(handle: Memory) -> int:
    return handle.address


def adopt(array: np.ndarray) -> Memory:
    return Memory(array.__array_interface__["data"][0], array.nbytes, array)


HOST_MEMORY = Allocator(
    alloc,
    view,
    copyin,
    copyout,
    sized=sized,
    trim=trim,
    zeroed=zeroed,
    host=HostAccess(as_numpy, address, adopt, Memory),
)
