"""Runs a program: once made flat by `prepare`, it is replayed every training step with almost no Python.

`prepare` resolves, for one worker: which transfers cross workers (a send here or a receive there) and which are mere
aliases; registers for buffers and slots; compiled reducers; message numbers. It also
- cuts it in pieces of a frame, where workers of the world are on different hosts (`cut.py`);
- moves every send up to where its data is ready, so that peers do not wait for our receives (a send never blocks, and
  the order of the messages to each peer stays);
- moves every receive down to where its data is first read, and gives it back right after it was last read; what is
  only copied comes into its place, where it comes over ZeroMQ;
- puts a settle before a write to memory that was lent to another worker and since released.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from manygrad.collectives import reducers
from manygrad.collectives.cut import cut
from manygrad.collectives.program import Chunk, Copy, Program, Reduce, Slot, Source, Transfer
from manygrad.collectives.transport.endpoint import Endpoint, MessageKey, Ticket
from manygrad.native.memory import copy
from manygrad.tensor.dtype import accumulate_dtype, to_dtype

ReducerFactory = Callable[[str, str, tuple[str, ...]], reducers.Reducer]
CopyFn = Callable[[int, int, int], None]
reduce_numpy = reducers.reducer_numpy

_SEND, _RECEIVE, _INTO, _ALIAS, _COPY, _REDUCE, _RELEASE, _SETTLE = range(8)


class Prepared:
    """One worker's part of a program, ready to run. `close()` gives the temporaries back.

    `messages` and `bytes_sent` are per run.
    """

    def __init__(self, plan: int, dtype: str, endpoint: Endpoint | None, copy_fn: CopyFn):
        self.plan, self.dtype, self.endpoint, self.copy_fn = plan, dtype, endpoint, copy_fn
        self.registers: dict[tuple[int, str], int] = {}  # (rank, buffer) -> register; slots as (rank, "slot name")
        self.initial: list[int] = []
        self.steps: list[tuple[Any, ...]] = []
        self.bound: list[tuple[int, int, str]] = []  # the registers to fill at each run
        self.extents: list[tuple[int, int, int, int, int]] = []  # rank, register and bytes of in, of out
        self.messages = self.bytes_sent = self.sends = 0
        self._arena: list[int] = []
        self._owned: list[np.ndarray[Any, Any]] = []

    def run(
        self, addresses: Mapping[int, Mapping[str, int]], sequence: int = 0, flush: bool = True, plan: int | None = None
    ) -> None:
        """Executes once. `addresses[rank]["in" | "out"]` of every local rank; `sequence` counts the runs of this plan,
        or of `plan`, another one that has the same collective.

        With `flush` the call returns when all memory lent may be written again; without, the caller flushes the
        endpoint before it lets anything write `in` or `out`, which must not overlap. Raises the endpoint's errors.
        """
        reg = self.initial.copy()
        for r, rank, name in self.bound:
            reg[r] = addresses[rank].get(name, 0)
        for rank, i, nin, o, nout in self.extents:
            if reg[i] < reg[o] + nout and reg[o] < reg[i] + nin:
                raise ValueError(f"rank {rank}: in and out overlap; peers still read in while out is written")
        borrowed: dict[int, Any] = {}
        tickets: dict[int, Ticket] = {}
        endpoint, copy_fn = self.endpoint, self.copy_fn
        plan = self.plan if plan is None else plan
        for step in self.steps:
            code = step[0]
            if code == _SEND:
                _, peer, r, offset, nbytes, dtype, chunk, n = step
                tickets[n] = endpoint.send(peer, MessageKey(plan, sequence, chunk), reg[r] + offset, nbytes, dtype)  # type: ignore[union-attr]
            elif code == _RECEIVE:
                _, peer, r, nbytes, dtype, chunk = step
                got = borrowed[r] = endpoint.receive(peer, MessageKey(plan, sequence, chunk), nbytes, dtype)  # type: ignore[union-attr]
                reg[r] = got.addr
            elif code == _INTO:
                _, peer, r, offset, nbytes, dtype, chunk = step
                endpoint.receive_into(peer, MessageKey(plan, sequence, chunk), reg[r] + offset, nbytes, dtype)  # type: ignore[union-attr]
            elif code == _REDUCE:
                _, fn, r, offset, sources, count = step
                fn(reg[r] + offset, [reg[s] + o for s, o in sources], count)
            elif code == _COPY:
                _, r, offset, s, o, nbytes = step
                if reg[r] + offset != reg[s] + o:
                    copy_fn(reg[r] + offset, reg[s] + o, nbytes)
            elif code == _RELEASE:
                borrowed.pop(step[1]).release()
            elif code == _ALIAS:
                _, r, s, o = step
                reg[r] = reg[s] + o
            else:
                for n in step[1]:
                    endpoint.settle(tickets[n])  # type: ignore[union-attr]
        if flush and tickets and endpoint is not None:
            endpoint.flush()

    def close(self) -> None:
        """Frees the temporaries; the object cannot run again. May be called again."""
        self.steps = []
        if self.endpoint is not None and not self.endpoint.closed:
            for offset in self._arena:
                self.endpoint.arena.free(offset)
        self._arena, self._owned = [], []

    # --- used by prepare

    def register(self, rank: int, name: str, value: int = 0) -> int:
        index = self.registers.setdefault((rank, name), len(self.initial))
        if index == len(self.initial):
            self.initial.append(value)
        return index

    def allocate(self, nbytes: int) -> int:
        if self.endpoint is not None:
            self._arena.append(self.endpoint.arena.alloc(nbytes))
            return self.endpoint.arena.addr(self._arena[-1])
        self._owned.append(np.empty(nbytes, np.uint8))
        return int(self._owned[-1].ctypes.data)


def prepare(
    program: Program,
    dtype: str,
    *,
    plan: int = 0,
    endpoint: Endpoint | None = None,
    rank_to_worker: Sequence[int] | Callable[[int], int] | None = None,
    reduce_fn: ReducerFactory = reducers.reducer,
    copy_fn: CopyFn = copy,
) -> Prepared:
    """The flat form of `program` (built with `only` = this worker's ranks) over elements of `dtype`.

    `rank_to_worker` maps a rank of the program to the worker that holds it (default: rank r on worker r, or all here
    when there is no endpoint). `plan`: 64-bit hash that every message carries.
    `reduce_fn(op, dst_dtype, src_dtypes)` makes the reducers.
    Raises `ValueError` where `program` was cut for other ranks.
    """
    if rank_to_worker is None:
        rank_to_worker = (lambda r: r) if endpoint is not None else (lambda r: 0)
    worker = rank_to_worker if callable(rank_to_worker) else rank_to_worker.__getitem__
    here = endpoint.rank if endpoint is not None else 0
    foreign = sorted(r for r in program.only if worker(r) != here)
    if foreign:
        raise ValueError(
            f"the program holds ranks {foreign} of other workers; build it with only= the ranks of worker {here}"
        )
    element, partial = to_dtype(dtype), accumulate_dtype(to_dtype(dtype))
    if endpoint is not None and endpoint.piece_nbytes:
        program = cut(program, endpoint.piece_nbytes // max(element.itemsize, partial.itemsize))
    out = Prepared(plan, dtype, endpoint, copy_fn)
    partials = {(t.rank, t.name) for t in program.temps if t.partial}
    for t in program.temps:
        item = partial if t.partial else element
        out.register(t.rank, t.name, out.allocate(t.length * item.itemsize))
    for r in sorted(program.only):
        out.bound += [(out.register(r, name), r, name) for name in ("in", "out")]
        nin, nout = (
            program.collective.in_length(r) * element.itemsize,
            program.collective.out_length(r) * element.itemsize,
        )
        if nin and nout:
            out.extents.append((r, out.registers[r, "in"], nin, out.registers[r, "out"], nout))

    slot_types: dict[tuple[int, str], Any] = {}
    senders: dict[tuple[int, str], int] = {}  # of the slots that come from other workers
    awaited: dict[int, deque[tuple[tuple[int, str], tuple[Any, ...]]]] = {}  # by sender: receives not yet placed
    read_at: dict[tuple[int, str], int] = {}  # of the slots received: the step that last read each
    reads = Counter(
        (i.rank, s.name)
        for i in program.instrs
        if isinstance(i, Copy | Reduce)
        for s in _sources(i)
        if isinstance(s, Slot)
    )
    chunks: dict[tuple[int, int], int] = {}
    writes: dict[tuple[int, str], list[tuple[int, int, int]]] = {}  # buffer -> (start, end, position in steps)
    lent: dict[tuple[int, str], list[tuple[int, int, int]]] = {}  # buffer -> (start, end, send number)
    steps: list[tuple[float, int, tuple[Any, ...]]] = []  # (sort key, tie, step)
    last_send: dict[int, float] = {}  # by receiver

    def type_of(rank: int, buffer: str) -> Any:
        return partial if (rank, buffer) in partials else element

    def locate(rank: int, s: Source) -> tuple[int, int, Any]:
        """(register, byte offset, dtype) of a source."""
        if isinstance(s, Slot):
            return out.register(rank, "slot " + s.name), 0, slot_types[rank, s.name]
        d = type_of(rank, s.buffer)
        return out.register(rank, s.buffer), s.offset * d.itemsize, d

    def emit(step: tuple[Any, ...], at: float | None = None) -> None:
        steps.append((float(len(steps)) if at is None else at, len(steps), step))

    def written(rank: int, c: Chunk) -> None:
        """Before a write to `c`: settle what was lent of it; then note the write."""
        overlap = [n for lo, hi, n in lent.get((rank, c.buffer), ()) if lo < c.end and c.offset < hi]
        if overlap:
            emit((_SETTLE, overlap))
            lent[rank, c.buffer] = [x for x in lent[rank, c.buffer] if x[2] not in overlap]
        writes.setdefault((rank, c.buffer), []).append((c.offset, c.end, len(steps)))

    def ready(rank: int, c: Chunk) -> float:
        """The sort key just after the last write to any part of `c`."""
        found = [at for lo, hi, at in writes.get((rank, c.buffer), ()) if lo < c.end and c.offset < hi]
        return max(found) + 0.5 if found else -0.5

    def receive_until(rank: int, slot: str) -> None:
        """Receives what its sender sends up to `slot`, if it is still awaited."""
        while (rank, slot) not in read_at:
            found, step = awaited[senders[rank, slot]].popleft()
            read_at[found] = len(steps)
            emit(step)

    def needed(rank: int, srcs: Sequence[Source]) -> None:
        """Before a step that reads `srcs`: receives those that are still awaited."""
        for s in srcs:
            if isinstance(s, Slot) and (rank, s.name) in senders:
                receive_until(rank, s.name)

    def read(rank: int, srcs: Sequence[Source]) -> None:
        """Takes note that the last step has read `srcs`."""
        read_at.update({(rank, s.name): len(steps) - 1 for s in srcs if isinstance(s, Slot)})

    def into_place(rank: int, s: Source) -> tuple[Any, ...] | None:
        """The receive of a slot that is still awaited, comes over ZeroMQ and is read this once; the step is taken."""
        if not isinstance(s, Slot) or (rank, s.name) in read_at or reads[rank, s.name] != 1:
            return None
        sender = senders.get((rank, s.name))
        if sender is None or endpoint is None or endpoint.routes.get(sender) != "zmq":
            return None
        while awaited[sender][0][0] != (rank, s.name):
            receive_until(*awaited[sender][0][0])
        read_at[rank, s.name] = -1  # nothing is borrowed
        return awaited[sender].popleft()[1]

    for i in program.instrs:
        if isinstance(i, Transfer):
            src_here, dst_here = i.src_rank in program.only, i.dst_rank in program.only
            d = type_of(i.src_rank, i.src.buffer) if src_here else _peer_type(i.src.buffer, partial, element)
            nbytes = i.src.length * d.itemsize
            if dst_here:
                slot_types[i.dst_rank, i.slot] = d
            if src_here and dst_here:
                r, offset, _ = locate(i.src_rank, i.src)
                emit((_ALIAS, out.register(i.dst_rank, "slot " + i.slot), r, offset))
                continue
            if endpoint is None:
                raise ValueError(f"rank {i.src_rank} -> {i.dst_rank} crosses workers, but there is no endpoint")
            pair = (worker(i.src_rank), worker(i.dst_rank))
            chunk = chunks[pair] = chunks.get(pair, -1) + 1
            if src_here:
                r, offset, _ = locate(i.src_rank, i.src)
                last_send[pair[1]] = max(last_send.get(pair[1], -1.0), ready(i.src_rank, i.src))
                lent.setdefault((i.src_rank, i.src.buffer), []).append((i.src.offset, i.src.end, out.sends))
                emit((_SEND, pair[1], r, offset, nbytes, d.name, chunk, out.sends), last_send[pair[1]])
                out.sends += 1
                out.bytes_sent += nbytes
            else:
                senders[i.dst_rank, i.slot] = pair[0]
                step = (_RECEIVE, pair[0], out.register(i.dst_rank, "slot " + i.slot), nbytes, d.name, chunk)
                awaited.setdefault(pair[0], deque()).append(((i.dst_rank, i.slot), step))
        elif isinstance(i, Reduce):
            located = [locate(i.rank, s) for s in i.srcs]
            dst_type = type_of(i.rank, i.dst.buffer)
            fn = reduce_fn(i.op, dst_type.name, tuple(d.name for _, _, d in located))
            needed(i.rank, i.srcs)
            written(i.rank, i.dst)
            r, offset, _ = locate(i.rank, i.dst)
            emit((_REDUCE, fn, r, offset, tuple((s, o) for s, o, _ in located), i.dst.length))
            read(i.rank, i.srcs)
        elif isinstance(i, Copy):
            s, o, d = locate(i.rank, i.src)
            into = into_place(i.rank, i.src) if copy_fn is copy else None
            if into is None:
                needed(i.rank, (i.src,))
            written(i.rank, i.dst)
            r, offset, dst_type = locate(i.rank, i.dst)
            assert d is dst_type, f"copy between {d} and {dst_type}: {i}"
            if into is not None:
                emit((_INTO, into[1], r, offset, *into[3:]))
            else:
                emit((_COPY, r, offset, s, o, i.dst.length * d.itemsize))
                read(i.rank, (i.src,))
        elif (i.rank, i.slot) in senders:
            receive_until(i.rank, i.slot)
            at = read_at.pop((i.rank, i.slot))
            del senders[i.rank, i.slot]
            if at >= 0:
                emit((_RELEASE, out.register(i.rank, "slot " + i.slot)), at + 0.75)
    steps.sort(key=lambda s: s[:2])
    out.steps = [s[2] for s in steps]
    out.messages = out.sends
    return out


def _sources(i: Copy | Reduce) -> tuple[Source, ...]:
    return i.srcs if isinstance(i, Reduce) else (i.src,)


def _peer_type(buffer: str, partial: Any, element: Any) -> Any:
    """The type of a peer's buffer: temporaries hold partial sums (checked to be so for all our algorithms)."""
    return element if buffer in ("in", "out") else partial


def run_program(
    program: Program,
    addresses: Mapping[int, Mapping[str, int]],
    dtype: str,
    *,
    endpoint: Endpoint | None = None,
    plan: int = 0,
    sequence: int = 0,
    rank_to_worker: Sequence[int] | Callable[[int], int] | None = None,
    reduce_fn: ReducerFactory = reducers.reducer,
    copy_fn: CopyFn = copy,
) -> None:
    """`prepare` and one `run`, for a program that is used once."""
    prepared = prepare(
        program,
        dtype,
        plan=plan,
        endpoint=endpoint,
        rank_to_worker=rank_to_worker,
        reduce_fn=reduce_fn,
        copy_fn=copy_fn,
    )
    try:
        prepared.run(addresses, sequence)
    finally:
        prepared.close()
