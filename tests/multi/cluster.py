"""Several workers simulated in this process: every rank schedules the same graph as a worker of n does,
and the ranks' calls are run in lockstep.

At each collective all ranks must have come to the same one;
each then carries out its calls, as real workers do, in a thread of its own.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np

from manygrad import Tensor
from manygrad.collectives.transport.endpoint import Borrowed, Ticket
from manygrad.collectives.transport.wire import MessageKey
from manygrad.multi.world import Membership, World
from manygrad.native.memory import bytes_at
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current, use
from manygrad.runtime.engine.linear import compile_linear, pm_exec
from manygrad.runtime.executors.collective import CollectiveItem
from manygrad.runtime.executors.items import run_items
from manygrad.runtime.runtime import Runtime
from manygrad.runtime.storage import STORAGE, storage
from manygrad.schedule import create_linear_with_vars
from manygrad.tensor.uop import GroupOp, Ops, UOp
from tests.schedule.programs import sink_of

Parts = list[np.ndarray | None]  # of one tensor: by device; None for what another worker holds


@contextlib.contextmanager
def workers(size: int, devices_per_node: int = 1, kind: str = "CPU") -> Iterator[World]:
    """The world as rank 0 of `size` workers sees it; programs are built inside."""
    world = World(Membership(rank=0, size=size, local_rank=0, local_size=size, devices_per_node=devices_per_node), kind)
    with use(Runtime(world=world)):
        yield world


def runtime_of(rank: int) -> Runtime:
    """That of another rank of the current world."""
    mine = current().world
    world = World(replace(mine.membership, rank=rank), mine.device_kind)
    world.link = mine.link
    return Runtime(world=world)


def signature(what: UOp) -> tuple[Any, ...]:
    """What all ranks must agree on: all of a collective but whose part of it this is."""
    members = replace(what.arg.members, mine=(), counts=())
    return (what.op.name, what.dtype.name, what.arg._replace(members=members))


def collectives_of(linear: UOp) -> list[tuple[Any, ...]]:
    return [signature(c.src[0]) for c in linear.src if c.src[0].op in GroupOp.COLLECTIVE]


def assert_same_collectives(linears: list[UOp]) -> None:
    """Every rank has the collectives of all devices that rank 0 has, in its order;
    of sends it has those it takes part in."""
    everyone = [[c for c in collectives_of(linear) if c[0] != "POINT_TO_POINT"] for linear in linears]
    for rank, mine in enumerate(everyone):
        assert mine == everyone[0], f"rank {rank} runs {mine}\nrank 0 runs {everyone[0]}"


def lowered(tensors: list[Tensor]) -> list[UOp]:
    """The LINEAR of every rank."""
    sink, ranks = sink_of(tensors), map(runtime_of, range(current().world.size))
    return [create_linear_with_vars(sink, r.world, r.schedules).linear for r in ranks]


def run(tensors: list[Tensor]) -> list[list[Parts]]:
    """`out[rank][tensor][device]`: what each rank computes. The tensors themselves stay as they are."""
    sink = sink_of(tensors)
    targets = [e.src[0] for e in sink.src]
    words = list(current().faults.nodes.items())
    ranks = []
    boxes: Any = defaultdict(SimpleQueue)
    for rank in range(current().world.size):
        with use(runtime_of(rank)) as runtime:
            runtime.communication.endpoint = Mail(rank, boxes)  # type: ignore[assignment]
            ranks.append(_Rank(sink, targets, words))
    assert_same_collectives([r.linear for r in ranks])
    _in_lockstep(ranks)
    return [[[None if b is None else b.copyout() for b in r.memory[t]] for t in targets] for r in ranks]


class Mail:
    """The endpoint of one rank among others of this process: what is sent is copied, and waits for its receiver; or, to
    be written, it is lent until its receiver has."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], SimpleQueue[tuple[MessageKey, str, np.ndarray, Event]]]):
        self.rank, self.boxes = rank, boxes
        self.written: dict[int, Event] = {}
        self.arena = SimpleNamespace(has_failed=False)

    def may_reserve(self, peer: int) -> bool:
        return False

    def shared_memory(self, peer: int) -> None:
        return None

    def send(
        self, peer: int, key: MessageKey, addr: int, nbytes: int, dtype: str, number: int | None, is_written: bool
    ) -> Ticket:
        data, done, n = bytes_at(addr, nbytes), Event(), len(self.written)
        self.boxes[self.rank, peer].put((key, dtype, data if is_written else data.copy(), done))
        self.written[n] = done
        if not is_written:
            done.set()
        return Ticket(peer, n, key)

    def receive(self, peer: int, key: MessageKey, nbytes: int, dtype: str, number: int | None = None) -> Borrowed:
        assert number is None, "messages keep their order here"
        found, kind, data, done = self.boxes[peer, self.rank].get(timeout=120)
        assert (found, kind, data.nbytes) == (key, dtype, nbytes), (found, kind, data.nbytes, key, dtype, nbytes)
        return Borrowed(data.ctypes.data, nbytes, lambda held=data: done.set())

    def receive_into(
        self, peer: int, key: MessageKey, addr: int, nbytes: int, dtype: str, number: int | None = None
    ) -> None:
        with self.receive(peer, key, nbytes, dtype, number) as got:
            bytes_at(addr, nbytes)[:] = bytes_at(got.addr, nbytes)

    def settle(self, ticket: Ticket) -> None:
        assert self.written[ticket.number].wait(20), ticket

    def flush(self) -> None:
        pass


