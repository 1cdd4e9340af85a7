"""Connections of the lanes to one peer: which are up, and whether the peer is lost."""

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


class LaneConnections:
    """`addresses`: where the peer listens for each lane. `down`: lanes whose connection broke, and when."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = addresses
        self.was_up: set[int] = set()  # lanes that have been connected
        self.down: dict[int, float] = {}
        self.probe_at = self.refused_at = self.answered_at = 0.0
        self.lost_at, self.evidence = 0.0, ""

    def came_up(self, lane: int) -> bool:
        """A lane is connected; whether it had been before."""
        self.down.pop(lane, None)
        if lane not in self.was_up:
            self.was_up.add(lane)
            return False
        self.refused_at = self.probe_at = 0.0
        return True

    def broke(self, lane: int) -> None:
        """The connection of a lane broke, or could not be made."""
        self.down.setdefault(lane, time.monotonic())

    def lost(self) -> str | None:
        if self.down and not self.lost_at:
            self._probe(time.monotonic())
        return self.evidence if self.lost_at and time.monotonic() > self.lost_at + LOST_GRACE_S else None

    def lose(self, evidence: str) -> None:
        if not self.lost_at:
            self.lost_at, self.evidence = time.monotonic(), evidence

    def _probe(self, now: float) -> None:
        """A lane is down: does the peer's host answer, and does anything listen there?"""
        if now < self.probe_at:
            return
        lane = min(self.down)
        answer = reachable(self.addresses[lane])
        settled = answer == 0 and now - self.down[lane] > _SETTLED_S
        self.probe_at = now + (_PROBE_AGAIN_S if settled else _PROBE_S)
        if answer == errno.ECONNREFUSED:
            self.refused_at = self.refused_at or now
            if now - self.refused_at >= _REFUSED_S:
                self.lose(f"nothing listens at {self.addresses[lane]} any more (its process ended)")
            return
        self.refused_at = 0.0
        if answer == 0:
            self.answered_at = now
        since = max(self.down[lane], self.answered_at)
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
