"""Connections of the sockets to one peer: which are up, and whether the peer is lost."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence

from manygrad.tensor.environment import RECONNECT_TIMEOUT_S

LOST_GRACE_S = 0.1  # data may still be on its way in another connection when one breaks
_SETTLED_S = 1.0  # a process that is being killed may still listen for a moment after its connections broke
_REFUSED_S = 0.4  # nothing listens at the peer's address for so long: its process has ended
# between two looks whether the peer's host answers: while it does not, and while it does
_PROBE_S, _PROBE_AGAIN_S = (0.1, 5.0)


class PeerConnections:
    """`addresses`: where the peer listens, by a socket's number. `down`: sockets whose connection broke, and when."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = addresses
        self.was_up: set[int] = set()  # sockets that have been connected
        self.down: dict[int, float] = {}
        self.probe_at = self.refused_at = self.answered_at = 0.0
        self.lost_at, self.evidence = 0.0, ""

    def came_up(self, number: int) -> bool:
        """A socket is connected; whether it had been before."""
        self.down.pop(number, None)
        if number not in self.was_up:
            self.was_up.add(number)
            return False
        self.refused_at = self.probe_at = 0.0
        return True

    def broke(self, number: int) -> None:
        """The connection of a socket broke, or could not be made."""
        self.down.setdefault(number, time.monotonic())

    def lost(self) -> str | None:
        if self.down and not self.lost_at:
            self._probe(time.monotonic())
        return self.evidence if self.lost_at and time.monotonic() > self.lost_at + LOST_GRACE_S else None

    def lose(self, evidence: str) -> None:
        if not self.lost_at:
            self.lost_at, self.evidence = time.monotonic(), evidence

    def _probe(self, now: float) -> None:
        """A socket is down: does the peer's host answer, and does anything listen there?"""
        if now < self.probe_at:
            return
        number = min(self.down)
        answer = reachable(self.addresses[number])
        settled = answer == 0 and now - self.down[number] > _SETTLED_S
        self.probe_at = now + (_PROBE_AGAIN_S if settled else _PROBE_S)
        if answer == errno.ECONNREFUSED:
            self.refused_at = self.refused_at or now
            if now - self.refused_at >= _REFUSED_S:
                self.lose(f"nothing listens at {self.addresses[number]} any more (its process ended)")
            return
        self.refused_at = 0.0
        if answer == 0:
            self.answered_at = now
        since = max(self.down[number], self.answered_at)
        if now - since > RECONNECT_TIMEOUT_S.value:
            self.lose(
                f"its connection broke, and its host has not answered for {RECONNECT_TIMEOUT_S.value:g} s (the knob is "
                "RECONNECT_TIMEOUT_S)"
            )


def reachable(address: str, timeout_s: float = 0.05) -> int:
    """0 if the kernel at `tcp://host:port` takes connections, else the error number
    (ECONNREFUSED: nothing listens there)."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET) as s:
        s.settimeout(timeout_s)
        return s.connect_ex((host.strip("[]"), int(port)))
