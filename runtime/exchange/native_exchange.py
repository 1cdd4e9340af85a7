"""The calls of a small collective over shared memory as one native call, as far as all goes well.

A step of Python costs more than a short message takes. `native_run` gives the tables of `native/exchange.py` for the
calls of an `Exchange`, or None where one of them is not for that: a peer that is not on this host, memory that is not
in the arena, a kernel that is not a CPU's. When the native call stops early, because a peer is late, say, `run` tells
at which call, and the Exchange goes on from there in Python, which has deadlines and errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from manygrad.collectives.transport import wire
from manygrad.collectives.transport.endpoint import Borrowed, Endpoint, Ticket, Traffic
from manygrad.collectives.transport.shm import ShmLink
from manygrad.collectives.transport.wire import MessageKey
from manygrad.native.exchange import (
    COPY,
    HEADER,
    KERNEL,
    RECEIVE,
    RELEASE,
    RUN,
    SEND,
    SETTLE,
    STEP,
    STEP_WORDS,
)
from manygrad.native.memory import table
from manygrad.runtime.devices.cpu.kernel import CPUKernel
from manygrad.runtime.devices.cpu.threads import team
from manygrad.tensor.uop import MessageArg, Ops, UOp

if TYPE_CHECKING:
    from manygrad.runtime.exchange.exchange import Exchange

SMALL_NBYTES = 1 << 20  # of one message: for longer ones Python's part is small, and copies have better ways


def native_run(exchange: Exchange, body: UOp) -> NativeRun | None:
    endpoint = exchange.endpoint
    if endpoint is None or any(p.nbytes > SMALL_NBYTES or p.device.kind != "CPU" for p in exchange.places):
        return None
    peers = {c.src[0].arg.peer for c in body.src if c.src[0].op in (Ops.SEND, Ops.RECEIVE)}
    links = {peer: link for peer in peers if (link := endpoint.shared_memory(peer)) is not None}
    kernels = {u: k for u, k in exchange.kernels.items() if isinstance(k, CPUKernel) and k.record is None}
    if not body.src or len(links) < len(peers) or len(kernels) < len(exchange.kernels):
        return None
    made = NativeRun(exchange, body, endpoint, links, kernels)
    return made if made.may_send() else None


class NativeRun:
    """One collective of one worker as a table for native code. Large: its words."""

    def __init__(
        self,
        exchange: Exchange,
        body: UOp,
        endpoint: Endpoint,
        links: dict[int, ShmLink],
        kernels: dict[UOp, CPUKernel],
    ) -> None:
        self.exchange, self.endpoint, self.links, self.body = exchange, endpoint, links, body
        self.kernels = kernels
        self.rows: list[list[int]] = []
        self.calls: list[int] = []  # of each step: the number of its call
        self.kept: list[Any] = []
        self.headers: list[Any] = []
        self.sends: dict[MessageArg, int] = {}  # the steps of messages
        self.receives: dict[UOp, int] = {}  # by what is borrowed
        self.at: list[int] = []  # places that are sent
        for n, call in enumerate(body.src):
            before = len(self.rows)
            self._add(call)
            self.calls += [n] * (len(self.rows) - before)
        self.steps = table(STEP_WORDS * max(1, len(self.rows)))
        base, size = ctypes.addressof(self.steps), 8 * STEP_WORDS
        for i, row in enumerate(self.rows):
            if row[0] in (RELEASE, SETTLE):  # (of a step, not of its number)
                row[STEP["OF"]] = base + size * row[STEP["OF"]]
            self.steps[i * STEP_WORDS : (i + 1) * STEP_WORDS] = row
        self.table = table(len(RUN))
        self._set("STEPS", base)
        self._set("STEP_COUNT", len(self.rows))
        self._set("PLACES", ctypes.addressof(exchange.addresses))
        self._set("ARENA", endpoint.arena.base)
        self._set("TEAM", team().run_address)
        self.plan: int | None = None
        self.messages = self._messages()
        self.traffic = self._traffic(len(body.src))
        self.peers = list(links.values())

    def may_send(self) -> bool:
        """Whether all that is sent lies in the arena."""
        arena, e = self.endpoint.arena, self.exchange
        return all(arena.contains(e.addresses[n], e.places[n].nbytes) for n in self.at)

    def run(self, plan: int, sequence: int) -> int:
        """How many calls were carried out; of those the Exchange has what it needs to go on."""
        self.carry(plan)
        self._set("SEQUENCE", ctypes.c_int64(sequence).value)
        self._set("SCRATCH", team().ready())
        return self.ended(self.endpoint.native.run(self.table, self.peers), plan, sequence)

    def carry(self, plan: int) -> None:
        """From now on that is what all messages carry."""
        if plan != self.plan:
            self.plan = plan
            for header in self.headers:
                header[_PLAN] = ctypes.c_int64(plan).value

    def ended(self, stopped: int, plan: int, sequence: int) -> int:
        """As `run`, after a native call that came to step `stopped`."""
        done = len(self.body.src) if stopped == len(self.rows) else self.calls[stopped]
        self._count(done)
        if done < len(self.body.src):
            self._hand_over(done, plan, sequence)
        return done

    # --- tables

    def _add(self, call: UOp) -> None:
        what, *args = call.src
        places = [self.exchange.numbers[a] for a in args]
        if what.op is Ops.SEND:
            self.sends[what.arg] = len(self.rows)
            self.at.append(places[0])
            self._row(SEND, what.arg.peer, PLACE=places[0], HEADER=self._header(call, self.endpoint.rank))
        elif what.op is Ops.RECEIVE:
            self._receive(call, places[0])
        elif what.op is Ops.RELEASE:
            step = self.receives[args[0]]
            self._row(RELEASE, self._peer_of(step), OF=step)
        elif what.op is Ops.SETTLE:
            for m in what.arg:
                self._row(SETTLE, m.peer, OF=self.sends[m])
        elif what.op is Ops.COPY:
            self._row(COPY, None, PLACE=places[0], OF=places[1], NBYTES=self.exchange.places[places[0]].nbytes)
        else:
            self._kernel(self.kernels[what], places)

    def _receive(self, call: UOp, place: int) -> None:
        what, target = call.src
        step, at = len(self.rows), place if target.op is Ops.BUFFER else self.exchange.spare
        self._row(RECEIVE, what.arg.peer, PLACE=at, HEADER=self._header(call, what.arg.peer))
        if target.op is Ops.BUFFER:
            self.receives[target] = step
        else:
            self._row(COPY, None, PLACE=place, OF=at, NBYTES=self.exchange.places[place].nbytes)
            self._row(RELEASE, what.arg.peer, OF=step)

    def _kernel(self, kernel: CPUKernel, places: Sequence[int]) -> None:
        assert kernel.fixed is not None
        buffers, args = table(max(1, len(places))), table(max(1, len(places)))
        args[: len(places)] = list(places)
        self.kept += [kernel, buffers, args]
        self._row(
            KERNEL, None, FUNCTION=kernel.address, BUFFERS=ctypes.addressof(buffers), ARGS=ctypes.addressof(args),
            COUNT=len(places), TOTAL=kernel.fixed[0], GRAIN=kernel.fixed[1],
        )  # fmt: skip

    def _header(self, call: UOp, source: int) -> int:
        """The address of the message's header, but for its sequence, number and place."""
        what, arg = call.src
        e, nbytes = self.endpoint, self.exchange.places[self.exchange.numbers[arg]].nbytes
        packed = wire.pack(e.header(source, MessageKey(0, 0, what.arg.number), what.dtype.name, nbytes))
        header = table(wire.SIZE // 8)
        ctypes.memmove(header, packed, wire.SIZE)
        self.headers.append(header)
        return ctypes.addressof(header)

    def _row(self, kind: int, peer: int | None, **words: int) -> None:
        row = [kind] + [0] * (STEP_WORDS - 1)
        if peer is not None:
            row[STEP["LINK"]] = ctypes.addressof(self.links[peer].record)
        for name, value in words.items():
            row[STEP[name]] = value
        self.rows.append(row)

    def _peer_of(self, step: int) -> int:
        link = self.rows[step][STEP["LINK"]]
        return next(peer for peer, x in self.links.items() if ctypes.addressof(x.record) == link)

    def _set(self, name: str, value: int) -> None:
        self.table[RUN.index(name)] = value

    # --- after a run

    def _number(self, step: int) -> int:
        return int(self.steps[step * STEP_WORDS + STEP["NUMBER"]])

    def _messages(self) -> list[tuple[int, int, bool]]:
        """(number of its call, bytes, whether it is sent) of each message."""
        places, numbers = self.exchange.places, self.exchange.numbers
        return [
            (n, places[numbers[call.src[1]]].nbytes, call.src[0].op is Ops.SEND)
            for n, call in enumerate(self.body.src)
            if call.src[0].op in (Ops.SEND, Ops.RECEIVE)
        ]

    def _count(self, done: int) -> None:
        if done == len(self.body.src):
            self.endpoint.add(self.traffic)
        else:
            self.endpoint.add(self._traffic(done))

    def _traffic(self, calls: int) -> Traffic:
        """Traffic of the first so many calls."""
        sent = [nbytes for n, nbytes, is_sent in self.messages if n < calls and is_sent]
        return Traffic(sum(sent), sum(b for n, b, is_sent in self.messages if n < calls and not is_sent), len(sent))

    def _hand_over(self, done: int, plan: int, sequence: int) -> None:
        """Tells the Exchange what it needs to go on after the first `done` calls: what it has sent, and what is
        borrowed."""
        e, exchange = self.endpoint, self.exchange
        for call in self.body.src[:done]:
            what = call.src[0]
            if what.op is Ops.SEND:
                number = self._number(self.sends[what.arg])
                ticket = Ticket(what.arg.peer, number, MessageKey(plan, sequence, what.arg.number))
                exchange.tickets[what.arg] = e.outstanding(ticket)
            elif what.op is Ops.RECEIVE and call.src[1] in self.receives:
                n, link = exchange.numbers[call.src[1]], self.links[what.arg.peer]
                number, nbytes = self._number(self.receives[call.src[1]]), exchange.places[n].nbytes
                release = lambda link=link, number=number: link.release(number)  # noqa: E731
                exchange.lend(n, Borrowed(exchange.addresses[n], nbytes, release))
            elif what.op is Ops.RELEASE:
                del exchange.borrowed[exchange.numbers[call.src[1]]]
            elif what.op is Ops.SETTLE:
                for m in what.arg:
                    e.settle(exchange.tickets[m])  # (it is: nothing is left to wait for)


_PLAN = 3  # the word of a header
assert HEADER["AT_SEQUENCE"] == _PLAN + 1
