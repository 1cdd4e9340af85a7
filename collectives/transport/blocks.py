"""Blocks: memory of messages, kept for reuse, and the frames by which ZeroMQ reads memory where it lies.

ZeroMQ tells Python when it has let go of a frame that was made of Python's memory: through a socket, to a thread, which
takes Python's lock, for every such frame about as long as copying 100 KiB. So a frame is made once for each piece of
memory and is sent again and again; when that memory may be written follows from receipts, not from ZeroMQ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zmq

from manygrad.native.memory import bytes_at

POOL_NBYTES = 256 << 20  # of blocks kept for reuse
FRAMES = 4096  # kept


class SharedBlock:
    """`nbytes` at `addr`."""

    __slots__ = ("_frame", "addr", "array", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.array: np.ndarray[Any, Any] = np.empty(nbytes, np.uint8)
        self.addr, self.nbytes = self.array.ctypes.data, nbytes
        self._frame: zmq.Frame | None = None

    @property
    def frame(self) -> zmq.Frame:
        if self._frame is None:
            self._frame = zmq.Frame(self.array, copy=False)
        return self._frame


class Blocks:
    """The shared blocks of one endpoint."""

    def __init__(self) -> None:
        self.free: dict[int, list[SharedBlock]] = {}
        self.free_nbytes = 0
        self.frames: dict[tuple[int, int], zmq.Frame] = {}

    def take(self, nbytes: int) -> SharedBlock:
        """One to write: the pages of a large one that was used before are there already."""
        free = self.free.get(nbytes)
        if not free:
            return SharedBlock(nbytes)
        self.free_nbytes -= nbytes
        return free.pop()

    def give_back(self, block: SharedBlock) -> None:
        if self.free_nbytes + block.nbytes > POOL_NBYTES:  # of sizes that are not used any more, it may be
            self.free.clear()
            self.free_nbytes = 0
        self.free_nbytes += block.nbytes
        self.free.setdefault(block.nbytes, []).append(block)

    def frame(self, addr: int, nbytes: int) -> zmq.Frame:
        """The frame of memory that stays where it is, as that of the arena does."""
        found = self.frames.get((addr, nbytes))
        if found is None:
            if len(self.frames) >= FRAMES:
                self.frames.clear()
            found = self.frames[addr, nbytes] = zmq.Frame(bytes_at(addr, nbytes), copy=False)
        return found

    def clear(self) -> None:
        self.free.clear()
        self.frames.clear()
