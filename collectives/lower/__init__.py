"""From a Program to the calls of one worker: SEND, RECEIVE, RELEASE and SETTLE, COPY, and kernels that reduce.

    0 -> 1: in[2:3] as s0                        CALL SEND to 1, message 0 (VIEW(in, 2:3))
    1 -> 0: in[0:2] as s1                        CALL RECEIVE from 1, message 0 (lent)
    0: out[0:2] = add(in[0:2], s1)      ==>      CALL kernel (VIEW(out, 0:2), VIEW(in, 0:2), lent)
    0: release s1                                CALL RELEASE (lent)
    ...                                          CALL SETTLE message 0 (VIEW(in, 2:3))

They stand in a LINEAR over PARAMs: `out` of each of the worker's ranks, `in` of each, then temporaries. A RECEIVE into
a BUFFER borrows: the BUFFER is where the message lies, in memory of the transport or of the sender, until its RELEASE;
a RECEIVE into a PARAM puts the message there. What is sent is lent until its SETTLE. Messages to each worker are
numbered in their order.

What one rank reads of another rank of the same worker is read where it lies. Where the host does not see a device's
memory, messages pass through temporaries of the CPU, and what devices read of each other is copied.

Every send is moved up to where its data is ready, so that peers do not wait for our receives (a send never blocks, and
the order of the messages to each peer stays); every receive down to where its data is first read, and it is released
right after it was last read. What is only copied is received into its place.

What is sent to be written (`put.py`) is a place of the result: the kernel that reduces stores there, too, and the
SETTLE waits until it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from manygrad.collectives.algorithms import build
from manygrad.collectives.cost import choose, message_nbytes
from manygrad.collectives.cut import cut
from manygrad.collectives.lower.calls import Calls
from manygrad.collectives.lower.memory import CallMemory, CallTemporary, device_of
from manygrad.collectives.lower.received import Received
from manygrad.collectives.lower.sent import Sent
from manygrad.collectives.program import Collective, Copy, Program, Reduce, Slot, Source, Transfer
from manygrad.collectives.reduction import GROUP, reduction
from manygrad.collectives.wanted import describe, group_of
from manygrad.multi.world import World
from manygrad.tensor.dtype import DType, accumulate_dtype
from manygrad.tensor.uop import Members, Ops, UOp
from manygrad.tensor.uop.args import finish_of, terms_dtype
from manygrad.tensor.uop.shape import numel


class Body(NamedTuple):
    """One worker's calls, over PARAMs: each rank's `out`, each rank's `in`, `temps`."""

    linear: UOp
    temps: tuple[CallTemporary, ...]


@dataclass(frozen=True)
class CollectiveChoice:
    """How a collective is carried out, on which all workers agree: by which algorithm, over elements of which type, in
    messages of how many bytes at most (0: of any length), and what results are of sums. `owners`: the worker that holds
    each rank; `devices`: its device, by its local name."""

    algorithm: str
    collective: Collective
    dtype: DType
    owners: tuple[int, ...]
    devices: tuple[str, ...]
    piece_nbytes: int
    finish: UOp | None

    def ranks_of(self, worker: int) -> tuple[int, ...]:
        return tuple(r for r, owner in enumerate(self.owners) if owner == worker)

    def body(self, ranks: Iterable[int], on_host: Callable[[str], bool]) -> Body:
        """The calls of the worker that holds `ranks`."""
        program = build(self.algorithm, self.collective, tuple(ranks))
        devices = {r: self.devices[r] for r in program.only}
        return lower(program, self.dtype, self.owners, devices, self.piece_nbytes, on_host, self.finish)


def choose_for(what: UOp, world: World, on_host: Callable[[str], bool]) -> CollectiveChoice:
    """How a collective of the graph is cheapest on the links of the world. `on_host(device)`: whether the host sees its
    memory."""
    members = what.arg.members
    c = replace(describe(what)[0], group=group_of(members.devices, world))
    dtype = terms_dtype(what)
    shared = _share_memory(members, world, on_host)
    return CollectiveChoice(
        choose(c.kind, c.count * dtype.itemsize, c.ranks, c.group, world.link, shared),
        c,
        dtype,
        tuple(world.rank_of(d) if world.size > 1 else 0 for d in members.devices),
        tuple(d.partition("@")[0] for d in members.devices),
        message_nbytes(c.count * dtype.itemsize, c.ranks, world.link),
        finish_of(what.arg),
    )


