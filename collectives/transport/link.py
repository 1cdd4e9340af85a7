"""State of the link to one peer over ZeroMQ: messages on their way out and in, grants and arrivals."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from manygrad.collectives.transport import wire
from manygrad.collectives.transport.blocks import SharedBlock
from manygrad.collectives.transport.connections import PeerConnections
from manygrad.collectives.transport.seal import Opener, Sealer
from manygrad.session import Session

WINDOW = 64 << 20
COPIES_NBYTES = 16 << 20  # of copies and sealed frames on their way, until one waits for their arrival
# A message up to here is copied, which takes less time than to tell when its memory is free again
COPIED_NBYTES = 256 << 10
EAGER_NBYTES = 16 << 10  # a sealed frame up to here is opened when it comes, as its place is soon copied to


@dataclass(slots=True)
class Outgoing:
    """A message until it has arrived, as it may have to be sent again. `copy`: of its memory, if one was made."""

    header: wire.Header
    addr: int
    copy: SharedBlock | None
    offset: int = 0  # up to here it was handed to ZeroMQ
    handed: bool = False  # all of it
    sealed: dict[int, tuple[bytes, SharedBlock]] = field(
        default_factory=dict
    )  # its sealed frames, by offset: head, the rest
    kept_nbytes: int = 0  # of copy and sealed frames


@dataclass(slots=True)
class Frame:
    """A frame that has come. `head`: header and counter of one that is still sealed, else None."""

    header: wire.Header
    head: Any
    payload: Any


@dataclass(slots=True)
class Incoming:
    """A message on its way in: by offset the frames not yet looked at, those that were, how many bytes are sure, and
    how many have come."""

    frames: dict[int, Frame] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    arrived: int = 0
    there: int = 0


class ZmqLink:
    """Both directions between this rank and one peer. Large: sockets, a session, credits."""

    route = "zmq"

    def __init__(self, peer: int, card: dict[str, Any], epoch: int = 0):
        self.peer, self.card = peer, card
        # numbers, what has not arrived, and what has come
        self.session: Session[Outgoing] = Session(epoch)
        self.sockets: list[zmq.Socket[bytes]] = []  # control, then data
        self.monitors: list[zmq.Socket[bytes]] = []
        self.sealer: Sealer | None = None
        self.opener: Opener | None = None
        # (number, message), a heap: not all handed to ZeroMQ yet. What earlier collectives send goes before what later
        # ones have sent ahead
        self.queue: list[tuple[int, Outgoing]] = []
        # frames (message, offset) that a broken socket may have swallowed
        self.again: deque[tuple[Outgoing, int]] = deque()
        self.kept_nbytes = 0  # of copies and sealed frames of messages that have not arrived yet
        self.sent, self.granted = 0, WINDOW  # cumulative bytes out, and how many the peer allows
        self.taken, self.told, self.arrived = 0, WINDOW, 0  # cumulative bytes asked for, granted, and come in
        self.incoming: dict[int, Incoming] = {}
        self.asking = set[int]()  # numbers of messages that are waited for
        self.heard = 0  # counts what came from the peer
        self.forged = 0  # frames in its name that did not open
        self.refused = 0  # frames that were asked for again, as they were not as the peer sends them
        self.repeated = 0  # frames that had come before
        self.hellos = set[int]()  # sockets on which the peer has said hello
        self.hello_in = self.hello_back = False
        self.connections = PeerConnections(card["addresses"])
        self.blocked: zmq.Socket[bytes] | None = None  # the socket at its high-water mark

    def must_wait(self, number: int) -> bool:
        """Whether the memory of a message sent must stay as it is. Also where it was copied or sealed, but nobody else
        would see to its going out, or too many copies are on their way."""
        message = self.session.kept.get(number)
        if message is None:
            return False
        copied = message.handed and (message.copy is not None or self.sealer is not None)
        return not copied or bool(self.connections.down) or self.kept_nbytes > COPIES_NBYTES

    def lost(self) -> str | None:
        """How it is known that the peer is lost, a moment after that; None while it is not."""
        return self.connections.lost()

    def take(self, frame: Frame) -> bool:
        """Keeps a frame until its message is asked for; False where it is of no use (dropped, and counted by whoever
        calls), or where it broke the rules and the link is lost."""
        h = frame.header
        if self.session.has(h.number):
            self.session.repeat()
            self.session.urgent = True
            self.repeated += 1
            return True
        message = self.incoming.setdefault(h.number, Incoming())
        there = message.frames.get(h.offset)
        if h.offset in message.seen or (there is not None and self.open(frame=there, message=message)):
            self.repeated += 1
            return True
        if self.arrived + h.length > self.told:
            if not self._genuine(frame):
                return False
            self.connections.lose(f"it sent {self.arrived + h.length} bytes, but was granted {self.told}")
            return True
        self.arrived += h.length
        message.there += h.length
        message.frames[h.offset] = frame
        if frame.head is None:
            self._sure(message, h)
            return True
        return h.length > EAGER_NBYTES or self.open(frame, message)

    def open(self, frame: Frame, message: Incoming, place: Any = None) -> bool:
        """Opens a kept frame, in its own memory or into `place`; False, and it is forgotten, where it is forged."""
        if frame.head is None:
            if place is not None:
                place[:] = np.frombuffer(frame.payload, np.uint8)
            return True
        h, head = frame.header, frame.head
        into = frame.payload[: h.length] if place is None else place
        assert self.opener is not None
        if not self.opener.open(head, frame.payload, into):
            del message.frames[h.offset]
            self.arrived -= h.length
            message.there -= h.length
            self.forged += 1
            return False
        frame.head, frame.payload = None, into
        self.heard += 1
        self._sure(message, h)
        return True

    def _genuine(self, frame: Frame) -> bool:
        if frame.head is None:
            return True
        assert self.opener is not None
        return self.opener.open(frame.head, frame.payload, frame.payload[: frame.header.length])

    def _sure(self, message: Incoming, h: wire.Header) -> None:
        """A frame that is the peer's without doubt."""
        message.arrived += h.length
        if message.arrived < h.total:
            return
        # (its sender's memory must stay as it is until then)
        self.session.urgent |= h.total > COPIED_NBYTES and self.sealer is None
        self.session.come(h.number, h.total)
