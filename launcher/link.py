"""The part that both ends of the control channel share: conversations that outlive a broken connection
and go through epochs, and deadlines of silence.

Pure: bytes, numbers and times in, bytes and decisions out; no sockets, no clock. Standard library only, because the
supervisor (`supervisor.py`) is up without the rest of manygrad.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from dataclasses import dataclass

from manygrad.session import Session

BEAT_S = 1.0  # each party says so often that it is there
SUSPENDED_S = 10.0  # a longer gap between two looks at the clock was our own absence, not the other's silence
REFUSED_S = 5.0  # nothing listens at the launcher's address for so long: it has ended
RESEND_S = 0.5  # the other side has spoken since, and still has not got what was sent so long ago
RESEND_UNHEARD_S = 8.0  # it has not spoken either
WINDOW = 64  # messages on their way
# epoch, number of this message (0: may be lost), and below which number all of the other side's have come
HEAD = struct.Struct("<IQQ")


@dataclass(frozen=True)
class Clock:
    """Seconds that all parties of a run count in: `rate` of them pass in one of the machine's.
    A test of long runs gives a higher rate."""

    rate: float = 1.0

    def __call__(self) -> float:
        return time.monotonic() * self.rate

    def real(self, seconds: float) -> float:
        """So many seconds of this clock in those of the machine, for sleeps and polls."""
        return seconds / self.rate


class Conversation:
    """One side of the control channel over connections that break and are made anew, in one epoch after the other.

    What must arrive is a message of the session; it is taken in order only, so whatever a broken connection has
    swallowed is sent again (go back N). Heartbeats may be lost and have number 0. A message of an epoch that is over is
    dropped. The driver begins epochs (`enter`); whoever `follows` enters the epoch of the first message of it, and what
    it had still to send in the old one is dropped.
    """

    def __init__(self, epoch: int = 0, follows: bool = False) -> None:
        self.session: Session[bytes] = Session(epoch, first=1)
        self.follows = follows
        self.due = 1  # number of the next message to be handed to the socket
        self.sent_at = self.heard_at = 0.0

    @property
    def epoch(self) -> int:
        return self.session.epoch

    @property
    def kept(self) -> dict[int, bytes]:
        """What the other side is not known to have."""
        return self.session.kept

    @property
    def owes(self) -> bool:
        """Whether something came that the other side does not know to have come."""
        return self.session.owed > 0

    def enter(self, epoch: int) -> None:
        """Begins an epoch. Raises ValueError where it is not a later one."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} cannot follow epoch {self.epoch}")
        self.session.enter(epoch)
        self.due, self.sent_at = 1, 0.0

    def post(self, body: bytes) -> None:
        """Take a message that must arrive."""
        self.session.keep(self.session.reserve(1), body)

    def next(self, now: float) -> tuple[bytes, bytes] | None:
        """The next message to hand to the socket, as (head, body); then call `handed`. None: nothing is due."""
        s, late = self.session, RESEND_S if self.heard_at > self.sent_at else RESEND_UNHEARD_S
        if self.due > s.acked_below and now - self.sent_at > late:
            self.due = s.acked_below
        if self.due not in s.kept or self.due >= s.acked_below + WINDOW:
            return None
        return HEAD.pack(s.epoch, self.due, s.whole_below), s.kept[self.due]

    def handed(self, now: float) -> None:
        self.session.told()
        self.due, self.sent_at = self.due + 1, now

    def passing(self, body: bytes = b"") -> tuple[bytes, bytes]:
        """A message that may be lost, or (empty) only what has been received."""
        return HEAD.pack(self.epoch, 0, self.session.told()), body

    def take(self, head: bytes, body: bytes, now: float) -> bytes | None:
        """Takes a message of the other side; gives its body if that is to be acted on. Raises ValueError for a
        malformed head."""
        if len(head) != HEAD.size:
            raise ValueError(f"the head of a message has {HEAD.size} bytes, got {len(head)}")
        epoch, number, below = HEAD.unpack(head)
        if epoch > self.epoch:
            if not self.follows:
                raise ValueError(f"a message of epoch {epoch}, but epoch {self.epoch} is the last that was begun")
            self.enter(epoch)
        self.heard_at = now
        if epoch < self.epoch:
            return None
        self.session.acknowledge(below)
        self.due = max(self.due, self.session.acked_below)
        if number:
            if number != self.session.whole_below:  # came twice, or what was before it got lost and will come again
                self.session.repeat()
                return None
            self.session.come(number)
        return body or None


class Silence:
    """For how long another party has said nothing, counted only while we were there to hear it.

    A process that was suspended itself (SIGSTOP, a laptop's sleep, native code that holds the interpreter) finds a gap
    between two looks at the clock; what the other said meanwhile lies unread, so the gap does not count.
    """

    def __init__(self, now: float) -> None:
        self.at, self.seconds = now, 0.0

    def heard(self, now: float) -> None:
        self.at, self.seconds = now, 0.0

    def look(self, now: float) -> float:
        """To be called at least every SUSPENDED_S; the silence so far."""
        gap, self.at = now - self.at, now
        self.seconds += gap if gap <= SUSPENDED_S else 0.0
        return self.seconds


class Broken:
    """Whether the launcher is gone: nothing has listened at its address for REFUSED_S, each time that we tried."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        self.since, self.next, self.refused_since = 0.0, 0.0, 0.0

    def connection(self, stands: bool, now: float) -> None:
        self.since = 0.0 if stands else self.since or now
        self.refused_since = 0.0

    def gone(self, now: float) -> bool:
        if not self.since or now < self.next:
            return False
        self.next = now + 0.5
        if not refused(self.host, self.port):
            self.refused_since = 0.0
            return False
        self.refused_since = self.refused_since or now
        return now - self.refused_since >= REFUSED_S


def refused(host: str, port: int, timeout_s: float = 0.05) -> bool:
    """Whether the host answers that nothing listens there: the process has ended.
    An outage, or a suspended process, is no refusal."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.settimeout(timeout_s)
        try:
            return s.connect_ex((host, port)) == errno.ECONNREFUSED
        except OSError:
            return False
