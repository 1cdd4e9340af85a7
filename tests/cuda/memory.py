"""The memory of an emulated GPU: where an access lies is checked, and what was never written is poison."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

BASE = 0x7000_0000_0000  # of the first GPU's memory
APART = 1 << 44  # bytes from there to the next one's
SHARED_BASE = 0x1000_0000_0000  # windows of the generic address space
LOCAL_BASE = 0x2000_0000_0000
WINDOW = 0x1000_0000_0000
GUARD = 4096  # bytes between two blocks, which nobody may touch
GRAIN = 256
POISON = 0xA5  # of float32, and of most types, a strange number


class Fault(Exception):
    """What a GPU would stop for, or silently do wrong."""


WARP, BANKS, WORD = 32, 32, 4
SECTOR = 32  # bytes that memory moves at once


@dataclass
class Traffic:
    """What a kernel's accesses move: the bytes that threads ask for, and those of the sectors that each warp's access
    touches. `instructions`: of all threads. `reads`, `turns`: of shared memory by as many threads as ask for 128 bytes
    together, and in how many turns its banks serve them."""

    asked: int = 0
    moved: int = 0
    instructions: int = 0
    reads: int = 0
    turns: int = 0

    def count(self, warps: np.ndarray, offsets: np.ndarray, nbytes: int) -> None:
        first, last = offsets // SECTOR, (offsets + nbytes - 1) // SECTOR
        both = np.concatenate([np.stack([warps, first], 1), np.stack([warps, last], 1)])
        self.asked += len(offsets) * nbytes
        self.moved += len(np.unique(both, axis=0)) * SECTOR

    def count_banks(self, threads: np.ndarray, offsets: np.ndarray, nbytes: int) -> None:
        """A bank has every 32nd word, and serves one of them a turn, to any number of threads."""
        together = threads // min(WARP, 128 // nbytes)
        words = offsets[:, None] // WORD + np.arange(max(1, nbytes // WORD))
        asked = np.unique(np.stack([np.repeat(together, words.shape[1]), words.reshape(-1)], 1), axis=0)
        banks, count = np.unique(asked[:, 0] * BANKS + asked[:, 1] % BANKS, return_counts=True)
        first = np.flatnonzero(np.diff(banks // BANKS, prepend=-1))
        self.reads += len(first)
        self.turns += int(np.maximum.reduceat(count, first).sum())


class DeviceMemory:
    """Blocks in one address space, of GPU `number`. `size`: of all of it, backed when it is touched."""

    def __init__(self, size: int = 1 << 32, number: int = 0) -> None:
        self.size, self.base = size, BASE + number * APART
        self.bytes = np.zeros(size, np.uint8)  # (the system backs pages that are written)
        self.starts: list[int] = []  # offsets, in order
        self.ends: list[int] = []
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None
        self.traffic: Traffic | None = None  # where somebody counts it

    def alloc(self, nbytes: int) -> int:
        """The address of a fresh block. Raises MemoryError."""
        at = GUARD
        for start, end in zip(self.starts, self.ends):
            if start - at >= nbytes + GUARD:
                break
            at = -(-(end + GUARD) // GRAIN) * GRAIN
        if at + nbytes + GUARD > self.size:
            raise MemoryError(f"the emulated device has {self.size} bytes")
        i = bisect.bisect(self.starts, at)
        self.starts.insert(i, at)
        self.ends.insert(i, at + nbytes)
        self._sorted = None
        self.bytes[at : -(-(at + nbytes) // GRAIN) * GRAIN] = POISON
        return self.base + at

    def free(self, address: int) -> None:
        i = bisect.bisect_left(self.starts, address - self.base)
        if i == len(self.starts) or self.starts[i] != address - self.base:
            raise Fault(f"{address:#x} is no block")
        del self.starts[i], self.ends[i]
        self._sorted = None

    @property
    def used(self) -> int:
        return sum(self.ends) - sum(self.starts)

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes of a range inside one block."""
        self.check(np.array([address], np.uint64), nbytes, 1, "copy")
        at = address - self.base
        return self.bytes[at : at + nbytes]

    def check(
        self, addresses: np.ndarray, nbytes: int, alignment: int, what: str, inside: int | None = None
    ) -> np.ndarray:
        """The offsets of accesses of `nbytes` each. Raises Fault for the first that is outside, or is not aligned.

        `inside`: how many of the bytes have to lie in a block. (Of a load whose address is a multiple of its width,
        LLVM may make one that reads a little further than it needs, as all of it is in memory or nothing; what lies
        there is poison.)
        """
        if self._sorted is None:
            self._sorted = np.array(self.starts, np.int64), np.array(self.ends, np.int64)
        starts, ends = self._sorted
        offsets = addresses.astype(np.int64) - self.base
        if offsets.size == 0:
            return offsets
        block = np.searchsorted(starts, offsets, "right") - 1
        bad = block < 0
        if len(starts):
            bad |= offsets + (nbytes if inside is None else inside) > ends[np.maximum(block, 0)]
        else:
            bad |= True
        if bad.any():
            i = int(np.argmax(bad))
            raise Fault(
                f"{what}: {nbytes} bytes at {int(addresses[i]):#x}, thread {i} of those active, are in no block"
            )
        if (odd := offsets % alignment != 0).any():
            i = int(np.argmax(odd))
            raise Fault(f"{what}: address {int(addresses[i]):#x} is no multiple of {alignment}")
        return offsets


