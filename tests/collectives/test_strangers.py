"""Strangers on loopback: who knows the job's name, the addresses and a rank's name, but no password of the run,
is not heard."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextvars import copy_context

import numpy as np
import pytest
import zmq

from manygrad.collectives.transport import Endpoint, MessageKey, wire
from manygrad.collectives.transport.zap import password
from manygrad.collectives.transport.zmq import _IDENTITY
from manygrad.tensor.environment import Context
from tests.collectives.oracle import view


@pytest.fixture
def pair() -> Iterator[list[Endpoint]]:
    ends = [Endpoint(r, 3, "t", 0, arena_bytes=1 << 24) for r in range(3)]
    cards = [e.card() for e in ends]
    with Context(TRANSPORT="zmq"):
        threads = [threading.Thread(target=copy_context().run, args=(e.connect, cards, 10)) for e in ends]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    yield ends
    for e in ends:
        e.abort("the test is over")
        e.close()


def pose(end: Endpoint, socket: int, name: int, mechanism: str, secret: bytes = b"") -> zmq.Socket[bytes]:
    """Connects to a socket of `end` as rank `name` and sends what would end the job if it were believed:
    a message of another plan."""
    s: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH if socket else zmq.DEALER)
    s.linger = 0
    if not socket:
        s.routing_id = _IDENTITY.pack(b"m", name, 0, 0)
    if mechanism == "plain":
        s.plain_username, s.plain_password = b"%d" % name, secret
    elif mechanism == "curve":
        s.curve_serverkey = end._hub.public
        s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
    s.connect(end.card()["addresses"][socket])
    header = wire.Header(wire.DATA, wire.job_hash("t"), 0, name, 666, 0, 0, wire.RAW, 0, 8, 0, 8)
    s.send_multipart([wire.pack(header), b"8 bytes!"])
    return s


@pytest.mark.parametrize("socket", [0, 1])
@pytest.mark.parametrize("how", ["null", "a wrong password", "curve", "rank 2's own password"])
def test_who_poses_as_rank_1_is_not_heard(pair: list[Endpoint], how: str, socket: int) -> None:
    a, b, _ = pair
    secrets = {"a wrong password": b"0" * 64, "rank 2's own password": password(a._hub.token, 2, 0)}
    stranger = pose(a, socket, 1, {"null": "null", "curve": "curve"}.get(how, "plain"), secrets.get(how, b""))
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        for e in pair:
            e._hub.progress(0.01)
    stranger.close()
    assert not a._hub.links[1].incoming
    # it was let in, as rank 2; nothing that it says in another's name counts
    if secrets.get(how) == password(a._hub.token, 2, 0):
        assert a._hub.dropped > 0
        return
    assert a._hub.dropped == 0
    data = np.arange(3.0)
    b.send(0, MessageKey(1, 0, 0), data.ctypes.data, 24, "float64")
    with a.receive(1, MessageKey(1, 0, 0), 24, "float64") as got:
        assert (view(got.addr, 3, "float64") == data).all()
    assert a._hub.links[1].lost() is None and b._hub.links[0].lost() is None


def test_a_password_says_who_and_to_whom() -> None:
    token = bytes(16)
    assert len({password(token, a, b) for a in range(4) for b in range(4)} | {password(bytes(15) + b"1", 0, 1)}) == 17
