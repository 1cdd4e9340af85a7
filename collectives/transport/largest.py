"""largest: of a few numbers that every worker says, the largest of all.

In round k a worker tells what it has heard to the one 2^k after it: after ceil(log2 size) messages each has heard of
everyone (Hensgen, Finkel, Manber: Two algorithms for barrier synchronization, 1988).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from manygrad.collectives.transport.wire import MessageKey


class Heard(Protocol):
    @property
    def addr(self) -> int: ...


class Speaker(Protocol):
    """The part of a worker's endpoint that this needs."""

    rank: int
    size: int

    def send(self, peer: int, key: MessageKey, addr: int, nbytes: int) -> Any: ...
    def receive(self, peer: int, key: MessageKey, nbytes: int) -> AbstractContextManager[Heard]: ...
    def settle(self, ticket: Any) -> None: ...


def largest(endpoint: Speaker, key: MessageKey, words: Sequence[int]) -> tuple[int, ...]:
    """The largest of each word over all workers. Every worker must say as many, as the same `key`, which is not used
    twice. Raises the endpoint's errors."""
    found, distance = np.array(words, np.int64), 1
    while distance < endpoint.size:
        this = key._replace(chunk=distance)
        ticket = endpoint.send((endpoint.rank + distance) % endpoint.size, this, found.ctypes.data, found.nbytes)
        with endpoint.receive((endpoint.rank - distance) % endpoint.size, this, found.nbytes) as got:
            heard = np.frombuffer(ctypes.string_at(got.addr, found.nbytes), np.int64)
        endpoint.settle(ticket)
        found, distance = np.maximum(found, heard), 2 * distance
    return tuple(found.tolist())