class SharedMemory:
    """Memory that the threads of each block share, and who touched which byte since the block's last barrier."""

    def __init__(self, blocks: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes = np.full((blocks, nbytes), POISON, np.uint8)
        self.writer = np.full((blocks, nbytes), -1, np.int64)
        self.reader = np.full((blocks, nbytes), -1, np.int64)  # -2: several
        self.arriving = np.zeros((blocks, nbytes), bool)  # where an asynchronous copy will write

    def barrier(self, blocks: np.ndarray) -> None:
        self.writer[blocks] = self.reader[blocks] = -1

    def offsets(self, addresses: np.ndarray, nbytes: int, alignment: int, what: str) -> np.ndarray:
        at = addresses.astype(np.int64)
        if ((at < 0) | (at + nbytes > self.nbytes)).any():
            raise Fault(f"{what}: {nbytes} bytes at {int(at.max())} of {self.nbytes} that a block shares")
        if (at % alignment).any():
            raise Fault(f"{what}: a shared address is no multiple of {alignment}")
        return at

    def read(self, at: np.ndarray, blocks: np.ndarray, threads: np.ndarray, nbytes: int) -> np.ndarray:
        """(accesses, nbytes)."""
        cells = at[:, None] + np.arange(nbytes)
        where = blocks[:, None], cells
        self.nothing_arrives(where, "reads")
        writer = self.writer[where]
        if ((writer != -1) & (writer != threads[:, None])).any():
            raise Fault("race: a thread reads shared memory that another one wrote, and no barrier lies between")
        before = self.reader[where]
        self.reader[where] = np.where((before == -1) | (before == threads[:, None]), threads[:, None], -2)
        return self.bytes[where]

    def write(self, at: np.ndarray, blocks: np.ndarray, threads: np.ndarray, data: np.ndarray) -> None:
        cells = at[:, None] + np.arange(data.shape[1])
        where = blocks[:, None], cells
        self.nothing_arrives(where, "writes")
        for seen, what in ((self.writer[where], "wrote"), (self.reader[where], "read")):
            if ((seen != -1) & (seen != threads[:, None])).any():
                raise Fault(f"race: a thread writes shared memory that another one {what}, and no barrier lies between")
        self.bytes[where] = data
        self.writer[where] = threads[:, None]
        if (self.writer[where] != threads[:, None]).any():
            raise Fault("race: two threads write to the same place of shared memory")

    def nothing_arrives(self, where: tuple[np.ndarray, np.ndarray], what: str) -> None:
        if self.arriving[where].any():
            raise Fault(f"race: a thread {what} shared memory where a copy is on its way that nobody has waited for")
