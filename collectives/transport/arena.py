"""A worker's CPU memory that its peers on the host can map: one anonymous memory file, and an allocator over it.

`memfd_create` gives memory without a name: nothing can be left behind, however the process ends, and /dev/shm's size
does not matter. The file is sparse and as large as the host's memory, so it never has to grow: pages cost nothing until
touched. It starts with the mailbox (see `shm.py`); peers map all of it, through /proc/<pid>/fd/<fd>, and write
to the rest where it was lent to be written. A random token at its start proves that a peer has mapped the right file.
It is unmapped with the last reference: all that lies in it refers to it, and may be used when communication has ended.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import secrets
import stat
import sys
from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import islice
from threading import Lock

from manygrad.errors import ArenaFull

PAGE = mmap.PAGESIZE
ALIGN = 64
TOKEN_BYTES = 16
_PUNCH_HOLE_KEEP_SIZE = 0x3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10


class Mapping:
    """`nbytes` of the file `fd` from `offset`, mapped at `addr` until `close()`, or until nothing refers to it."""

    def __init__(self, fd: int, offset: int, nbytes: int):
        self.addr, self.nbytes = 0, nbytes
        self.addr = self._map(fd, offset, mmap.MAP_SHARED)

    def _map(self, fd: int, offset: int, flags: int) -> int:
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        addr = _libc.mmap(self.addr or None, self.nbytes, prot, flags | _MAP_NORESERVE, fd, offset)
        if addr in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            limit, hint = resource.getrlimit(resource.RLIMIT_AS)[0], ""
            if limit != resource.RLIM_INFINITY:
                hint = (
                    f"; the address space is limited to {limit} bytes (`ulimit -v`), and workers map as much as the "
                    "host has memory, of which they take what they use: set `ulimit -v unlimited`"
                )
            raise OSError(code, f"mapping {self.nbytes} bytes: {os.strerror(code)}{hint}")
        return int(addr)

    def keep_apart(self, fd: int, offset: int) -> None:
        """From now on what is written here is seen by nobody else."""
        self._map(fd, offset, mmap.MAP_PRIVATE | _MAP_FIXED)

    def close(self) -> None:
        if self.addr:
            _libc.munmap(self.addr, self.nbytes)
            self.addr = 0

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends():  # (at the end of a process destructors run in any order)
            self.close()


def page_up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def default_nbytes() -> int:
    """The host's memory: more could never be filled."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE


