"""Frames that something between the hosts changes: sealed or not, each is dropped and counted, or a named error;
never a crash, never a wrong number.

`python -m tests.collectives.test_frames COUNT [SEED]` tries COUNT of them on each kind of link.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manygrad.collectives.transport import Endpoint, MessageKey, wire
from manygrad.collectives.transport import zmq as tcp
from manygrad.collectives.transport.link import COPIED_NBYTES, WINDOW, Frame, ZmqLink
from manygrad.collectives.transport.seal import COUNTER, TAG_NBYTES, Opener, Sealer, key_of
from manygrad.errors import CollectiveTimeout, PlanMismatch
from manygrad.tensor.environment import Context
from tests.collectives.oracle import view

Parts = list[Any]
SIZES = [0, 8, 4096, 40_000, tcp.CHUNK, tcp.CHUNK + 8]


class Wire:
    """Rank 1 sends to rank 0, over a wire that the test holds in its hands; rank 0 is a real endpoint."""

    def __init__(self, sealed: bool):
        self.end = Endpoint(0, 2, "t", 0, arena_bytes=1 << 26)
        hub = self.end._hub
        link = self.link = hub.add(1, {"addresses": [], "curve": ""})
        self.end._links[1] = link
        link.sockets = [None]  # type: ignore[list-item]  # there is nobody to connect to
        hub.connect = lambda link: None  # type: ignore[method-assign]
        hub._reply = self._told  # type: ignore[assignment, method-assign]
        hub._drain = self._deliver  # type: ignore[method-assign]
        hub.progress = lambda timeout_s: self._deliver()  # type: ignore[assignment, method-assign]
        self.sealer: Sealer | None = None
        if sealed:
            key = random.Random(1).randbytes(32)
            self.sealer, link.opener = Sealer(key), Opener(key)
        self.number = 0
        self.waiting: list[Parts] = []

    def _told(self, link: ZmqLink, kind: int) -> None:
        link.told = link.taken + WINDOW
        link.session.owed = 0

    def _deliver(self) -> bool:
        for parts in self.waiting:
            if not self.end._hub.take("1", [memoryview(p) if isinstance(p, bytearray) else p for p in parts]):
                self.end._hub.dropped += 1
        came, self.waiting = bool(self.waiting), []
        return came

    def frames(self, data: bytes, chunk: int) -> list[Parts]:
        """What rank 1 sends for one message."""
        found: list[Parts] = []
        for offset in range(0, max(len(data), 1), tcp.CHUNK):
            part = data[offset : offset + tcp.CHUNK]
            h = wire.Header(
                wire.DATA, self.end._job, 0, 1, 7, 0, chunk, wire.RAW, self.number, len(data), offset, len(part)
            )
            head, payload = wire.pack(h), bytearray(part)
            if self.sealer is not None:
                head += self.sealer.next()
                payload = bytearray(len(part) + TAG_NBYTES)
                self.sealer.seal(head, part, payload)
            found.append([bytearray(head), payload])
        self.number += 1
        return found

    @property
    def refused(self) -> int:
        """Frames dropped so far, and those that wait to be opened with a message to come."""
        waiting = sum(len(m.frames) for m in self.link.incoming.values())
        return self.end._hub.dropped + self.link.forged + self.link.repeated + waiting

    def close(self) -> None:
        self.link.sockets = []
        self.end.abort("the test is over")
        self.end.close()


def mutate(rng: random.Random, frames: list[Parts], before: list[Parts], sealed: bool) -> tuple[list[Parts], bool]:
    """What arrives instead of `frames`, and whether all of it is still among it. `before`: frames recorded earlier.

    On a plain link the payload's bytes are TCP's to guard: there only headers are changed, lengths, order and number.
    """
    frames, kind = [[bytearray(p) for p in f] for f in frames], rng.randrange(8)
    victim = rng.choice(frames)
    if kind == 0:  # bits
        part = victim[0] if not sealed or (rng.random() < 0.5 or not victim[1]) else victim[1]
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
        return frames, False
    if kind == 1:  # shorter or longer
        part = rng.choice(victim)
        if part and rng.random() < 0.7:
            del part[rng.randrange(len(part)) :]
        else:
            part += rng.randbytes(rng.randrange(1, 40))
        return frames, False
    if kind == 2:  # twice
        return [x for f in frames for x in (f, [bytearray(p) for p in f])], True
    if kind == 3:  # in another order
        rng.shuffle(frames)
        return frames, True
    if kind == 4:  # once more, later
        return [*([bytearray(p) for p in f] for f in rng.sample(before, min(3, len(before)))), *frames], True
    if kind == 5:  # made up
        forged = [bytearray(rng.randbytes(rng.randrange(0, 200))) for _ in range(rng.randrange(0, 4))]
        return [forged, *frames], True
    if kind == 6:  # a header that is right, and another's payload
        if not sealed:
            return frames, True
        return [[bytearray(victim[0]), bytearray(rng.randbytes(len(victim[1])))], *frames], True
    # headers and payloads of two frames changed for each other, and the true ones after them
    if not sealed or not before:
        return frames, True
    other = rng.choice(before)
    return [[bytearray(victim[0]), bytearray(other[1])], [bytearray(other[0]), bytearray(victim[1])], *frames], True


def attack(count: int, seed: int, sealed: bool) -> dict[str, int]:
    """So many messages with changed frames; how each ended."""
    rng, ended = random.Random(seed), dict.fromkeys(("right", "dropped", "timeout", "mismatch", "lost"), 0)
    pool = np.random.default_rng(seed).integers(0, 256, 2 * tcp.CHUNK, dtype=np.uint8).tobytes()
    line, before = Wire(sealed), list[Parts]()
    try:
        with Context(COLLECTIVE_TIMEOUT_S=0.0):
            for i in range(count):
                size = rng.choices(SIZES, [2, 30, 30, 30, 1, 1])[0]
                at = rng.randrange(len(pool) - size + 1)
                data = pool[at : at + size]
                frames = line.frames(data, i & 0xFFFF)
                line.waiting, whole = mutate(rng, frames, before, sealed)
                before = [*before[-20:], *([bytearray(p) for p in f] for f in frames if size < 1 << 17)]
                refused, into = line.refused, rng.random() < 0.5
                place = np.zeros(size + 8, np.uint8)
                try:
                    if into:
                        addr = place.ctypes.data
                        line.end.receive_into(1, MessageKey(7, 0, i & 0xFFFF), addr, size)
                        got = place[:size].tobytes()
                    else:
                        with line.end.receive(1, MessageKey(7, 0, i & 0xFFFF), size) as b:
                            got = view(b.addr, size, "uint8").tobytes()
                    assert got == data, f"a wrong number: message {i} of seed {seed}"
                    ended["right"] += 1
                    ended["dropped"] += line.refused > refused
                except CollectiveTimeout:
                    assert not whole, f"message {i} of seed {seed} had arrived"
                    assert line.refused > refused, f"message {i} of seed {seed}: nothing was counted"
                    ended["timeout"] += 1
                except PlanMismatch:
                    assert not sealed and not whole
                    ended["mismatch"] += 1
                if line.link.connections.lost_at or rng.random() < 0.001 or line.link.session.in_number != line.number:
                    ended["lost"] += bool(line.link.connections.lost_at)
                    line.close()
                    line, before = Wire(sealed), []
                elif not whole:  # what did not come is not sent again here: the next message is expected
                    line.link.incoming.clear()
                    line.link.session.whole_below, line.link.session.whole = line.number, {}
                    line.link.arrived = line.link.taken
    finally:
        line.close()
    return ended


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "plain"])
def test_changed_frames_are_dropped_or_named(sealed: bool) -> None:
    ended = attack(1500, 5, sealed)
    assert ended["right"] > 500 and ended["dropped"] > 100 and ended["timeout"] > 50, ended


def test_a_frame_opens_only_as_what_it_was_sealed_as() -> None:
    key = bytes(range(32))
    sealer, opener, payload = Sealer(key), Opener(key), b"8 bytes!"
    head, sealed = b"header" + sealer.next(), bytearray(8 + TAG_NBYTES)
    sealer.seal(head, payload, sealed)
    into = bytearray(8)
    assert opener.open(head, sealed, into) and into == payload
    assert not Opener(bytes(32)).open(head, sealed, into)
    for i in range(len(head) * 8):
        wrong = bytearray(head)
        wrong[i // 8] ^= 1 << i % 8
        assert not opener.open(bytes(wrong), sealed, into)
    for wrong in (sealed[:-1], sealed + b"x", b"", sealed[::-1]):
        assert not opener.open(head, bytes(wrong), into)
    assert not opener.open(b"", sealed, into)
    assert len({sealer.next() for _ in range(1000)}) == 1000 and len(head) == 6 + COUNTER.size


def test_both_ends_derive_the_same_keys_and_no_two_directions_do() -> None:
    import zmq
    from zmq.utils import z85

    pairs = [tuple(map(z85.decode, zmq.curve_keypair())) for _ in range(3)]  # (public, secret)
    keys = set()
    for source in range(3):
        for target in range(3):
            if source != target:
                (a, secret_a), (b, secret_b) = pairs[source], pairs[target]
                key = key_of(secret_a, b, 5, 0, source, target)
                assert key == key_of(secret_b, a, 5, 0, source, target) and len(key) == 32
                keys |= {key, key_of(secret_a, b, 5, 1, source, target), key_of(secret_a, b, 6, 0, source, target)}
    assert len(keys) == 18


def main(count: int, seed: int) -> None:
    for sealed in (True, False):
        began, total = time.monotonic(), dict[str, int]()
        for s in range(seed, seed + -(-count // 10_000)):
            for k, n in attack(min(count, 10_000), s, sealed).items():
                total[k] = total.get(k, 0) + n
        print("sealed" if sealed else "plain", total, f"{time.monotonic() - began:.0f} s", flush=True)


def test_what_came_before_a_message_of_a_lower_number_is_told_when_that_one_has_come() -> None:
    """Between hosts a collective sends first what it has, before the one before it has sent all. Its sender waits for
    the receipt; it was forgotten where the message between was short, for which nobody waits. And nothing is told
    twice: each look at the links told it again while a message was missing, a hundred times a message."""
    told: list[int] = []
    hub: Any = SimpleNamespace(epoch=0, control=SimpleNamespace(send_multipart=lambda parts, how: None))
    hub._control = lambda kind, number=0, value=0: told.append(number) or wire.Header(*[0] * 12)
    hub._reply = partial(tcp.ZmqHub._reply, hub)
    link = ZmqLink(1, {"addresses": [], "curve": ""})
    s = link.session

    def come(number: int, nbytes: int) -> None:
        link.session.in_number = number + 1
        header = wire.Header(wire.DATA, 0, 0, 1, 0, 0, 0, wire.RAW, number, nbytes, 0, nbytes)
        assert link.take(Frame(header, None, memoryview(bytearray(nbytes))))
        del link.incoming[number]
        for everything in (False, True, False):
            tcp.ZmqHub.pay(hub, link, everything)

    come(0, COPIED_NBYTES + 1)
    for number in range(2, 40):
        come(number, COPIED_NBYTES + 1)
    come(1, 8)
    assert told == [1, 40] and not s.owed and not s.owed_nbytes and not s.urgent


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
