"""Between two threads: the event loop hands requests in and takes tokens, the model's loop takes work and hands tokens
out. Neither waits for the other longer than a list is changed.

A text waits in a queue of limited length until a replica of the model has a slot for it. The scheduler is "open", then
"draining" (what was taken in is finished, nothing else is), then "closed".
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manygrad.llm.embedder import Text
from manygrad.llm.engine.batch import Request, SampledToken
from manygrad.llm.serve.errors import ApiError

IDLE_S = 1.0  # the other ranks hear from the model's loop at least this often


@dataclass(frozen=True)
class StepWork:
    """The orders to the replicas before their next step."""

    admit: tuple[tuple[int, int, Request], ...] = ()  # (which replica writes it, key, what)
    cancel: tuple[int, ...] = ()
    embed: tuple[tuple[int, tuple[Text, ...]], ...] = ()
    stop: bool = False


@dataclass(frozen=True)
class Report:
    """A replica after a step: what it has written, and what it has free."""

    made: tuple[SampledToken, ...] = ()
    running: int = 0  # texts
    slots: int = 0  # that are free
    unpromised: int = 0  # pages that no text may need
    pages: int = 0  # that no text has


@dataclass(frozen=True)
class EmbedRequest:
    rows: np.ndarray
    tokens: int


Given = SampledToken | EmbedRequest | ApiError
Out = asyncio.Queue[tuple[int, Given]]


@dataclass(eq=False)
class Waiting:
    key: int
    request: Request | tuple[Text, ...]  # a text to write, or texts to make vectors of
    since: float = field(default_factory=time.monotonic)


class Scheduler:
    def __init__(self, most: int, wait_s: float):
        """`most` texts may wait for a slot and pages, `wait_s` at most."""
        self.most, self.wait_s = most, wait_s
        self.changed = threading.Condition()
        self.state, self.cause = "open", ""
        self.waiting: deque[Waiting] = deque()
        self.gone: list[int] = []
        self.keys = 0
        self.reports: Sequence[Report] = ()  # the last one of each replica
        self.placed: Counter[int] = Counter()  # how many texts each replica has been given
        self.until = float("inf")  # when draining ends
        self.outs: dict[int, Out] = {}  # of the event loop alone, as is:
        self.loop: asyncio.AbstractEventLoop | None = None

    # the event loop's side

    def submit(self, requests: Sequence[Request | tuple[Text, ...]]) -> tuple[list[int], Out]:
        """(a key each, where what they become is put); the caller gives the keys back (`leave`)."""
        out: Out = asyncio.Queue()
        with self.changed:
            if self.state != "open":
                raise ApiError(503, self.cause, code="shutting_down")
            if len(self.waiting) + len(requests) > self.most:
                raise ApiError(429, f"{len(self.waiting)} texts wait already, and {self.most} may; come back later",
                               code="queue_full")  # fmt: skip
            keys = [self.keys + i for i in range(len(requests))]
            self.keys += len(requests)
            self.waiting.extend(map(Waiting, keys, requests))
            self.outs |= dict.fromkeys(keys, out)
            self.changed.notify()
        return keys, out

    def leave(self, keys: Sequence[int]) -> None:
        """Nobody wants these texts any more; those that have ended already are none."""
        with self.changed:
            self.gone += [k for k in keys if self.outs.pop(k, None) is not None]
            self.waiting = deque(w for w in self.waiting if w.key in self.outs)
            self.changed.notify()

    def _put(self, given: Sequence[tuple[int, Given]]) -> None:
        for key, found in given:
            last = not isinstance(found, SampledToken) or found.reason
            out = self.outs.pop(key, None) if last else self.outs.get(key)
            if out is not None:
                out.put_nowait((key, found))

    # the model's side

    def hear(self, reports: Sequence[Report]) -> None:
        """Hand out what all replicas have written; the slots and pages they have free count from now on."""
        self.reports = reports
        written: list[Any] = [(made.key, made) for report in reports for made in report.made]
        self.give(written)

    def take(self) -> StepWork:
        """The next orders; without anything, and nothing to write, it comes after `IDLE_S`. Texts begin in the
        order in which they came: one that needs many pages is not passed by others. Each goes to the replica with the
        most free slots of those that have the pages."""
        busy, free = any(r.running for r in self.reports), [(r.slots, r.unpromised) for r in self.reports]
        with self.changed:
            if not busy and not self.waiting and not self.gone and self.state == "open":
                self.changed.wait(IDLE_S)
            now = time.monotonic()
            late = [w for w in self.waiting if now - w.since > self.wait_s]
            self.waiting = deque(w for w in self.waiting if w not in late)
            admit: list[Any] = []
            embed: list[Any] = []
            held = deque[Waiting]()
            for w in self.waiting:
                if not isinstance(w.request, Request):
                    if embed:  # (one a step: others are being written)
                        held.append(w)
                    else:
                        embed.append((w.key, w.request))
                elif (replica := best(free, w.request)) is not None:
                    admit.append((replica, w.key, w.request))
                    slots, pages = free[replica]
                    free[replica] = slots - 1, pages - w.request.pages
                else:
                    free = []
                    held.append(w)
            self.placed.update(replica for replica, _, _ in admit)
            self.waiting, cancel, self.gone = held, tuple(self.gone), []
            drained = self.state != "open" and not busy and not admit and not embed and not held
            stop = self.state == "closed" or drained or now > self.until
        self.give([(w.key, self._late()) for w in late])
        return StepWork(tuple(admit), cancel, tuple(embed), stop)

    def _late(self) -> ApiError:
        return ApiError(
            503, f"no slot, or no pages, became free in {self.wait_s:g} s; come back later", code="queue_timeout"
        )

    def give(self, found: Sequence[tuple[int, Given]]) -> None:
        if found and self.loop is not None:
            self.loop.call_soon_threadsafe(self._put, found)

    def drain(self, within_s: float) -> None:
        """No new requests; those that are there have `within_s`. For a second time: none."""
        # (called by a signal's handler, maybe inside `take`: it must not wait for the lock)
        again = self.state != "open"
        self.cause = "the server is shutting down"
        self.until = 0.0 if again else time.monotonic() + within_s
        self.state = "draining"

    def close(self, cause: str) -> None:
        """All texts that are there end with an error, and so do those that come."""
        with self.changed:
            self.state, self.cause = "closed", cause
            self.waiting.clear()

        def end() -> None:
            self._put([(key, ApiError(503, cause, code="shutting_down")) for key in list(self.outs)])

        if self.loop is not None:
            self.loop.call_soon_threadsafe(end)


def best(free: Sequence[tuple[int, int]], request: Request) -> int | None:
    """The number of the replica that has the most free slots, then pages, of those that it fits."""
    fits = [(slots, pages, -i) for i, (slots, pages) in enumerate(free) if slots and pages >= request.pages]
    return -max(fits)[2] if fits else None