class FreeList:
    """Best-fit allocation of offsets in `0..size`, with neighbours merged on free. Not thread-safe by itself."""

    def __init__(self, size: int):
        self.size = size
        self.starts: dict[int, int] = {0: size} if size else {}  # free: start -> length
        self.ends: dict[int, int] = {size: 0} if size else {}  # free: end -> start
        self.by_size: list[tuple[int, int]] = [(size, 0)] if size else []
        self.used: dict[int, int] = {}  # start -> length

    def _add(self, start: int, length: int) -> None:
        if length:
            self.starts[start], self.ends[start + length] = length, start
            insort(self.by_size, (length, start))

    def _remove(self, start: int) -> int:
        length = self.starts.pop(start)
        del self.ends[start + length]
        self.by_size.pop(bisect_left(self.by_size, (length, start)))
        return length

    def alloc(self, nbytes: int, align: int) -> int | None:
        """The offset of a free block, or None."""
        i = bisect_left(self.by_size, (nbytes, 0))
        for length, start in islice(self.by_size, i, None):
            at = -(-start // align) * align
            if at + nbytes <= start + length:
                self._remove(start)
                self._add(start, at - start)
                self._add(at + nbytes, start + length - at - nbytes)
                self.used[at] = nbytes
                return at
        return None

    def free(self, start: int) -> None:
        length = self.used.pop(start, None)
        if length is None:
            raise ValueError(f"offset {start} is not allocated (freed twice?)")
        if start + length in self.starts:
            length += self._remove(start + length)
        if start in self.ends:
            before = self.ends[start]
            length += self._remove(before)
            start = before
        self._add(start, length)


class Uncollected:
    """A lock while which no garbage is collected: that may free blocks, or take some, in the middle of a change."""

    def __init__(self) -> None:
        self._lock, self._collects = Lock(), False
        os.register_at_fork(after_in_child=self._after_fork)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()
        self._lock.release()

    def _after_fork(self) -> None:
        if self._lock.locked():
            self.__exit__()


UNCOLLECTED = Uncollected()  # (one for all arenas, as there is one collector)


class Arena:
    """`mailbox_nbytes` (rounded to pages) for signalling, then `nbytes` to allocate from.

    Offsets count from the start of the data part, which is mapped at `base`. All methods are thread-safe.
    """

    def __init__(self, nbytes: int | None = None, mailbox_nbytes: int = PAGE):
        self.nbytes = page_up(nbytes if nbytes is not None else default_nbytes())
        self.mailbox_nbytes = page_up(mailbox_nbytes)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.fd = os.memfd_create("manygrad-arena", os.MFD_CLOEXEC)
        os.fchmod(self.fd, stat.S_IRUSR | stat.S_IWUSR)
        os.ftruncate(self.fd, self.mailbox_nbytes + self.nbytes)
        self.mapping = Mapping(self.fd, 0, self.mailbox_nbytes + self.nbytes)
        self.mailbox = self.mapping.addr
        self.base = self.mapping.addr + self.mailbox_nbytes
        self._free = FreeList(self.nbytes)
        self.used_nbytes = self.peak_nbytes = 0
        # after a collective has failed nothing is given out twice: who was late may still write to what it was lent
        self.has_failed = False
        ctypes.memmove(self.mailbox, self.token, TOKEN_BYTES)

    def alloc(self, nbytes: int, align: int = ALIGN) -> int:
        """The offset of `nbytes` (rounded up to 64) at a multiple of `align`; their content is undefined.

        Raises `ArenaFull` (a `MemoryError`), `ValueError` for a bad size or alignment.
        """
        if nbytes < 0 or align < 1 or align & (align - 1):
            raise ValueError(f"nbytes must be ≥ 0 and align a power of two, got nbytes={nbytes}, align={align}")
        rounded = max(-(-nbytes // ALIGN) * ALIGN, ALIGN)
        with UNCOLLECTED:
            offset = self._free.alloc(rounded, max(align, ALIGN))
            if offset is None:
                largest = self._free.by_size[-1][0] if self._free.by_size else 0
                raise ArenaFull(
                    f"no room for {nbytes} bytes in the shared arena: {self.used_nbytes} of {self.nbytes} bytes are in "
                    f"use, the largest free block has {largest}; free buffers, or make the arena larger (Endpoint's "
                    "arena_bytes)"
                )
            self.used_nbytes += rounded
            self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
        return offset

    def free(self, offset: int) -> None:
        """Gives a block back, or, after a failure, nothing. `ValueError` if `offset` is not allocated."""
        with UNCOLLECTED:
            if self.has_failed:
                return
            nbytes = self._free.used.get(offset, 0)
            self._free.free(offset)
            self.used_nbytes -= nbytes

    def trim(self) -> int:
        """Returns the pages of all free blocks to the system; their total in bytes."""
        total = 0
        with UNCOLLECTED:
            for start, length in self._free.starts.items():
                lo, hi = page_up(start), (start + length) // PAGE * PAGE
                if hi > lo and _libc.fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, self.mailbox_nbytes + lo, hi - lo) == 0:
                    total += hi - lo
        return total

    def addr(self, offset: int) -> int:
        return self.base + offset

    def contains(self, addr: int, nbytes: int = 1) -> bool:
        """Whether all of `addr..addr+nbytes` lies in the data part."""
        return self.base <= addr and addr + nbytes <= self.base + self.nbytes

    def keep_apart(self) -> None:
        """In a forked child: what it writes must not be seen by those whose memory this is."""
        self.mapping.keep_apart(self.fd, 0)

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ends() and hasattr(self, "fd"):
            os.close(self.fd)


class RemoteArena:
    """A peer's arena: its mailbox part and its data.

    Raises `OSError` where it cannot be opened or is not the file that `token` belongs to: the peer is on another host,
    in another container, or another user's.
    """

    def __init__(self, pid: int, fd: int, token: bytes, mailbox_nbytes: int, nbytes: int):
        path = f"/proc/{pid}/fd/{fd}"
        if "/memfd:manygrad-arena" not in os.readlink(path):
            raise OSError(f"{path} is no manygrad arena")
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode) or info.st_size != mailbox_nbytes + nbytes or mailbox_nbytes < PAGE:
                raise OSError(f"{path} has another size than its owner's card says")
            self.head = Mapping(handle, 0, mailbox_nbytes)
            if ctypes.string_at(self.head.addr, TOKEN_BYTES) != token:
                self.head.close()
                raise OSError(f"{path} carries another token than its owner's card")
            try:
                self.data = Mapping(handle, mailbox_nbytes, nbytes)
            except OSError:
                self.head.close()
                raise
        finally:
            os.close(handle)
        self.mailbox, self.base, self.nbytes = self.head.addr, self.data.addr, nbytes

    def close(self) -> None:
        self.head.close()
        self.data.close()
