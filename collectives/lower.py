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

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from manygrad.collectives.algorithms import build
from manygrad.collectives.cost import choose, message_nbytes
from manygrad.collectives.cut import cut
from manygrad.collectives.program import Chunk, Copy, Program, Reduce, Release, Slot, Source, Transfer
from manygrad.collectives.reduction import GROUP, reduction
from manygrad.collectives.wanted import describe, group_of
from manygrad.multi.world import World
from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes
from manygrad.tensor.uop import BufferSpec, Members, MessageArg, Ops, UOp, ViewArg
from manygrad.tensor.uop.args import finish_of, terms_dtype
from manygrad.tensor.uop.shape import numel

HOST = "CPU"  # whose memory messages pass through where the host does not see a device's


class Temp(NamedTuple):
    """A temporary that the calls are given."""

    size: int  # elements
    dtype: DType
    device: str


class Body(NamedTuple):
    """One worker's calls, over PARAMs: each rank's `out`, each rank's `in`, `temps`."""

    linear: UOp
    temps: tuple[Temp, ...]


def lower_collective(what: UOp, world: World, on_host: Callable[[str], bool]) -> Body:
    """The calls of this worker for a collective of the graph, by the algorithm that is cheapest on the links of the
    world. `on_host(device)`: whether the host sees its memory."""
    members = what.arg.members
    c = replace(describe(what)[0], group=group_of(members.devices, world))
    dtype = terms_dtype(what)
    shared = _share_memory(members, world, on_host)
    name = choose(c.kind, c.count * dtype.itemsize, c.ranks, c.group, world.link, shared)
    owners = [world.rank_of(d) if world.size > 1 else 0 for d in members.devices]
    own = {r: members.devices[r].partition("@")[0] for r in members.mine}
    piece = message_nbytes(c.count * dtype.itemsize, c.ranks, world.link)
    return lower(build(name, c, members.mine), dtype, owners, own, piece, on_host, finish_of(what.arg))


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
    return _Lowering(program, dtype, workers, devices, on_host, finish).body()


def _share_memory(members: Members, world: World, on_host: Callable[[str], bool]) -> bool:
    """Whether ranks may write each other's memory; the same on all workers."""
    kinds = {d.partition(":")[0] for d in members.devices}
    seen = all(on_host(members.devices[r].partition("@")[0]) for r in members.mine)
    return (world.link is None or world.link.route == "shm") and len(kinds) == 1 and seen


def sent_nbytes(body: UOp) -> int:
    return sum(numel(call.src[1].shape) * call.src[1].dtype.itemsize for call in body.src if call.src[0].op is Ops.SEND)


@dataclass
class _Lent:
    """A part of a buffer that another worker may read."""

    start: int
    end: int
    message: MessageArg
    view: UOp


