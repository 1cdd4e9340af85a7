"""Exchange: one worker's run of a collective, again and again: the interpreter of its steps (`steps.py`) in Python.

It waits with deadlines, raises the endpoint's errors, and serves links between hosts. Where native code can run the
steps (`native_exchange.py`), it goes on with those that were left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.collectives.transport.endpoint import AHEAD_NBYTES, Borrowed, Endpoint, Ticket
from manygrad.collectives.transport.wire import MessageKey
from manygrad.native.exchange import COPY, KERNEL, RECEIVE, RECEIVE_INTO, RELEASE, SEND, SETTLE
from manygrad.native.memory import copy
from manygrad.runtime.buffer import Buffer, copy_memory
from manygrad.runtime.exchange.memory import BoundMemory
from manygrad.runtime.exchange.native_exchange import NativeRun, native_run
from manygrad.runtime.exchange.steps import MESSAGES, ExchangeStep, FarNumbers, compile_steps, sent_first
from manygrad.runtime.profile import profile
from manygrad.tensor.uop import UOp

TRACK = "calls of collectives"  # of a profile


class Exchange:
    """`run` carries the calls of `body` out, on `buffers` (`BoundMemory`)."""

    def __init__(self, body: UOp, buffers: Sequence[Buffer], ranks: int, endpoint: Endpoint | None) -> None:
        self.endpoint = endpoint
        self.memory = BoundMemory(body, buffers, ranks)
        self.steps = compile_steps(body, self.memory)
        self.native: NativeRun | None = None
        self.far = FarNumbers(self.steps, self._is_far)
        self.ahead, self.ahead_nbytes = sent_first(self.steps, self.far.reserved, AHEAD_NBYTES)
        self.waits_for = [self._ready(step) for step in self.steps]
        # where nothing follows but waits for readers
        self.settling = max((n for n, step in enumerate(self.steps, 1) if not step.waits_for_readers), default=0)
        # of this run: how many steps are done, and, by the step, what was borrowed and sent
        self.plan = self.sequence = self.done = 0
        self.borrowed: dict[int, Borrowed] = {}
        self.tickets: dict[int, Ticket] = {}

    def run(self, plan: int, sequence: int) -> None:
        """Once. `plan`: what all messages carry; `sequence` counts its runs. When it returns, all memory may be written
        again. Raises the endpoint's errors."""
        self.begin(plan, sequence)
        self.finish()
        self.settle()

    def begin(self, plan: int, sequence: int) -> None:
        """Sends what needs nothing from others, where that waits for nobody; it does not before `finish` and `settle`,
        which have to follow. Another exchange that began earlier may finish in between."""
        if not self.memory.is_bound:
            self._bind()
        self.plan, self.sequence, self.done = plan, sequence, 0
        if self.far.there_are:
            self.far.begin(self._endpoint())
            self._run(self.ahead)

    def advance(self) -> Callable[[], bool] | None:
        """Goes on between hosts as far as what has come allows, between `begin` and `finish`. Returns what says that it
        can go on again; None where it cannot before `finish`."""
        if not self.far.there_are:
            return None
        while self.done < self.settling:
            ready = self.waits_for[self.done]
            if ready is None or not ready():
                return ready
            self._run(self.done + 1)
        return None

    def finish(self) -> None:
        """Until the results are there."""
        if self.native is not None and not profile.active:
            self._take_over(self.native.run(self.plan, self.sequence))
        self._run(self.settling)

    def resume(self, plan: int, sequence: int, stopped: int) -> None:
        """All that is left of a run that a native call began and that came to its step `stopped`; `settle` has to
        follow."""
        self.plan, self.sequence = plan, sequence
        self._take_over(stopped)
        self._run(self.settling)

    def settle(self) -> None:
        """Until all memory may be written again."""
        self._run(len(self.steps))

    def move(self, buffer: Buffer, to: Any) -> None:
        """From now on reads the memory `to` instead of that of a source's buffer."""
        if not self.memory.is_bound:
            self._bind()
        self.memory.move(buffer, to)
        if self.native is not None and not self.native.may_send():
            self.native = None

    def _bind(self) -> None:
        self.memory.bind()
        self.native = native_run(self.steps, self.memory, self.endpoint)

    def _run(self, end: int) -> None:
        """The steps up to `end` that have not been run."""
        try:
            while self.done < end:
                n = self.done
                step = self.steps[n]
                self.done = n + 1
                if not profile.active:
                    _INTERPRETED[step.kind](self, n, step)
                    continue
                start = time.perf_counter()
                _INTERPRETED[step.kind](self, n, step)
                profile.record(TRACK, step.name, start, time.perf_counter(), self._facts(step))
        except BaseException:
            if any(s.is_written for s in self.steps):
                self._endpoint().arena.has_failed = True
            raise

    def _facts(self, step: ExchangeStep) -> dict[str, Any]:
        """Facts for a profile: which message it is, the same on both ranks."""
        if step.kind not in MESSAGES:
            return {}
        here = self._endpoint().rank
        ends = (here, step.peer) if step.kind == SEND else (step.peer, here)
        return {"message": f"{self.plan:x}.{self.sequence}.{step.number} {ends[0]}->{ends[1]}"}

    def _ready(self, step: ExchangeStep) -> Callable[[], bool] | None:
        """Says whether a step may run now, before exchanges that began earlier have ended, and waits for nobody; None
        where it may not, or that cannot be told: messages in shared memory keep their order."""
        if step.kind == SETTLE or (step.kind == SEND and step.peer not in self.far.reserved):
            return None
        if step.kind not in (RECEIVE, RECEIVE_INTO):
            return _at_once
        if step.peer not in self.far.expected:
            return None
        peer, number, nbytes = step.peer, step.number, step.nbytes
        incoming, first = self._endpoint().incoming(peer), self.far.first_in

        def has_come() -> bool:
            message = incoming.get(first[peer] + number)
            return message is not None and message.there >= nbytes

        return has_come

    def _is_far(self, peer: int) -> bool:
        return self._endpoint().may_reserve(peer)

    def _endpoint(self) -> Endpoint:
        if self.endpoint is None:
            raise ValueError("a message goes to another worker, but there is no endpoint")
        return self.endpoint

    def _take_over(self, stopped: int) -> None:
        """After a native call that came to step `stopped`: what is lent and borrowed at that step."""
        native = self.native
        assert native is not None
        native.count(stopped)
        self.done = stopped
        if stopped == len(self.steps):
            return
        endpoint = self._endpoint()
        for n, step in enumerate(self.steps[:stopped]):
            if step.kind == SEND:
                ticket = Ticket(step.peer, native.number(n), MessageKey(self.plan, self.sequence, step.number))
                self.tickets[n] = endpoint.outstanding(ticket)
            elif step.kind == RECEIVE:
                release = native.release_of(n)
                self._lend(n, step, Borrowed(self.memory.addresses[step.place], step.nbytes, release))
            elif step.kind == RELEASE:
                del self.borrowed[step.of]
            elif step.kind == SETTLE:
                endpoint.settle(self.tickets[step.of])  # (it is: nothing is left to wait for)

    # --- one step of each kind: its number, and what it is

    def _send(self, n: int, step: ExchangeStep) -> None:
        peer, number = step.peer, step.number
        key, first = MessageKey(self.plan, self.sequence, number), self.far.first.get(peer)
        reserved, at = None if first is None else first + number, self.memory.addresses[step.place]
        self.tickets[n] = self._endpoint().send(peer, key, at, step.nbytes, step.dtype, reserved, step.is_written)

    def _message(self, step: ExchangeStep) -> tuple[MessageKey, int | None]:
        """Key and, between hosts, number of a message that comes."""
        first, number = self.far.first_in.get(step.peer), step.number
        return MessageKey(self.plan, self.sequence, number), None if first is None else first + number

    def _receive(self, n: int, step: ExchangeStep) -> None:
        key, expected = self._message(step)
        self._lend(n, step, self._endpoint().receive(step.peer, key, step.nbytes, step.dtype, expected))

    def _lend(self, n: int, step: ExchangeStep, got: Borrowed) -> None:
        self.borrowed[n] = got
        self.memory.lend(step.place, got)

    def _receive_into(self, n: int, step: ExchangeStep) -> None:
        key, expected = self._message(step)
        at = self.memory.addresses[step.place]
        self._endpoint().receive_into(step.peer, key, at, step.nbytes, step.dtype, expected)

    def _release(self, n: int, step: ExchangeStep) -> None:
        self.borrowed.pop(step.of).release()

    def _settle(self, n: int, step: ExchangeStep) -> None:
        self._endpoint().settle(self.tickets[step.of])

    def _copy(self, n: int, step: ExchangeStep) -> None:
        to, source, m = step.place, step.source, self.memory
        if m.is_seen(to) and m.is_seen(source):
            if m.addresses[to] != m.addresses[source]:
                copy(m.addresses[to], m.addresses[source], step.nbytes)
            return
        devices = m.places[to].device, m.places[source].device
        copy_memory(devices[0], m.handles[to], devices[1], m.handles[source], step.nbytes)

    def _kernel(self, n: int, step: ExchangeStep) -> None:
        assert step.kernel is not None
        handles = self.memory.handles
        step.kernel([handles[p] for p in step.places])


_INTERPRETED: dict[int, Callable[[Exchange, int, ExchangeStep], None]] = {
    SEND: Exchange._send,
    RECEIVE: Exchange._receive,
    RECEIVE_INTO: Exchange._receive_into,
    RELEASE: Exchange._release,
    SETTLE: Exchange._settle,
    COPY: Exchange._copy,
    KERNEL: Exchange._kernel,
}


def _at_once() -> bool:
    return True
