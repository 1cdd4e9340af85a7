"""measure: what the slowest link between workers gives, found once when they have met, and the same on all of them.

Every worker sends to another one at the same time, as in a collective: to the nearest in rank order that some worker
reaches over ZeroMQ. The figures are rounded to powers of two, for schedules that follow from them are kept.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import numpy as np

from manygrad.collectives.transport.largest import Speaker, largest
from manygrad.collectives.transport.wire import MessageKey
from manygrad.multi.world import Link

SHORT_NBYTES, LONG_NBYTES = 256 << 10, 4 << 20
PIECE_S = 4e-3  # a message of a long transfer takes so long on its link: little of the whole, much against handling it
PIECES = 64 << 10, 2 << 20  # bytes of it, at least and at most
SHORT_S = 8e-3  # less than this says little: the longer message tells
TRIES = 4  # the fastest counts: workers that are starting keep each other from their processors
_PLAN = 0x11A9


class Peer(Speaker, Protocol):
    """The part of a worker's endpoint that measuring needs."""

    routes: dict[int, str]

    def flush(self) -> object: ...


class _Meter:
    def __init__(self, endpoint: Peer):
        self.endpoint, self.sent = endpoint, 0
        self.data = np.zeros(LONG_NBYTES, np.uint8)  # (pages that nothing writes take no memory)

    def exchange(self, distance: int, nbytes: int) -> None:
        """Sends so many bytes to the worker at `distance`, and receives as many from the one before."""
        e = self.endpoint
        self.sent += 1
        key = MessageKey(_PLAN, self.sent, 0)
        e.send((e.rank + distance) % e.size, key, self.data.ctypes.data, nbytes)
        with e.receive((e.rank - distance) % e.size, key, nbytes):
            pass
        e.flush()

    def largest(self, value: int) -> int:
        """Largest `value` of all workers."""
        self.sent += 1
        return largest(self.endpoint, MessageKey(_PLAN, self.sent, 0), (value,))[0]

    def seconds(self, distance: int, nbytes: int) -> float:
        """Best of `TRIES` runs; a run takes as long as its slowest worker: to one that begins late, what it is
        sent seems to take no time."""
        times = []
        for _ in range(TRIES):
            began = time.perf_counter()
            self.exchange(distance, nbytes)
            times.append(self.largest(int((time.perf_counter() - began) * 1e9)))
        return min(times) / 1e9


def measure(endpoint: Peer) -> Link | None:
    """None where there is nobody else. Takes 10 to 150 ms over ZeroMQ, some messages over shared memory."""
    n, rank = endpoint.size, endpoint.rank
    if n == 1:
        return None
    meter = _Meter(endpoint)
    zmq = [endpoint.routes.get(r) == "zmq" for r in range(n)]
    distance = meter.largest(next((d for d in range(1, n) if zmq[(rank + d) % n]), 0))
    if not distance:
        return Link("shm")
    latency = meter.seconds(distance, 8)
    seconds = meter.seconds(distance, SHORT_NBYTES)
    fastest = SHORT_NBYTES / seconds
    if seconds < SHORT_S:
        fastest = max(fastest, LONG_NBYTES / meter.seconds(distance, LONG_NBYTES))
    near = _neighbours(zmq, rank)
    group = near if meter.largest(near) == n - meter.largest(n - near) else 1
    rate = 2.0 ** round(math.log2(fastest))
    return Link("zmq", rate, 2.0 ** round(math.log2(latency)), group, piece_nbytes(rate))


def piece_nbytes(bytes_per_s: float) -> int:
    """How long the messages of long transfers are on such a link."""
    return min(max(1 << int(math.log2(bytes_per_s * PIECE_S)), PIECES[0]), PIECES[1])


def _neighbours(zmq: list[bool], rank: int) -> int:
    """How many workers there are in a row, this one among them, that reach each other over shared memory; 1 where the
    rows of all would not be equally long."""
    count = zmq.count(False)  # (this one has no route to itself)
    first = rank // count * count
    return count if len(zmq) % count == 0 and not any(zmq[first : first + count]) else 1
