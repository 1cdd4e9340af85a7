"""Memory of one device: what is in use, and what was freed and is kept, by size, for the next allocation of that
size."""

from __future__ import annotations

import threading
from typing import Any

from manygrad.runtime.devices.base import Allocator

LARGE_BYTES = 1 << 20
ZEROED_BYTES = 1 << 16  # from which on a system call takes less time than writing them


class Pool:
    """`allocated`, `cached`, `peak`: bytes in use, bytes freed and kept, and the most bytes ever in use."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator, self.unit = allocator, allocator.alignment
        self.allocated = self.cached = self.peak = 0
        self._blocks: dict[int, list[Any]] = {}  # freed, by size
        self._lock = threading.RLock()  # (a garbage collection while it is held may free buffers)

    def rounded(self, nbytes: int) -> int:
        """The size of the block that holds `nbytes`."""
        unit = self.unit
        return (nbytes + unit - 1) // unit * unit or unit

    def alloc(self, nbytes: int) -> Any:
        """Memory for `nbytes`: a freed block of the same size where there is one."""
        size = self.rounded(nbytes)
        handle = None
        with self._lock:
            if blocks := self._blocks.get(size):
                handle = blocks.pop()
                self.cached -= size
                self.allocated += size
                if self.allocated > self.peak:
                    self.peak = self.allocated
        if handle is None:
            handle = self._fresh(size)
            self._count(size)
        self.allocator.sized(handle, nbytes)
        return handle

    def zeroed(self, nbytes: int) -> Any:
        """As `alloc`, all zeros; None where the system would not give them for nothing: few, or a freed block fits."""
        size = self.rounded(nbytes)
        if self.allocator.zeroed is None or size < ZEROED_BYTES or self._blocks.get(size):
            return None
        handle = self.allocator.zeroed(size)
        self.allocator.sized(handle, nbytes)
        self._count(size)
        return handle

    def _count(self, size: int) -> None:
        with self._lock:
            self.allocated += size
            self.peak = max(self.peak, self.allocated)

    def _fresh(self, size: int) -> Any:
        if size >= LARGE_BYTES and self.cached:
            # smaller blocks make room: what a program uses at first would stay for ever
            self.trim(max(0, self.cached - size), largest=size)
        try:
            return self.allocator.alloc(size)
        except MemoryError:
            self.trim()
            return self.allocator.alloc(size)

    def free(self, handle: Any, nbytes: int) -> None:
        """Takes back what `alloc(nbytes)` gave."""
        size = self.rounded(nbytes)
        with self._lock:
            self.allocated -= size
            if handle is not None:
                self._blocks.setdefault(size, []).append(handle)
                self.cached += size
        if self.cached > self.allocator.keep_bytes:
            self.trim(self.allocator.keep_bytes // 2)

    def trim(self, keep_bytes: int = 0, largest: int | None = None) -> None:
        """Gives cached blocks back, the largest first, until at most `keep_bytes` are kept; none of more than `largest`
        bytes."""
        with self._lock:
            for size in sorted(s for s in list(self._blocks) if largest is None or s <= largest)[::-1]:
                blocks = self._blocks[size]
                while blocks and self.cached > keep_bytes:
                    self.allocator.free(blocks.pop(), size)
                    self.cached -= size
        self.allocator.trim()
