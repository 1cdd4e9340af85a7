"""A socket whose connection breaks is made anew: nothing lost, nothing twice,
and a peer that is gone is still named soon."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from manygrad.collectives.transport import Endpoint, MessageKey
from manygrad.collectives.transport import zmq as tcp
from manygrad.errors import PeerLost
from manygrad.native.memory import copy
from manygrad.tensor.environment import Context
from tests.hosts import Hosts
from tests.proxy import Proxy

from collective_workers import Worker, run_workers  # isort: skip
from tests.collectives.oracle import view

from test_endpoint import on, results, two_hosts  # noqa: F401 isort: skip


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Endpoint], list[Proxy]]]:
    """Two connected endpoints of this process with a proxy in front of every listener;
    their links as on loopback, or as between hosts."""
    if request.param:
        monkeypatch.setattr(tcp, "is_loopback", lambda host: False)
    ends = [Endpoint(r, 2, "t", 0, arena_bytes=1 << 28) for r in range(2)]
    cards = [e.card() for e in ends]
    proxies = []
    for card in cards:
        mine = [Proxy(a) for a in card["addresses"]]
        card["addresses"] = [p.address for p in mine]
        proxies += mine
    with Context(TRANSPORT="zmq"):
        other = threading.Thread(target=ends[1].connect, args=(cards, 10))
        other.start()
        ends[0].connect(cards, 10)
        other.join()
    yield ends, proxies
    for e in ends:
        e.abort("the test is over")
        e.close()
    for p in proxies:
        if not p.ended:
            p.stop()


def talk(end: Endpoint, seed: int, rounds: int, failures: list[BaseException], ended: list[int]) -> None:
    """Messages of random sizes both ways, several in flight, from and outside of the arena;
    checks every byte received."""
    sizes = np.random.default_rng(seed).choice([0, 8, 4096, 100_000, 5_000_000], rounds, p=[0.1, 0.3, 0.3, 0.2, 0.1])
    peer = 1 - end.rank

    def values(rank: int, i: int) -> np.ndarray[Any, Any]:
        return ((np.arange(sizes[i] // 8, dtype=np.int64) * (i + 1)) ^ rank).view(np.uint8)

    try:
        for first in range(0, rounds, 4):
            several = range(first, min(first + 4, rounds))
            kept = []
            for i in several:
                data = values(end.rank, i)
                if i % 2:
                    addr = end.arena.addr(end.arena.alloc(max(8, data.nbytes)))
                    copy(addr, data.ctypes.data, data.nbytes)
                    kept.append(addr)
                else:
                    kept.append(data)
                    addr = data.ctypes.data
                end.send(peer, MessageKey(1, i, 0), addr, data.nbytes)
            for i in several:
                with end.receive(peer, MessageKey(1, i, 0), int(sizes[i])) as got:
                    assert (view(got.addr, int(sizes[i]), "uint8") == values(peer, i)).all(), i
            end.flush()
            for i, k in zip(several, kept):  # what is sent again later is still what it was
                view(k if isinstance(k, int) else k.ctypes.data, int(sizes[i]), "uint8")[:] = 0xEE
                if isinstance(k, int):
                    end.arena.free(k - end.arena.base)
        end._hub.pay_all()  # (as `close` does: nobody waits for the receipt of a message that was copied)
        while end._hub.links[peer].session.kept and not failures:
            end._hub.progress(0.01)
    except BaseException as e:
        failures.append(e)
    ended.append(end.rank)
    while len(ended) < 2 and not failures:  # the other may have been cut off from the word that its last has arrived
        end.keep_going()
        time.sleep(0.01)


@pytest.mark.parametrize("seed", range(2))
def test_connections_are_cut_again_and_again(pair: tuple[list[Endpoint], list[Proxy]], seed: int) -> None:
    ends, proxies = pair
    failures, ended = list[BaseException](), list[int]()
    threads = [threading.Thread(target=talk, args=(e, seed, 240, failures, ended)) for e in ends]
    rng, cuts = random.Random(seed), 0
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        time.sleep(rng.uniform(0.02, 0.3) * (1 + cuts / 100))  # (a busy machine needs longer for the largest message)
        rng.choice(proxies).cut()
        cuts += 1
        assert cuts < 1000, "they do not get on"
    assert not failures, failures
    assert cuts > 3
    for e in ends:
        link = e._hub.links[1 - e.rank]
        s = link.session
        assert not link.incoming and not s.kept and s.whole_below == s.in_number >= 240 and not s.whole
        assert not link.forged and (link.opener is not None) == e._hub.sealed


@pytest.mark.parametrize("pair", [True], ids=["sealed"], indirect=True)
def test_bits_that_turn_over_on_the_way_are_sent_again(pair: tuple[list[Endpoint], list[Proxy]]) -> None:
    """In heads, payloads, tags and what ZeroMQ has around them."""
    ends, proxies = pair
    failures, ended = list[BaseException](), list[int]()
    threads = [threading.Thread(target=talk, args=(e, 3, 240, failures, ended)) for e in ends]
    rng = random.Random(3)
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        time.sleep(rng.uniform(0.01, 0.1))
        rng.choice(proxies).flip(rng.randrange(1 << 19))
    assert not failures, failures
    assert sum(p.flipped for p in proxies) > 3 and sum(e._hub.links[1 - e.rank].refused for e in ends) > 0


@pytest.mark.parametrize("pair", [True], ids=["sealed"], indirect=True)
def test_a_link_that_changes_all_frames_is_named(
    pair: tuple[list[Endpoint], list[Proxy]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, _ = pair
    monkeypatch.setattr(ends[0]._hub.links[1].opener, "open", lambda *frame: False)
    data = np.ones(100_000, np.uint8)
    ends[1].send(0, MessageKey(1, 0, 0), data.ctypes.data, data.nbytes)
    going_on = threading.Thread(target=lambda: [ends[1]._hub.progress(0.01) for _ in range(500)])
    going_on.start()
    with pytest.raises(PeerLost, match="frames in its name did not open: something between the hosts changes them"):
        ends[0].receive(1, MessageKey(1, 0, 0), data.nbytes)
    going_on.join()


def test_memory_of_others_is_not_read_after_the_call(pair: tuple[list[Endpoint], list[Proxy]]) -> None:
    """Also where nothing can be handed to ZeroMQ yet: whoever called may have lost it by an error."""
    ends, _ = pair
    sizes = [5_000_000, 8, 100_000, 0]
    link = ends[0]._hub.links[1]
    link.granted = 0  # nothing may go out
    for i, nbytes in enumerate(sizes):
        data = np.full(nbytes, 7, np.uint8)
        ends[0].send(1, MessageKey(1, i, 0), data.ctypes.data, nbytes)
        data[:] = 9
    assert link.queue
    link.granted = 64 << 20
    ends[0]._hub.push(link)
    for i, nbytes in enumerate(sizes):
        other = threading.Thread(target=ends[0]._hub.progress, args=(0.2,))  # the rest goes out
        other.start()
        with ends[1].receive(0, MessageKey(1, i, 0), nbytes) as got:
            assert (view(got.addr, nbytes, "uint8") == 7).all()
        other.join()


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_what_is_sealed_may_be_written_before_it_has_arrived(pair: tuple[list[Endpoint], list[Proxy]]) -> None:
    ends, proxies = pair
    nbytes = 3 << 20  # (two frames, one on each socket)
    addr = ends[0].arena.addr(ends[0].arena.alloc(nbytes))
    view(addr, nbytes, "uint8")[:] = 7
    ticket = ends[0].send(1, MessageKey(1, 0, 0), addr, nbytes)
    ends[0].settle(ticket)  # (nobody receives yet)
    assert ends[0]._hub.links[1].session.kept
    view(addr, nbytes, "uint8")[:] = 9
    for p in proxies:
        p.cut()
    other = threading.Thread(target=lambda: ends[0].receive(1, MessageKey(1, 1, 0), 8).release())
    other.start()  # its waits have the frames sent again
    with ends[1].receive(0, MessageKey(1, 0, 0), nbytes) as got:
        assert (view(got.addr, nbytes, "uint8") == 7).all()
    ends[1].send(0, MessageKey(1, 1, 0), addr, 8)
    end = time.monotonic() + 20
    while other.is_alive():
        ends[1]._hub.progress(0.01)
        assert time.monotonic() < end


def test_what_a_rank_sent_last_is_sent_again_after_its_end(pair: tuple[list[Endpoint], list[Proxy]]) -> None:
    """It waits for nothing any more: its script has ended, and others still read."""
    ends, proxies = pair
    nbytes, count = 200_000, 20
    data, over = np.full(nbytes, 7, np.uint8), threading.Event()

    def at_the_end() -> None:
        while not over.wait(0.01):
            ends[0].keep_going()

    ended = threading.Thread(target=at_the_end)
    for i in range(count):
        ends[0].send(1, MessageKey(1, i, 0), data.ctypes.data, nbytes)
    for p in proxies:
        p.cut()
    ended.start()
    try:
        for i in range(count):
            with ends[1].receive(0, MessageKey(1, i, 0), nbytes) as got:
                assert (view(got.addr, nbytes, "uint8") == 7).all(), i
    finally:
        over.set()
        ended.join()


def test_a_wait_says_for_whom_and_since_when(pair: tuple[list[Endpoint], list[Proxy]]) -> None:
    ends, _ = pair
    ends[1].describe = lambda plan: f"line {plan}"
    assert ends[1].waiting() is None
    other = threading.Thread(target=lambda: ends[1].receive(0, MessageKey(5, 0, 0), 8).release())
    other.start()
    until = time.monotonic() + 20
    while (found := ends[1].waiting()) is None or found[1] < 0.2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert found[0] == 0 and found[2] == "line 5"
    data = np.zeros(8, np.uint8)
    ends[0].send(1, MessageKey(5, 0, 0), data.ctypes.data, 8)
    while other.is_alive():
        ends[0].keep_going()
        time.sleep(0.01)
        assert time.monotonic() < until
    assert ends[1].waiting() is None


def test_a_peer_whose_listener_is_gone_is_lost_soon(pair: tuple[list[Endpoint], list[Proxy]]) -> None:
    ends, proxies = pair
    for p in proxies[2:]:
        p.stop()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="nothing listens at"):
        ends[0].receive(1, MessageKey(1, 0, 0), 8)
    assert time.monotonic() - began < 2


def test_an_outage_of_two_seconds(two_hosts: Hosts) -> None:  # noqa: F811
    """The link between two hosts goes down and comes back in the middle of a conversation."""

    def outage(workers: list[Worker]) -> None:
        for _ in range(2):
            time.sleep(0.7)
            two_hosts.down(1)
            time.sleep(2)
            two_hosts.up(1)

    options = {"after_start": outage, **on(two_hosts)}
    found = run_workers(2, "talk_for", (9.0, 300_000), {"TRANSPORT": "zmq"}, timeout_s=60, **options)
    assert all(right == asked > 0 for right, asked in results(found))
