"""Asynchronous copies into shared memory (cp.async), as late as they may happen: when a thread waits for them.

From its start until then nobody may touch the place that a copy goes to, and nobody but the thread that waited until a
barrier after that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.cuda.memory import DeviceMemory, Fault, SharedMemory


@dataclass
class Started:
    """A copy of each of some threads. `group`: which of the thread's sets it is in; `nbytes`: of each, of which the
    first `read` are read and the others zeros."""

    threads: np.ndarray
    blocks: np.ndarray
    to: np.ndarray
    source: np.ndarray  # addresses
    read: np.ndarray
    nbytes: int
    group: np.ndarray

    def part(self, chosen: np.ndarray) -> Started:
        mine = (self.threads, self.blocks, self.to, self.source, self.read)
        return Started(*(a[chosen] for a in mine), self.nbytes, self.group[chosen])


class AsynchronousCopies:
    """Those of some blocks of a launch, of `count` threads."""

    def __init__(self, shared: SharedMemory, memory: DeviceMemory, count: int) -> None:
        self.shared, self.memory = shared, memory
        self.started: list[Started] = []
        self.committed = np.zeros(count, np.int64)  # sets of each thread

    def start(
        self, threads: np.ndarray, blocks: np.ndarray, to: np.ndarray, source: np.ndarray, read: np.ndarray,
        nbytes: int, what: str,
    ) -> None:  # fmt: skip
        """Raises Fault where an address is wrong, or the place is still in use."""
        at = self.shared.offsets(to, nbytes, nbytes, what)
        self.memory.check(source[read > 0], nbytes, nbytes, what)
        nothing = np.full((len(threads), nbytes), 0xA5, np.uint8)
        self.shared.write(at, blocks, threads, nothing)
        self.shared.arriving[blocks[:, None], at[:, None] + np.arange(nbytes)] = True
        self.started.append(Started(threads, blocks, at, source, read, nbytes, self.committed[threads].copy()))

    def commit(self, threads: np.ndarray) -> None:
        self.committed[threads] += 1

    def wait(self, threads: np.ndarray, pending: int) -> None:
        """All sets of these threads arrive but the last so many."""
        waits = np.zeros(len(self.committed), bool)
        waits[threads] = True
        left = []
        for one in self.started:
            done = waits[one.threads] & (one.group < self.committed[one.threads] - pending)
            self._arrive(one.part(done))
            if not done.all():
                left.append(one.part(~done))
        self.started = left

    def _arrive(self, one: Started) -> None:
        places = np.arange(one.nbytes)
        data = np.zeros((len(one.threads), one.nbytes), np.uint8)
        some = one.read > 0
        offsets = self.memory.check(one.source[some], one.nbytes, one.nbytes, "cp.async")
        data[some] = self.memory.bytes[offsets[:, None] + places]
        data[places >= one.read[:, None]] = 0
        self.shared.arriving[one.blocks[:, None], one.to[:, None] + places] = False
        self.shared.writer[one.blocks[:, None], one.to[:, None] + places] = -1  # (a barrier may lie before: new again)
        self.shared.write(one.to, one.blocks, one.threads, data)

    def none_left(self, threads: np.ndarray) -> None:
        """Raises Fault for a copy of threads that have ended which nobody waited for."""
        if any(np.isin(one.threads, threads).any() for one in self.started):
            raise Fault("a thread ends while a copy is on its way that nobody has waited for")