class _Meeting(CollectiveItem):
    """A collective: it waits for the other ranks."""

    def __init__(self, call: UOp, buffers: list[Buffer], plan: int):
        super().__init__(call.src[0], buffers, plan)
        self.what, self.place = call.src[0], call.src[0].arg.members.place


class _Rank:
    """One worker: its LINEAR, the memory of what it computes, and how far it has come."""

    def __init__(self, sink: UOp, targets: list[UOp], words: list[Any]):
        world = current().world
        scheduled = create_linear_with_vars(sink, world, current().schedules)
        self.linear, self.vars = scheduled.linear, scheduled.var_vals
        for (site, _), word in words:
            if word in scheduled.buffers:
                current().faults.attach(word, site)
        saved = dict(pm_exec)
        pm_exec.update(dict.fromkeys(GroupOp.COLLECTIVE, _Meeting))
        try:
            self.items = compile_linear(self.linear, scheduled.buffers)
        finally:
            pm_exec.update(saved)
        self.memory: dict[UOp, list[Buffer | None]] = {}
        for b in targets:
            found = storage(b)
            self.memory[b] = found if isinstance(found, list) else [found if world.is_local(b.arg.device) else None]
            STORAGE.pop(b)  # the next rank has its own
        self.at = 0

    def advance(self) -> _Meeting | None:
        """Runs what comes before the next collective."""
        while self.at < len(self.items) and not isinstance(self.items[self.at], _Meeting):
            run_items([self.items[self.at]], self.vars)
            self.at += 1
        return self.items[self.at] if self.at < len(self.items) else None  # type: ignore[return-value]


def _in_lockstep(ranks: list[_Rank]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        _run_in_lockstep(ranks, pool)


def _run_in_lockstep(ranks: list[_Rank], pool: ThreadPoolExecutor) -> None:
    while True:
        waiting = [(r, m) for r in ranks if (m := r.advance()) is not None]
        if not waiting:
            return
        place = min(m.place for _, m in waiting)
        met = [(r, m) for r, m in waiting if m.place == place]
        what = met[0][1].what
        assert len(met) == (2 if what.op is Ops.POINT_TO_POINT else len(ranks)), (
            f"{signature(what)}: only {len(met)} ranks come to it"
        )
        for done in [pool.submit(m.run, r.vars) for r, m in met]:
            done.result()
        for r, _ in met:
            r.at += 1
