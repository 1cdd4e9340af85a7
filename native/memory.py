"""Bytes at an address of this process."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from manygrad.native.source import module

# a copy of so many bytes goes past the caches: one that the peers make at the same time fills them [allreduce.py]
PAST_CACHES_NBYTES = 4 << 20
SHORT_NBYTES = 1 << 16  # a copy of so many takes a few microseconds
SMALL_PAGES_NBYTES = 1 << 20  # a huge page begins at the next multiple of its size


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """The bytes at `address` as a uint8 array; the caller keeps the memory alive."""
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=np.uint8)


def aligned(nbytes: int, alignment: int) -> tuple[np.ndarray, int]:
    """(what keeps it alive, address) of fresh memory, which the system provides page by page as it is written."""
    raw = np.empty(nbytes + alignment, dtype=np.uint8)
    return raw, (raw.ctypes.data + alignment - 1) // alignment * alignment


def mostly_unwritten(nbytes: int) -> tuple[np.ndarray, int]:
    """As `aligned`, at a page, of memory of which mostly the beginning alone is written: that comes in small pages,
    where huge ones (which NumPy asks for) would take 2 MiB for its first byte."""
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes > SMALL_PAGES_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # (a kernel that has none)
            pages.madvise(mmap.MADV_NOHUGEPAGE, 0, SMALL_PAGES_NBYTES)
            pages.madvise(mmap.MADV_HUGEPAGE, SMALL_PAGES_NBYTES, nbytes - SMALL_PAGES_NBYTES)
    raw = np.frombuffer(pages, np.uint8)
    return raw, raw.ctypes.data


# (it keeps Python's lock: why, `native/team.py` says)
_short_copy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def copy(dst: int, src: int, nbytes: int) -> None:
    """memcpy between addresses, a long one without Python's lock. A large one goes past the caches (`ir/copy.ll`), at
    up to twice the speed of the C library's, which does so from about the size of the last cache on."""
    if nbytes < SHORT_NBYTES:
        _short_copy(dst, src, nbytes)
    elif nbytes < PAST_CACHES_NBYTES:
        ctypes.memmove(dst, src, nbytes)
    else:
        _past_caches()(dst, src, nbytes)


@cache
def _past_caches() -> Any:
    from manygrad.native.compiler import compiler

    address = compiler().functions(module("copy"), ["copy_past_caches"])["copy_past_caches"]
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(address)


def table(words: int) -> Any:
    """An array of 64-bit integers, all 0."""
    return (ctypes.c_int64 * words)()


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's mallopt


def keep_freed(largest: int, spare: int) -> None:
    """From now on the C library keeps blocks up to `largest` bytes that are freed, `spare` bytes in each heap: given
    back to the system, their pages would be cleared at the next use, which takes as long as a copy. Only glibc can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_THRESHOLD, largest), (_TRIM_THRESHOLD, spare), (_TOP_PAD, spare // 2)):
            mallopt(option, value)
