"""Exchange: one worker's calls of a collective (`collectives/lower`), resolved to be run again and again.

Each call becomes a step, a function without arguments, of memory found once: a place is a part of a buffer, with its
handle for kernels and its address for messages. What a RECEIVE borrows has its place when it has come.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from manygrad.collectives.transport.endpoint import AHEAD_NBYTES, Borrowed, Endpoint, Ticket
from manygrad.collectives.transport.wire import MessageKey
from manygrad.native.memory import copy, table
from manygrad.runtime.buffer import Buffer, copy_memory
from manygrad.runtime.devices import Device, Kernel, get_device
from manygrad.runtime.exchange.native_exchange import NativeRun, native_run
from manygrad.runtime.profile import profile
from manygrad.tensor.uop import MessageArg, Ops, UOp
from manygrad.tensor.uop.shape import numel

Step = Callable[[], Any]
LANE = "calls of collectives"  # of a profile


class BufferPart(NamedTuple):
    """A part of a buffer, or, without one, what is borrowed."""

    device: Device
    nbytes: int
    base: Buffer | None = None
    offset: int = 0  # in bytes


class Exchange:
    """`run` carries the calls out. `buffers` are the LINEAR's arguments: with `ranks` ranks of this worker the results,
    the sources, then temporaries.

    Large: a run of a collective, resolved.
    """

    def __init__(self, body: UOp, buffers: Sequence[Buffer], ranks: int, endpoint: Endpoint | None) -> None:
        self.buffers, self.ranks, self.endpoint = list(buffers), ranks, endpoint
        self.body = body
        args = list(dict.fromkeys(a for call in body.src for a in call.src[1:]))
        self.numbers = {a: n for n, a in enumerate(args)}  # of places
        self.places = [self._located(a) for a in args]
        self.handles: list[Any] = [None] * len(args)
        self.spare = len(args)  # one address more, of a message that is copied into its place
        self.addresses: Any = table(len(args) + 1)  # of places that the host sees
        self.kernels: dict[UOp, Kernel] = {}
        self.native: NativeRun | None = None
        self.borrowed: dict[int, Borrowed] = {}
        self.tickets: dict[MessageArg, Ticket] = {}
        self.plan = self.sequence = 0
        # how many messages go to each worker of another host, and come from it, and the numbers of this run's first
        # ones: they are reserved in the order in which exchanges begin
        self.reserved, self.expected = self._messages(Ops.SEND), self._messages(Ops.RECEIVE)
        self.first: dict[int, int] = {}
        self.first_in: dict[int, int] = {}
        self.ahead, self.ahead_nbytes = self._sent_first()
        self.is_bound = False
        self.steps = list(map(self._step, body.src))
        self.waits_for = [self._ready(call) for call in body.src]
        self.done = 0  # steps of this run
        # where nothing follows but waits for readers
        self.settling = max((n for n, call in enumerate(body.src, 1) if not _waits_for_readers(call.src[0])), default=0)
        self.is_written = any(u.op is Ops.SEND and u.arg.is_written for u in (call.src[0] for call in body.src))
        self.messages = {
            step: call.src[0]
            for (_, step), call in zip(self.steps, body.src)
            if call.src[0].op in (Ops.SEND, Ops.RECEIVE)
        }

    def run(self, plan: int, sequence: int) -> None:
        """Once. `plan`: what all messages carry; `sequence` counts its runs. When it returns, all memory may be written
        again. Raises the endpoint's errors."""
        self.begin(plan, sequence)
        self.finish()
        self.settle()

    def begin(self, plan: int, sequence: int) -> None:
        """Sends what needs nothing from others, where that waits for nobody; it does not before `finish` and `settle`,
        which have to follow. Another exchange that began earlier may finish in between."""
        if not self.is_bound:
            self._bind()
        self.plan, self.sequence, self.done = plan, sequence, 0
        if self.reserved or self.expected:
            endpoint = self._endpoint()
            self.first = {peer: endpoint.reserve(peer, count) for peer, count in self.reserved.items()}
            self.first_in.update({peer: endpoint.expect(peer, count) for peer, count in self.expected.items()})
            self._run(self.ahead)

    def advance(self) -> Callable[[], bool] | None:
        """Goes on between hosts as far as what has come allows, between `begin` and `finish`. Returns what says that it
        can go on again; None where it cannot before `finish`."""
        if not self.reserved and not self.expected:
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
            self.done = self.native.run(self.plan, self.sequence)
        self._run(self.settling)

    def resume(self, plan: int, sequence: int, stopped: int) -> None:
        """All that is left of a run that a native call began and that came to its step `stopped`; `settle` has to
        follow."""
        assert self.native is not None
        self.plan, self.sequence = plan, sequence
        self.done = self.native.ended(stopped, plan, sequence)
        self._run(self.settling)

    def settle(self) -> None:
        """Until all memory may be written again."""
        self._run(len(self.steps))

    def _run(self, end: int) -> None:
        """The steps up to `end` that have not been run."""
        try:
            while self.done < end:
                name, step = self.steps[self.done]
                self.done += 1
                if not profile.active:
                    step()
                    continue
                start = time.perf_counter()
                step()
                profile.record(LANE, name, start, time.perf_counter(), self._facts(step))
        except BaseException:
            if self.is_written:
                self._endpoint().arena.has_failed = True
            raise

    def _facts(self, step: Step) -> dict[str, Any]:
        """Facts for a profile: which message it is, the same on both ranks."""
        if (what := self.messages.get(step)) is None:
            return {}
        (peer, number, _), here = what.arg, self._endpoint().rank
        ends = (here, peer) if what.op is Ops.SEND else (peer, here)
        return {"message": f"{self.plan:x}.{self.sequence}.{number} {ends[0]}->{ends[1]}"}

    def move(self, buffer: Buffer, to: Any) -> None:
        """From now on reads the memory `to` instead of that of a source's buffer."""
        if not self.is_bound:
            self._bind()
        for n, p in enumerate(self.places):
            if p.base is not None and (p.base.base or p.base) is buffer:
                self._put(n, p, p.device.view(to, p.base.offset + p.offset, p.nbytes))
        if self.native is not None and not self.native.may_send():
            self.native = None

    def lend(self, number: int, got: Borrowed) -> None:
        """From now on a place is what has been borrowed."""
        host = self.places[number].device.allocator.host
        assert host is not None, "a message is borrowed in memory that the host does not see"
        self.borrowed[number] = got
        self.addresses[number], self.handles[number] = got.addr, host.at(got.addr, got.nbytes)

    def _sent_first(self) -> tuple[int, int]:
        """How many sends stand first, which `begin` may send, and their bytes: between hosts, where messages are told
        apart by their numbers, and as much as every receiver grants, whatever it is waiting for."""

        def is_first(call: UOp) -> bool:
            return call.src[0].op is Ops.SEND and call.src[0].arg.peer in self.reserved

        first = list(takewhile(is_first, self.body.src))
        nbytes = sum(self.places[self.numbers[call.src[1]]].nbytes for call in first)
        return (len(first), nbytes) if nbytes <= AHEAD_NBYTES else (0, 0)

    # --- memory

    def _bind(self) -> None:
        self._refuse_overlap()
        for n, p in enumerate(self.places):
            if p.base is not None:
                self._put(n, p, p.device.view(p.base.handle, p.offset, p.nbytes))
        self.is_bound = True
        self.native = native_run(self, self.body)

    def _refuse_overlap(self) -> None:
        for out in self.buffers[: self.ranks]:
            for given in self.buffers[self.ranks : 2 * self.ranks]:
                if (out.base or out) is (given.base or given) and out.nbytes and given.nbytes:
                    if out.offset < given.offset + given.nbytes and given.offset < out.offset + out.nbytes:
                        raise ValueError(
                            f"{given} and {out} overlap; peers still read the one while the other is written"
                        )

    def _put(self, number: int, place: BufferPart, handle: Any) -> None:
        self.handles[number] = handle
        if place.device.allocator.host is not None:
            self.addresses[number] = place.device.address(handle)

    def _located(self, u: UOp) -> BufferPart:
        buffer, first = (u.src[0], u.arg.offset) if u.op is Ops.VIEW else (u, 0)
        nbytes = numel(u.shape) * u.dtype.itemsize
        if buffer.op is Ops.BUFFER:
            return BufferPart(get_device(buffer.arg.device), nbytes)
        base = self.buffers[buffer.arg.uid]
        return BufferPart(base.device, nbytes, base, first * u.dtype.itemsize)

    # --- steps

    def _step(self, call: UOp) -> tuple[str, Step]:
        what, *args = call.src
        at = [self.numbers[a] for a in args]
        if what.op is Ops.SEND:
            return f"send {self.places[at[0]].nbytes} to {what.arg.peer}", self._send(what, at[0])
        if what.op is Ops.RECEIVE:
            return f"receive {self.places[at[0]].nbytes} from {what.arg.peer}", self._receive(what, at[0])
        if what.op is Ops.RELEASE:
            return "release", lambda: self.borrowed.pop(at[0]).release()
        if what.op is Ops.SETTLE:
            return "wait for readers", self._settle(what.arg)
        if what.op is Ops.COPY:
            return f"copy {self.places[at[0]].nbytes}", self._copy(*at)
        kernel = self.kernels[what] = self.places[at[0]].device.compile(what)
        handles = self.handles
        return kernel.name, lambda: kernel([handles[n] for n in at])

    def _ready(self, call: UOp) -> Callable[[], bool] | None:
        """Says whether a step may run now, before exchanges that began earlier have ended, and waits for nobody; None
        where it may not, or that cannot be told: messages in shared memory keep their order."""
        what, *args = call.src
        if what.op is Ops.SETTLE or (what.op is Ops.SEND and what.arg.peer not in self.reserved):
            return None
        if what.op is not Ops.RECEIVE:
            return _at_once
        if what.arg.peer not in self.expected:
            return None
        (peer, number, _), nbytes = what.arg, self.places[self.numbers[args[0]]].nbytes
        incoming, first = self._endpoint().incoming(peer), self.first_in

        def has_come() -> bool:
            message = incoming.get(first[peer] + number)
            return message is not None and message.there >= nbytes

        return has_come

    def _messages(self, kind: Ops) -> dict[int, int]:
        """How many go to each worker of another host, or come from it."""
        count = Counter(call.src[0].arg.peer for call in self.body.src if call.src[0].op is kind)
        return {peer: n for peer, n in count.items() if self._endpoint().may_reserve(peer)}

    def _endpoint(self) -> Endpoint:
        if self.endpoint is None:
            raise ValueError("a message goes to another worker, but there is no endpoint")
        return self.endpoint

    def _send(self, what: UOp, at: int) -> Step:
        send, addresses, tickets, message = self._endpoint().send, self.addresses, self.tickets, what.arg
        (peer, number, is_written), nbytes, dtype = message, self.places[at].nbytes, what.dtype.name

        def step() -> None:
            key, first = MessageKey(self.plan, self.sequence, number), self.first.get(peer)
            reserved = None if first is None else first + number
            tickets[message] = send(peer, key, addresses[at], nbytes, dtype, reserved, is_written)

        return step

    def _receive(self, what: UOp, at: int) -> Step:
        endpoint, addresses = self._endpoint(), self.addresses
        (peer, number, _), place, dtype = what.arg, self.places[at], what.dtype.name
        nbytes = place.nbytes

        def message() -> tuple[MessageKey, int | None]:
            first = self.first_in.get(peer)
            return MessageKey(self.plan, self.sequence, number), None if first is None else first + number

        if place.base is not None:

            def into_place() -> None:
                key, expected = message()
                endpoint.receive_into(peer, key, addresses[at], nbytes, dtype, expected)

            return into_place

        def borrow() -> None:
            key, expected = message()
            self.lend(at, endpoint.receive(peer, key, nbytes, dtype, expected))

        return borrow

    def _settle(self, messages: tuple[MessageArg, ...]) -> Step:
        endpoint, tickets = self._endpoint(), self.tickets

        def step() -> None:
            for m in messages:
                endpoint.settle(tickets[m])

        return step

    def _copy(self, to: int, source: int) -> Step:
        target, origin = self.places[to], self.places[source]
        addresses, handles, nbytes = self.addresses, self.handles, target.nbytes
        if target.device.allocator.host is not None and origin.device.allocator.host is not None:

            def step() -> None:
                if addresses[to] != addresses[source]:
                    copy(addresses[to], addresses[source], nbytes)

            return step
        return lambda: copy_memory(target.device, handles[to], origin.device, handles[source], nbytes)


def _at_once() -> bool:
    return True


def _waits_for_readers(what: UOp) -> bool:
    """Not for those who write."""
    return what.op is Ops.SETTLE and not any(m.is_written for m in what.arg)
