"""How an endpoint waits: with a deadline, for as long as its peer lives and nobody has aborted, while everything else
that is on its way goes on.

Every wait has the deadline COLLECTIVE_TIMEOUT_S, watches the abort flag, and looks at least every 50 ms whether the
peer still lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from manygrad.collectives.transport import shm
from manygrad.collectives.transport.link import ZmqLink
from manygrad.collectives.transport.wire import MessageKey
from manygrad.collectives.transport.zmq import ZmqHub
from manygrad.errors import CollectiveAborted, CollectiveTimeout, PeerLost
from manygrad.native.memory import table
from manygrad.native.sequence import Timespec
from manygrad.tensor.environment import COLLECTIVE_TIMEOUT_S

TICK_S = 0.05
BUSY_TICK_S = 0.001  # in a wait on shared memory, where there are ZeroMQ peers to serve as well


class Wait(NamedTuple):
    """For a peer: since when (`time.monotonic()`) nothing has come of it, and in which plan."""

    peer: int
    since: float
    plan: int


class Waits:
    """Waits of one endpoint. `describe(plan)`: its source line; `meanwhile`: what is done when a wait is woken, which
    may send."""

    def __init__(
        self,
        rank: int,
        hub: ZmqHub,
        links: dict[int, shm.ShmLink | ZmqLink],
        describe: Callable[[int], str],
        meanwhile: Callable[[], None],
    ) -> None:
        self.rank, self.hub, self.links, self.describe, self.meanwhile = rank, hub, links, describe, meanwhile
        self.now: Wait | None = None  # read by other threads
        self.reason: str | None = None  # of an abort
        self.stop = table(1)  # not 0 from an abort on
        self.spins = 0  # of a wait on shared memory, before it sleeps
        self.tick, self.busy_tick = Timespec.of(TICK_S), Timespec.of(BUSY_TICK_S)

    def for_word(self, link: shm.ShmLink, word: int, target: int, code: int, key: MessageKey, what: str) -> None:
        """Until a word of shared memory has come to `target`."""
        if link.queue:
            link.push()
        hub = self.hub
        if self.reason is None and link.wait(
            word, target, code, self.spins, self.busy_tick if hub.links else self.tick
        ):
            return
        began = time.monotonic()
        try:
            while True:
                self.raise_aborted()
                self.now = Wait(link.peer, began, key.plan)  # (`meanwhile` may have waited itself)
                self._push_queued()
                if hub.links:
                    hub.progress(0)
                self.meanwhile()
                lost = link.lost()  # looked up before the word: what the peer published before its end still counts
                if link.wait(word, target, code, 0, self.busy_tick if hub.links or lost else self.tick):
                    return
                self.raise_aborted()
                self._give_up(link, lost, began, key, what)
        finally:
            self.now = None

    def for_frames(self, link: ZmqLink, look: Callable[[], Any], key: MessageKey, what: str) -> Any:
        """Until `look` finds something, which is looked at again whenever anything has come."""
        found = look()
        if found is not None:
            return found
        since, heard, waited = time.monotonic(), link.heard, False
        try:
            while True:
                self.raise_aborted()
                if (
                    link.heard != heard or link.connections.down
                ):  # a slow link is none that hangs, nor is one that is made anew
                    since, heard = time.monotonic(), link.heard
                if waited:
                    self._push_queued()
                    self._give_up(link, link.lost(), since, key, what)
                    self.now = Wait(link.peer, since, key.plan)
                self.hub.progress(TICK_S)
                self.meanwhile()
                waited = True
                found = look()
                if found is not None:
                    return found
        finally:
            self.now = None

    def raise_aborted(self) -> None:
        if self.reason is not None:
            raise CollectiveAborted(rank=self.rank, reason=self.reason)

    def abort(self, reason: str) -> None:
        """From now on all waits end; the first reason wins."""
        if self.reason is None:
            self.reason = reason
            self.stop[0] = 1

    def _push_queued(self) -> None:
        for link in self.links.values():
            if link.queue and isinstance(link, shm.ShmLink):
                link.push()

    def _give_up(self, link: shm.ShmLink | ZmqLink, lost: str | None, since: float, key: MessageKey, what: str) -> None:
        if isinstance(link, ZmqLink) and link.forged:
            what += f" ({link.forged} frames in its name did not open: something between the hosts changes them)"
        if lost is not None:
            raise PeerLost(rank=self.rank, peer=link.peer, waited_for=self._named(what, key), evidence=lost)
        if time.monotonic() > since + COLLECTIVE_TIMEOUT_S.value:
            raise CollectiveTimeout(
                rank=self.rank,
                peer=link.peer,
                plan=key.plan,
                sequence=key.sequence,
                waited_for=what,
                timeout_s=float(COLLECTIVE_TIMEOUT_S.value),
                where=self.describe(key.plan),
            )

    def _named(self, what: str, key: MessageKey) -> str:
        where = self.describe(key.plan)
        return f"{what} of plan {key.plan:#018x}, sequence {key.sequence}" + (f" [{where}]" if where else "")