class _Lowering:
    """The calls in the making: (place, number, call); in the end they are put in the order of their places."""

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
        self.element, self.partial = dtype, accumulate_dtype(dtype)
        self.finish, self.result = finish, dtype if finish is None else finish.dtype
        self.calls: list[tuple[float, int, UOp]] = []
        self.temps: list[Temp] = []
        self.buffers: dict[tuple[int, str], UOp] = {}  # PARAMs by rank and name
        c, ranks = program.collective, sorted(program.only)
        for name, length, d in (("out", c.out_length, self.result), ("in", c.in_length, dtype)):
            for r in ranks:
                self.buffers[r, name] = _param(len(self.buffers), length(r), d, devices[r])
        self.given = len(self.buffers)
        for t in program.temps:
            self.buffers[t.rank, t.name] = self.temp(t.length, self.partial if t.partial else dtype, devices[t.rank])
        self.numbers: Counter[int] = Counter()  # of messages to and from each worker
        self.lent: dict[tuple[int, str], list[_Lent]] = {}
        self.unsettled: dict[MessageArg, UOp] = {}
        self.last_send: dict[int, float] = {}  # by receiver: its place
        self.writes: dict[tuple[int, str], list[tuple[int, int, int]]] = {}  # (start, end, place)
        # slots: what is to be read; by sender those that are still awaited; the place of the last read of those lent
        self.slots: dict[tuple[int, str], UOp] = {}
        self.awaited: dict[int, deque[tuple[tuple[int, str], MessageArg]]] = {}
        self.senders: dict[tuple[int, str], int] = {}
        self.lengths: dict[tuple[int, str], tuple[int, DType]] = {}
        self.read_at: dict[tuple[int, str], int] = {}
        self.borrowed = 0
        self.reads = Counter(
            (i.rank, s.name)
            for i in program.instrs
            if isinstance(i, Copy | Reduce)
            for s in _sources(i)
            if isinstance(s, Slot)
        )

    def body(self) -> Body:
        for i in self.program.instrs:
            if isinstance(i, Transfer):
                self.transfer(i)
            elif isinstance(i, Reduce):
                self.reduce(i)
            elif isinstance(i, Copy):
                self.copy(i)
            else:
                self.release(i)
        if self.unsettled:
            self.settle(self.unsettled)
        calls = [call for _, _, call in sorted(self.calls, key=lambda c: c[:2])]
        return Body(UOp(Ops.LINEAR, dtypes.void, tuple(calls)), tuple(self.temps))

    # --- instructions

    def transfer(self, i: Transfer) -> None:
        here = self.program.only
        sender, receiver = self.workers[i.src_rank], self.workers[i.dst_rank]
        if i.src_rank in here and i.dst_rank in here:
            self.slots[i.dst_rank, i.slot] = self.chunk(i.src_rank, i.src)
        elif i.src_rank in here:
            self.send(i, receiver)
        else:
            d = {"in": self.element, "out": self.result}.get(
                i.src.buffer, self.partial
            )  # (of temporaries: partial sums)
            self.lengths[i.dst_rank, i.slot] = i.src.length, d
            self.senders[i.dst_rank, i.slot] = sender
            message = MessageArg(sender, self.number(sender, receives=True), i.is_written)
            self.awaited.setdefault(sender, deque()).append(((i.dst_rank, i.slot), message))

    def send(self, i: Transfer, receiver: int) -> None:
        view = self.chunk(i.src_rank, i.src)
        at = self.last_send[receiver] = max(self.last_send.get(receiver, -1.0), self.ready(i.src_rank, i.src))
        message = MessageArg(receiver, self.number(receiver, receives=False), i.is_written)
        if self.on_host(self.devices[i.src_rank]):
            lent = _Lent(i.src.offset, i.src.end, message, view)
            self.lent.setdefault((i.src_rank, i.src.buffer), []).append(lent)
        else:
            staged = self.temp(i.src.length, view.dtype, HOST)
            self.emit(_copy(staged, view, HOST), at)
            view = staged
        self.unsettled[message] = view
        self.emit(_call(UOp(Ops.SEND, view.dtype, (), message), view), at)

    def reduce(self, i: Reduce) -> None:
        self.await_all(i.rank, (*i.copies, *i.srcs))
        sources = [self.source(i.rank, s) for s in i.srcs]
        while len(sources) > GROUP:
            sources = [self.subtree(i, sources[k : k + GROUP]) for k in range(0, len(sources), GROUP)]
        self.written(i.rank, i.dst)
        # (what is once in `out` is summed no more: `checker.py`)
        targets = [self.chunk(i.rank, i.dst), *(self.slots[i.rank, s.name] for s in i.copies)]
        self.call_kernel(i, targets, sources, is_last=i.dst.buffer == "out")
        self.was_read(i.rank, (*i.srcs, *i.copies))

    def subtree(self, i: Reduce, sources: list[UOp]) -> UOp:
        if len(sources) == 1:
            return sources[0]
        total = self.temp(i.dst.length, self.partial, self.devices[i.rank])
        self.call_kernel(i, [total], sources)
        return total

    def call_kernel(self, i: Reduce, targets: list[UOp], sources: list[UOp], is_last: bool = False) -> None:
        finish = self.finish if is_last else None
        d = targets[0].dtype if finish is None else self.element
        kernel = reduction(i.op, i.dst.length, d, [s.dtype for s in sources], finish, len(targets) - 1)
        self.emit(_call(kernel, *targets, *sources))

    def copy(self, i: Copy) -> None:
        key = (i.rank, i.src.name) if isinstance(i.src, Slot) else None
        target = self.chunk(i.rank, i.dst)
        if key in self.senders and key not in self.read_at and self.reads[key] == 1:
            if self.on_host(self.devices[i.rank]):
                message = self.next_message(key)
                self.written(i.rank, i.dst)
                self.emit(_call(UOp(Ops.RECEIVE, target.dtype, (), message), target))
                self.read_at[key] = -1
                return
        self.await_all(i.rank, (i.src,))
        source = self.source(i.rank, i.src, copied=True)
        self.written(i.rank, i.dst)
        self.emit(_copy(target, source, self.devices[i.rank]))
        self.was_read(i.rank, (i.src,))

    def release(self, i: Release) -> None:
        key = (i.rank, i.slot)
        if key in self.senders:
            self.receive_until(key)
            at = self.read_at.pop(key)
            del self.senders[key]
            if at >= 0:
                self.emit(_call(UOp(Ops.RELEASE, self.slots[key].dtype), self.slots[key]), at + 0.75)

    # --- memory

    def temp(self, count: int, dtype: DType, device: str) -> UOp:
        self.temps.append(Temp(count, dtype, device))
        return _param(self.given + len(self.temps) - 1, count, dtype, device)

    def chunk(self, rank: int, c: Chunk) -> UOp:
        buffer = self.buffers[rank, c.buffer]
        if c.offset == 0 and (c.length,) == buffer.arg.shape:
            return buffer
        return UOp(Ops.VIEW, buffer.dtype, (buffer,), ViewArg(c.offset, (c.length,)))

    def source(self, rank: int, s: Source, copied: bool = False) -> UOp:
        """What a call of `rank` reads: of memory of another device that it does not see, a copy."""
        view = self.slots[rank, s.name] if isinstance(s, Slot) else self.chunk(rank, s)
        mine, theirs = self.devices[rank], _device(view)
        if copied or mine == theirs or (self.on_host(mine) and self.on_host(theirs)):
            return view
        own = self.temp(numel(view.shape), view.dtype, mine)
        self.emit(_copy(own, view, mine))
        return own

    def written(self, rank: int, c: Chunk) -> None:
        """Before a write to `c`: settles what was lent of it; then takes note of the write."""
        lent = self.lent.get((rank, c.buffer), [])
        overlap = [x for x in lent if x.start < c.end and c.offset < x.end and x.message in self.unsettled]
        if overlap:
            self.settle({x.message: x.view for x in overlap})
        self.writes.setdefault((rank, c.buffer), []).append((c.offset, c.end, len(self.calls)))

    def settle(self, messages: Mapping[MessageArg, UOp]) -> None:
        self.emit(_call(UOp(Ops.SETTLE, dtypes.void, (), tuple(messages)), *messages.values()))
        self.unsettled = {m: v for m, v in self.unsettled.items() if m not in messages}

    def ready(self, rank: int, c: Chunk) -> float:
        """The place just after the last write to any part of `c`."""
        found = [at for lo, hi, at in self.writes.get((rank, c.buffer), ()) if lo < c.end and c.offset < hi]
        return max(found) + 0.5 if found else -0.5

    # --- messages

    def number(self, worker: int, receives: bool) -> int:
        """The next message's to or from a worker."""
        key = 2 * worker + receives
        self.numbers[key] += 1
        return self.numbers[key] - 1

    def await_all(self, rank: int, srcs: Sequence[Source]) -> None:
        for s in srcs:
            if isinstance(s, Slot) and (rank, s.name) in self.senders:
                self.receive_until((rank, s.name))

    def receive_until(self, key: tuple[int, str]) -> None:
        """Receives what its sender sends up to a slot, if it is still awaited."""
        while key not in self.read_at:
            found, message = self.awaited[self.senders[key]].popleft()
            self.borrow(found, message)

    def next_message(self, key: tuple[int, str]) -> MessageArg:
        """The message of a slot, when all before it from its sender are received."""
        queue = self.awaited[self.senders[key]]
        while queue[0][0] != key:
            self.borrow(*queue.popleft())
        return queue.popleft()[1]

    def borrow(self, key: tuple[int, str], message: MessageArg) -> None:
        (length, d), device = self.lengths[key], self.devices[key[0]]
        seen = self.on_host(device)
        self.borrowed += 1
        spec = BufferSpec(-self.borrowed, (length,), d, device if seen else HOST)
        lent = self.slots[key] = UOp(Ops.BUFFER, d, (), spec)
        self.read_at[key] = len(self.calls)
        self.emit(_call(UOp(Ops.RECEIVE, d, (), message), lent))
        if not seen:
            self.slots[key] = own = self.temp(length, d, device)
            self.emit(_copy(own, lent, device))
            self.emit(_call(UOp(Ops.RELEASE, d), lent))
            self.read_at[key] = -1

    def was_read(self, rank: int, srcs: Sequence[Source]) -> None:
        """By the last call."""
        for s in srcs:
            if isinstance(s, Slot) and self.read_at.get((rank, s.name), -1) >= 0:
                self.read_at[rank, s.name] = len(self.calls) - 1

    def emit(self, call: UOp, at: float | None = None) -> None:
        self.calls.append((float(len(self.calls)) if at is None else at, len(self.calls), call))


def _param(slot: int, count: int, dtype: DType, device: str) -> UOp:
    return UOp(Ops.PARAM, dtype, (), BufferSpec(slot, (count,), dtype, device))


def _call(what: UOp, *args: UOp) -> UOp:
    return UOp(Ops.CALL, dtypes.void, (what, *args))


def _copy(target: UOp, source: UOp, device: str) -> UOp:
    return _call(UOp(Ops.COPY, target.dtype, (), device), target, source)


def _device(view: UOp) -> str:
    device = (view.src[0] if view.op is Ops.VIEW else view).arg.device
    assert isinstance(device, str)
    return device


def _sources(i: Copy | Reduce) -> tuple[Source, ...]:
    return i.srcs if isinstance(i, Reduce) else (i.src,)