def lower(
    program: Program,
    dtype: DType,
    workers: Sequence[int],
    devices: Mapping[int, str],
    piece_nbytes: int = 0,
    on_host: Callable[[str], bool] = lambda device: True,
    finish: UOp | None = None,
) -> Body:
    """The calls of the worker that holds the ranks of `program`, over elements of `dtype`.

    `workers`: which worker holds each rank; `devices`: of each rank of `program`, by its local name. Messages are of
    `piece_nbytes` at most, on all workers alike; 0: of any length. `finish`: what results are of sums, over PARAM 0; of
    no larger type than `dtype`. Raises `ValueError` where the program is of ranks of several workers, or of one rank
    that sums nothing and has to finish it.
    """
    if finish is not None and program.collective.ranks == 1:
        raise ValueError("one rank sums nothing that it could finish")
    if any(isinstance(i, Transfer) and i.is_written for i in program.instrs) and not all(
        map(on_host, devices.values())
    ):
        raise ValueError(f"{program.algorithm} writes memory of other ranks, which the host does not see")
    if len({workers[r] for r in program.only}) > 1:
        raise ValueError(f"the program holds ranks {sorted(program.only)}, of the workers {sorted(set(workers))}")
    if piece_nbytes:
        program = cut(program, piece_nbytes // max(dtype.itemsize, accumulate_dtype(dtype).itemsize))
    return _WorkerLowering(program, dtype, workers, devices, on_host, finish).body()


def _share_memory(members: Members, world: World, on_host: Callable[[str], bool]) -> bool:
    """Whether ranks may write each other's memory; the same on all workers."""
    kinds = {d.partition(":")[0] for d in members.devices}
    seen = all(on_host(members.devices[r].partition("@")[0]) for r in members.mine)
    return (world.link is None or world.link.route == "shm") and len(kinds) == 1 and seen


def sent_nbytes(body: UOp) -> int:
    return sum(numel(call.src[1].shape) * call.src[1].dtype.itemsize for call in body.src if call.src[0].op is Ops.SEND)


class _WorkerLowering:
    """One worker's way through the instructions of its program."""

    def __init__(
        self,
        program: Program,
        dtype: DType,
        workers: Sequence[int],
        devices: Mapping[int, str],
        on_host: Callable[[str], bool],
        finish: UOp | None,
    ) -> None:
        self.program, self.workers, self.devices, self.on_host = program, workers, devices, on_host
        self.finish = finish
        self.calls = Calls()
        self.memory = CallMemory(program, dtype, dtype if finish is None else finish.dtype, devices)
        self.sent = Sent(self.calls, self.memory, on_host)
        self.received = Received(self.calls, self.memory, on_host)
        self.reads = _reads(program)

    def body(self) -> Body:
        for i in self.program.instrs:
            if isinstance(i, Transfer):
                self.transfer(i)
            elif isinstance(i, Reduce):
                self.reduce(i)
            elif isinstance(i, Copy):
                self.copy(i)
            else:
                self.received.release((i.rank, i.slot))
        self.sent.settle_all()
        return Body(self.calls.linear(), tuple(self.memory.temps))

    def transfer(self, i: Transfer) -> None:
        here = self.program.only
        if i.src_rank not in here:
            dtype = self.memory.dtype_of(i.src.buffer)
            self.received.expect(
                (i.dst_rank, i.slot),
                self.workers[i.src_rank],
                i.src.length,
                dtype,
                self.devices[i.dst_rank],
                i.is_written,
            )
        elif i.dst_rank in here:
            self.received.slots[i.dst_rank, i.slot] = self.memory.chunk(i.src_rank, i.src)
        else:
            self.sent.send(i, self.workers[i.dst_rank], self.devices[i.src_rank])

    def reduce(self, i: Reduce) -> None:
        self.received.await_all(i.rank, (*i.copies, *i.srcs))
        sources = [self.source(i.rank, s) for s in i.srcs]
        while len(sources) > GROUP:
            sources = [self.subtree(i, sources[k : k + GROUP]) for k in range(0, len(sources), GROUP)]
        self.sent.before_write(i.rank, i.dst)
        # (what is once in `out` is summed no more: `checker.py`)
        targets = [self.memory.chunk(i.rank, i.dst), *(self.received.slots[i.rank, s.name] for s in i.copies)]
        self.call_kernel(i, targets, sources, is_last=i.dst.buffer == "out")
        self.received.was_read(i.rank, (*i.srcs, *i.copies))

    def subtree(self, i: Reduce, sources: list[UOp]) -> UOp:
        if len(sources) == 1:
            return sources[0]
        total = self.memory.temp(i.dst.length, self.memory.partial, self.devices[i.rank])
        self.call_kernel(i, [total], sources)
        return total

    def call_kernel(self, i: Reduce, targets: list[UOp], sources: list[UOp], is_last: bool = False) -> None:
        finish = self.finish if is_last else None
        d = targets[0].dtype if finish is None else self.memory.element
        kernel = reduction(i.op, i.dst.length, d, [s.dtype for s in sources], finish, len(targets) - 1)
        self.calls.add(kernel, *targets, *sources)

    def copy(self, i: Copy) -> None:
        target, device = self.memory.chunk(i.rank, i.dst), self.devices[i.rank]
        if isinstance(i.src, Slot) and self.on_host(device) and self.is_only_copied(i.rank, i.src):
            message = self.received.in_place((i.rank, i.src.name))
            self.sent.before_write(i.rank, i.dst)
            self.calls.add(UOp(Ops.RECEIVE, target.dtype, (), message), target)
            return
        self.received.await_all(i.rank, (i.src,))
        source = self.source(i.rank, i.src, copied=True)
        self.sent.before_write(i.rank, i.dst)
        self.calls.copy(target, source, device)
        self.received.was_read(i.rank, (i.src,))

    def is_only_copied(self, rank: int, slot: Slot) -> bool:
        """Whether a message of another worker is read by one copy alone: it then is received in its place."""
        key = (rank, slot.name)
        return self.received.is_awaited(key) and self.reads[key] == 1

    def source(self, rank: int, s: Source, copied: bool = False) -> UOp:
        """Memory that a call of `rank` reads: a copy of that of another device, which it does not see."""
        view = self.received.slots[rank, s.name] if isinstance(s, Slot) else self.memory.chunk(rank, s)
        mine, theirs = self.devices[rank], device_of(view)
        if copied or mine == theirs or (self.on_host(mine) and self.on_host(theirs)):
            return view
        own = self.memory.temp(numel(view.shape), view.dtype, mine)
        self.calls.copy(own, view, mine)
        return own


def _reads(program: Program) -> Counter[tuple[int, str]]:
    """How many instructions read each slot."""
    readers = (i for i in program.instrs if isinstance(i, Copy | Reduce))
    sources = ((i.rank, s) for i in readers for s in (i.srcs if isinstance(i, Reduce) else (i.src,)))
    return Counter((rank, s.name) for rank, s in sources if isinstance(s, Slot))
