"""The steps of a small collective over shared memory as words, for one native call to run as far as all goes well.

A step of Python costs more than a short message takes. `native_run` makes the tables of `native/exchange.py` for the
steps of an `Exchange`, one row a step, or gives None where one of them is not for that: a peer that is not on this
host, memory that is not in the arena, a kernel that is not a CPU's. When the native call stops early, because a peer is
late, say, the Exchange goes on from that step in Python, which has deadlines and errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.collectives.transport import wire
from manygrad.collectives.transport.endpoint import Endpoint, Traffic
from manygrad.collectives.transport.shm import ShmLink
from manygrad.collectives.transport.wire import MessageKey
from manygrad.native.exchange import COPY, HEADER, KERNEL, RECEIVE_INTO, RELEASE, RUN, SEND, SETTLE, STEP, STEP_WORDS
from manygrad.native.memory import table
from manygrad.native.words import signed
from manygrad.runtime.devices.cpu.kernel import CPUKernel
from manygrad.runtime.devices.cpu.threads import team
from manygrad.runtime.exchange.memory import BoundMemory
from manygrad.runtime.exchange.steps import MESSAGES, ExchangeStep

_SEQUENCE, _SCRATCH = RUN.index("SEQUENCE"), RUN.index("SCRATCH")
SMALL_NBYTES = 1 << 20  # of one message: for longer ones Python's part is small, and copies have better ways


def native_run(steps: list[ExchangeStep], memory: BoundMemory, endpoint: Endpoint | None) -> NativeRun | None:
    """The steps for native code, if all of them are for that."""
    if endpoint is None or any(p.nbytes > SMALL_NBYTES or p.device.kind != "CPU" for p in memory.places):
        return None
    peers = {s.peer for s in steps if s.kind in MESSAGES}
    links = {peer: link for peer in peers if (link := endpoint.shared_memory(peer)) is not None}
    kernels = [s.kernel for s in steps if s.kernel is not None]
    if not steps or len(links) < len(peers):
        return None
    if not all(isinstance(k, CPUKernel) and k.record is None for k in kernels):
        return None
    made = NativeRun(steps, memory, endpoint, links)
    return made if made.may_send() else None


class NativeRun:
    """One collective of one worker as a table for native code."""

    def __init__(
        self, steps: list[ExchangeStep], memory: BoundMemory, endpoint: Endpoint, links: dict[int, ShmLink]
    ) -> None:
        self.steps, self.memory, self.endpoint, self.links = steps, memory, endpoint, links
        self.kept: list[Any] = []
        self.headers: list[Any] = []
        self.rows = table(STEP_WORDS * len(steps))
        for n, step in enumerate(steps):
            for name, value in self._words(step).items():
                self.rows[STEP_WORDS * n + STEP[name]] = value
        self.table = RUN.table(
            STEPS=ctypes.addressof(self.rows),
            STEP_COUNT=len(steps),
            PLACES=ctypes.addressof(memory.addresses),
            ARENA=endpoint.arena.base,
            TEAM=team().run_address,
        )
        self.plan: int | None = None
        self.traffic = self._traffic(len(steps))
        self.peers = list(links.values())

    def may_send(self) -> bool:
        """Whether all that is sent lies in the arena."""
        arena, addresses = self.endpoint.arena, self.memory.addresses
        return all(arena.contains(addresses[s.place], s.nbytes) for s in self.steps if s.kind == SEND)

    def run(self, plan: int, sequence: int) -> int:
        """The number of the first step that was not carried out."""
        self.carry(plan)
        self.table[_SEQUENCE], self.table[_SCRATCH] = signed(sequence), team().ready()
        return self.endpoint.native.run(self.table, self.peers)

    def carry(self, plan: int) -> None:
        """From now on that is what all messages carry."""
        if plan != self.plan:
            self.plan = plan
            for header in self.headers:
                header[HEADER["AT_PLAN"]] = signed(plan)

    # --- after a run

    def count(self, stopped: int) -> None:
        """Counts the messages of a run that came to step `stopped`."""
        self.endpoint.add(self.traffic if stopped == len(self.steps) else self._traffic(stopped))

    def number(self, step: int) -> int:
        """Number of the message that a step has sent or received."""
        return int(self.rows[step * STEP_WORDS + STEP["NUMBER"]])

    def release_of(self, step: int) -> Callable[[], None]:
        """Gives back what a step has received."""
        link, number = self.links[self.steps[step].peer], self.number(step)
        return lambda: link.release(number)

    def _traffic(self, end: int) -> Traffic:
        """Traffic of the first so many steps."""
        messages = [(s.kind == SEND, s.nbytes) for s in self.steps[:end] if s.kind in MESSAGES]
        sent = [nbytes for is_sent, nbytes in messages if is_sent]
        return Traffic(sum(sent), sum(nbytes for is_sent, nbytes in messages if not is_sent), len(sent))

    # --- words

    def _words(self, step: ExchangeStep) -> dict[str, int]:
        kind = {"KIND": step.kind}
        if step.kind in MESSAGES:
            source = self.endpoint.rank if step.kind == SEND else step.peer
            words = {"LINK": self._link(step), "PLACE": step.place, "HEADER": self._header(step, source)}
            into = {"PLACE": self.memory.spare, "TO": step.place, "NBYTES": step.nbytes}
            return kind | words | (into if step.kind == RECEIVE_INTO else {})
        if step.kind in (RELEASE, SETTLE):
            of = ctypes.addressof(self.rows) + 8 * STEP_WORDS * step.of
            return kind | {"LINK": self._link(self.steps[step.of]), "OF": of}
        if step.kind == COPY:
            return kind | {"TO": step.place, "PLACE": step.source, "NBYTES": step.nbytes}
        assert step.kind == KERNEL and isinstance(step.kernel, CPUKernel)
        return kind | self._kernel(step.kernel, step.places)

    def _link(self, step: ExchangeStep) -> int:
        return ctypes.addressof(self.links[step.peer].record)

    def _kernel(self, kernel: CPUKernel, places: Sequence[int]) -> dict[str, int]:
        assert kernel.fixed is not None
        buffers, args = table(max(1, len(places))), table(max(1, len(places)))
        args[: len(places)] = list(places)
        self.kept += [kernel, buffers, args]
        at = {"FUNCTION": kernel.address, "BUFFERS": ctypes.addressof(buffers), "ARGS": ctypes.addressof(args)}
        return at | {"COUNT": len(places), "TOTAL": kernel.fixed[0], "GRAIN": kernel.fixed[1]}

    def _header(self, step: ExchangeStep, source: int) -> int:
        """The address of the message's header, but for its sequence, number and place."""
        header = table(wire.SIZE // 8)
        packed = wire.pack(self.endpoint.header(source, MessageKey(0, 0, step.number), step.dtype, step.nbytes))
        ctypes.memmove(header, packed, wire.SIZE)
        self.headers.append(header)
        return ctypes.addressof(header)
