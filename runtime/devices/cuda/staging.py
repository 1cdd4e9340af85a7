"""Copies between the host and a GPU, by way of memory of the host that the GPU reaches by itself.

What comes from the host is copied into such pinned memory and from there by the GPU, in the order of its stream, while
the host goes on; what goes to the host comes in pieces, of which the next is under way while one is copied out. The
pieces take turns, each with an event that says when the GPU is done with it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from manygrad.runtime.devices.cuda.driver import Gpu, checked

PIECE_BYTES = 4 << 20
SMALL_BYTES = 64 << 10  # what most copies take: a batch of tokens, a loss
PIECES = 4


class PinnedPiece:
    """Pinned memory, and the event after which it is free."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        own = gpu.enter()
        self.gpu, what = gpu, f"{nbytes} bytes of pinned memory of the host"
        self.address = int(checked(own.cuMemHostAlloc(nbytes, 0), what))
        self.event = checked(own.cuEventCreate(own.CUevent_flags.CU_EVENT_DISABLE_TIMING), what)

    def __del__(self, ended: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "event") and not ended():
            own = self.gpu.enter()
            own.cuEventDestroy(self.event)
            own.cuMemFreeHost(self.address)


class Staging:
    """The pinned memory of a stream with this `handle`; `wait(ask)` waits for it."""

    def __init__(self, gpu: Gpu, handle: Any, name: str, wait: Callable[[Callable[[], Any]], None]) -> None:
        self.gpu, self.handle, self.name, self._wait = gpu, handle, name, wait
        self._pieces: dict[int, list[PinnedPiece]] = {SMALL_BYTES: [], PIECE_BYTES: []}  # by size, the next one first
        self._lock = threading.RLock()

    def up(self, to: int, source: int, nbytes: int) -> None:
        """Copies from the host. The source may change when this returns; the data is there for what comes next in the
        stream."""
        own = self.gpu.enter()
        with self._lock:
            for at, count in _cut(nbytes):
                piece = self._next(count)
                ctypes.memmove(piece.address, source + at, count)
                self._started(piece, own.cuMemcpyHtoDAsync(to + at, piece.address, count, self.handle))

    def down(self, to: int, source: int, nbytes: int) -> None:
        """Copies to the host, when all that was started has ended."""
        own = self.gpu.enter()
        with self._lock:
            coming: list[tuple[PinnedPiece, int, int]] = []
            for at, count in _cut(nbytes):
                if len(coming) == PIECES:
                    self._arrive(to, *coming.pop(0))
                piece = self._next(count)
                self._started(piece, own.cuMemcpyDtoHAsync(piece.address, source + at, count, self.handle))
                coming.append((piece, at, count))
            for arriving in coming:
                self._arrive(to, *arriving)

    def _next(self, nbytes: int) -> PinnedPiece:
        """A piece that is free, after a wait for it perhaps."""
        size = SMALL_BYTES if nbytes <= SMALL_BYTES else PIECE_BYTES
        pieces = self._pieces[size]
        if len(pieces) < PIECES:
            pieces.append(PinnedPiece(self.gpu, size))
        else:
            pieces.append(pieces.pop(0))
            self._wait_for(pieces[-1])
        return pieces[-1]

    def _started(self, piece: PinnedPiece, answer: tuple[Any, ...]) -> None:
        checked(answer, self.name)
        checked(self.gpu.enter().cuEventRecord(piece.event, self.handle), self.name)

    def _wait_for(self, piece: PinnedPiece) -> None:
        own = self.gpu.enter()
        self._wait(lambda: own.cuEventQuery(piece.event))

    def _arrive(self, to: int, piece: PinnedPiece, at: int, count: int) -> None:
        self._wait_for(piece)
        ctypes.memmove(to + at, piece.address, count)


def _cut(nbytes: int) -> Iterator[tuple[int, int]]:
    for at in range(0, nbytes, PIECE_BYTES):
        yield at, min(PIECE_BYTES, nbytes - at)
