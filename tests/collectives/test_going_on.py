"""How far a collective goes before those that began earlier have ended, on an endpoint that notes what it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from manygrad.collectives.algorithms import build
from manygrad.collectives.lower import lower
from manygrad.collectives.program import Collective
from manygrad.collectives.transport.endpoint import Borrowed, Ticket
from manygrad.collectives.transport.link import Incoming
from manygrad.collectives.transport.wire import MessageKey
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.exchange.exchange import Exchange
from manygrad.tensor.dtype import dtypes

RANKS, COUNT = 4, 8


class Arrivals(Mapping[int, Incoming]):
    """What has come of one peer: all but what is missing."""

    def __init__(self, peers: Peers, peer: int) -> None:
        self.peers, self.peer = peers, peer

    def __getitem__(self, number: int) -> Incoming:
        if (self.peer, number) in self.peers.missing:
            raise KeyError(number)
        return Incoming(there=1 << 30)

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError

    __len__ = None  # type: ignore[assignment]


class Peers:
    """All have sent ones; those of `near` share memory with this rank."""

    rank, arena = 0, None

    def __init__(self, near: set[int]) -> None:
        self.near, self.missing = near, set[tuple[int, int]]()
        self.noted: list[tuple[str, int, int]] = []  # what, peer, message
        self.ones = np.ones(COUNT, np.float32)

    def may_reserve(self, peer: int) -> bool:
        return peer not in self.near

    def reserve(self, peer: int, count: int) -> int:
        return 0

    expect = reserve

    def incoming(self, peer: int) -> Mapping[int, Incoming]:
        return Arrivals(self, peer)

    def shared_memory(self, peer: int) -> None:
        return None

    def send(self, peer: int, key: MessageKey, *rest: Any) -> Ticket:
        self.noted.append(("send", peer, key.chunk))
        return Ticket(peer, key.chunk, key)

    def receive(self, peer: int, key: MessageKey, *rest: Any) -> Borrowed:
        self.noted.append(("receive", peer, key.chunk))
        return Borrowed(self.ones.ctypes.data, self.ones.nbytes, lambda: None)

    def receive_into(self, peer: int, key: MessageKey, *rest: Any) -> None:
        self.noted.append(("receive", peer, key.chunk))

    def settle(self, ticket: Ticket) -> None:
        self.noted.append(("settle", ticket.peer, ticket.number))


def exchange_over(peers: Peers) -> tuple[Exchange, Buffer]:
    program = build("direct", Collective("all_reduce", RANKS, COUNT), [0])
    body = lower(program, dtypes.float32, range(RANKS), {0: "CPU:0"})
    out, given = (Buffer("CPU:0", COUNT, dtypes.float32).copyin(np.ones(COUNT, np.float32)) for _ in range(2))
    return Exchange(body.linear, [out, given], 1, peers), out  # type: ignore[arg-type]


def test_it_sums_and_sends_on_what_has_come_between_hosts() -> None:
    peers = Peers(near=set())
    exchange, out = exchange_over(peers)
    peers.missing = {(3, 0), (2, 1)}
    exchange.begin(7, 0)
    more = exchange.advance()
    assert ("send", 1, 0) in peers.noted and ("send", 1, 1) not in peers.noted
    assert more is not None and not more()
    peers.missing.remove((3, 0))
    assert more()
    more = exchange.advance()
    assert ("send", 1, 1) in peers.noted and ("receive", 2, 1) not in peers.noted
    assert list(out.copyout()[: COUNT // RANKS]) == [RANKS] * (COUNT // RANKS)
    assert more is not None and not more()
    exchange.advance()
    assert not any(what == "settle" for what, _, _ in peers.noted)
    exchange.finish()
    exchange.settle()
    assert len(peers.noted) == len(set(peers.noted)) == 3 * 2 * (RANKS - 1)


@pytest.mark.parametrize("near", [{1}, {3}, {1, 2, 3}], ids=str)
def test_messages_in_shared_memory_keep_their_order(near: set[int]) -> None:
    peers = Peers(near)
    exchange, _ = exchange_over(peers)
    exchange.begin(7, 0)
    assert exchange.advance() is None  # nor is it looked for again
    assert not any(peer in near for _, peer, _ in peers.noted), peers.noted
    exchange.finish()
    exchange.settle()
    assert len(peers.noted) == len(set(peers.noted)) == 3 * 2 * (RANKS - 1)
