"""Symbolic proof that the calls of all workers together carry a collective out.

As `checker.py` does with a Program, but with what the workers run: each goes through its own calls, one after the
other; a RECEIVE waits for its message, a SETTLE for the release of what was sent. Kernels are evaluated element by
element. Refused, besides what has not the value of the postcondition:

- workers that wait for each other; messages that nobody receives, of another length or type than was expected, or read
  after their release; memory that is read before it is written;
- a write to what was sent and has not been settled: its reader may not have come to it; a read of what was sent to be
  written; a read of what one is to write, or a write to what one is to read;
- a sum that is rounded to a half type and then summed again; one that was finished, and results that were not.

Cost: O(calls · length).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from manygrad.collectives.algorithms import ALGORITHMS
from manygrad.collectives.checker import Expr, contributions, expected
from manygrad.collectives.lower import Body, CollectiveChoice
from manygrad.collectives.program import Collective
from manygrad.collectives.reduction import op_for
from manygrad.errors import ProgramError
from manygrad.tensor.dtype import DType, accumulate_dtype
from manygrad.tensor.uop import MessageArg, Ops, UOp
from manygrad.tensor.uop.shape import numel

MOST = 1 << 12  # elements of all ranks


class Cell(NamedTuple):
    value: Expr
    is_rounded: bool = False  # a sum, in a half type
    is_finished: bool = False  # what is to be computed of the sum has been


class _Message:
    """Cells that are read; or, of `place` in the memory of its sender, that are written."""

    def __init__(self, cells: list[Cell], dtype: DType, count: int, place: Callable[[list[Cell]], None] | None) -> None:
        self.cells, self.dtype, self.count, self.place, self.is_released = cells, dtype, count, place, False


class _Worker:
    """One worker's memory, by PARAM or BUFFER, and its way through its calls."""

    def __init__(
        self, rank: int, body: Body, ranks: tuple[int, ...], c: Collective, mail: _Mail, finish: UOp | None
    ) -> None:
        self.rank, self.body, self.ranks, self.op, self.mail, self.finish = rank, body, ranks, c.op, mail, finish
        self.memory: dict[UOp, list[Cell | None]] = {}
        self.sent: dict[MessageArg, tuple[_Message, UOp]] = {}
        self.held: dict[UOp, _Message] = {}
        self.done = 0  # calls
        for u in body.linear.toposort(lambda u: u.op is not Ops.SINK):
            if u.op is Ops.PARAM:
                slot, count = u.arg.uid, numel(u.arg.shape)
                if len(ranks) <= slot < 2 * len(ranks):
                    r = ranks[slot - len(ranks)]
                    self.memory[u] = [Cell(("in", r, i)) for i in range(count)]
                else:
                    self.memory[u] = [None] * count

    def run(self) -> Iterator[str]:
        """Gives what it waits for, as long as it does."""
        for n, call in enumerate(self.body.linear.src):
            try:
                yield from self.step(call)
            except ProgramError as e:
                raise ProgramError(f"worker {self.rank}, call {n} ({call.src[0].op.name}): {e}") from None
            self.done += 1
        if self.sent or self.held:
            raise ProgramError(
                f"worker {self.rank} ends with {len(self.sent)} messages lent, {len(self.held)} borrowed"
            )

    def step(self, call: UOp) -> Iterator[str]:
        what, *args = call.src
        if what.op is Ops.SEND:
            view, count = args[0], numel(args[0].shape)
            if what.arg.is_written:
                self.refuse_lent(view, "lends to be written")
                message = _Message([], view.dtype, count, lambda cells: self.put(view, cells))
            else:
                message = _Message(self.read(view), view.dtype, count, None)
            self.sent[what.arg] = message, view
            self.mail.send(self.rank, what.arg, message)
        elif what.op is Ops.RECEIVE:
            while (got := self.mail.receive(self.rank, what.arg)) is None:
                yield f"message {what.arg.number} of worker {what.arg.peer}"
            if (got.count, got.dtype) != (numel(args[0].shape), args[0].dtype):
                raise ProgramError(f"{got.count} {got.dtype.name} come, {args[0].shape} {args[0].dtype.name} expected")
            if (got.place is not None) is not what.arg.is_written:
                raise ProgramError("one worker says that the message is to be written, the other that it is to be read")
            if args[0].op is Ops.BUFFER:
                self.held[args[0]] = got
            else:
                self.write(args[0], got.cells)
                got.is_released = True
        elif what.op is Ops.RELEASE:
            if args[0] not in self.held:
                raise ProgramError("releases a message that it does not hold")
            self.held.pop(args[0]).is_released = True
        elif what.op is Ops.SETTLE:
            for m in what.arg:
                if m not in self.sent:
                    raise ProgramError(f"message {m.number} to worker {m.peer} was not sent")
                while not self.sent[m][0].is_released:
                    yield f"the release of message {m.number} to worker {m.peer}"
                del self.sent[m]
        elif what.op is Ops.COPY:
            self.write(args[0], self.read(args[1]))
        else:
            self.reduce(what, args)

    def reduce(self, kernel: UOp, args: list[UOp]) -> None:
        store, targets = kernel.src[0], len(kernel.src)
        if [(s.src[0].src[0].arg, s.src[1]) for s in kernel.src] != [(n, store.src[1]) for n in range(targets)]:
            raise ProgramError("a kernel stores something else in each of its targets")
        given = {n: self.read(a) for n, a in enumerate(args[targets:], targets)}
        total = None if self.finish is None else _finished(store.src[1], self.finish)
        value, is_finished = (store.src[1], False) if total is None else (total, True)
        cells = [_value(value, given, i, self.op) for i in range(len(given[targets]))]
        for target in args[:targets]:
            self.write(target, [_rounded(c, value.dtype)._replace(is_finished=is_finished) for c in cells])

    def read(self, u: UOp) -> list[Cell]:
        buffer, start = (u.src[0], u.arg.offset) if u.op is Ops.VIEW else (u, 0)
        if buffer.op is Ops.BUFFER:
            if buffer not in self.held:
                raise ProgramError("reads a message that it does not hold (not received, or released)")
            if self.held[buffer].place is not None:
                raise ProgramError("reads what it is to write")
            return self.held[buffer].cells
        self.refuse_lent(u, "reads", to_be_written=True)
        cells = self.memory[buffer][start : start + numel(u.shape)]
        if None in cells or len(cells) != numel(u.shape):
            raise ProgramError(f"reads what is not written, or beyond the end: {buffer.arg.uid}[{start}:]")
        return cells  # type: ignore[return-value]

    def write(self, u: UOp, cells: list[Cell]) -> None:
        buffer = u.src[0] if u.op is Ops.VIEW else u
        if buffer.op is Ops.BUFFER:
            place = self.held[buffer].place if buffer in self.held else None
            if place is None:
                raise ProgramError("writes a message that it does not hold to be written")
            return place(cells)
        if len(self.ranks) <= buffer.arg.uid < 2 * len(self.ranks):
            raise ProgramError("writes a source")
        self.refuse_lent(u, "writes")
        self.put(u, cells)

    def put(self, u: UOp, cells: list[Cell]) -> None:
        buffer, start = (u.src[0], u.arg.offset) if u.op is Ops.VIEW else (u, 0)
        end = start + len(cells)
        if end > len(self.memory[buffer]):
            raise ProgramError(f"writes beyond the end: {buffer.arg.uid}[{start}:{end}]")
        self.memory[buffer][start:end] = cells

    def refuse_lent(self, u: UOp, what: str, to_be_written: bool = False) -> None:
        """`to_be_written`: of what is lent only that."""
        buffer, start = (u.src[0], u.arg.offset) if u.op is Ops.VIEW else (u, 0)
        end = start + numel(u.shape)
        for message, lent in self.sent.values():
            of, at = (lent.src[0], lent.arg.offset) if lent.op is Ops.VIEW else (lent, 0)
            if of is buffer and at < end and start < at + numel(lent.shape):
                if message.place is not None or not to_be_written:
                    raise ProgramError(f"{what} {buffer.arg.uid}[{start}:{end}], of which a part is lent")


class _Mail:
    """Messages on their way, in order."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], deque[tuple[int, _Message]]] = {}

    def send(self, rank: int, to: MessageArg, message: _Message) -> None:
        self.boxes.setdefault((rank, to.peer), deque()).append((to.number, message))

    def receive(self, rank: int, source: MessageArg) -> _Message | None:
        box = self.boxes.get((source.peer, rank))
        if not box:
            return None
        number, message = box.popleft()
        if number != source.number:
            raise ProgramError(f"message {number} of worker {source.peer} comes, {source.number} was expected")
        return message


def _value(u: UOp, given: dict[int, list[Cell]], i: int, op: str) -> Cell:
    """An element of what a kernel of `reduction.py` for `op` computes."""
    if u.op is Ops.LOAD:
        return given[u.src[0].src[0].arg][i]
    if u.op is Ops.CAST:
        return _value(u.src[0], given, i, op)
    if u.op is not op_for(op, u.dtype):
        raise ProgramError(f"a kernel with {u.op.name} does not {op}")
    terms = [_value(s, given, i, op) for s in u.src]
    if any(t.is_rounded or t.is_finished for t in terms):
        raise ProgramError("a sum that was rounded, or finished, is summed again")
    return Cell((op, *(t.value for t in terms)))


def _finished(value: UOp, finish: UOp) -> UOp | None:
    """The sum of which `value` is what `finish` makes of it; None where it is nothing of the kind."""
    sums: set[UOp] = set()

    def same(u: UOp, f: UOp) -> bool:
        if f.op is Ops.PARAM:
            sums.add(u)
            return u.dtype is f.dtype
        return (u.op, u.dtype, u.arg, len(u.src)) == (f.op, f.dtype, f.arg, len(f.src)) and all(map(same, u.src, f.src))

    return next(iter(sums)) if same(value, finish) and len(sums) == 1 else None


def _rounded(cell: Cell, d: DType) -> Cell:
    is_half = accumulate_dtype(d) is not d
    return cell._replace(is_rounded=is_half and cell.value[0] != "in")


@lru_cache(maxsize=256)
def prove(choice: CollectiveChoice, on_host: Callable[[str], bool]) -> None:
    """Proves the calls of all workers for a collective that they carry out as chosen; of more than MOST elements it
    proves nothing, for that takes longer than the program."""
    c = choice.collective
    if c.ranks * c.count <= MOST:
        ranks = {w: choice.ranks_of(w) for w in sorted(set(choice.owners))}
        bodies = {w: (choice.body(own, on_host), own) for w, own in ranks.items()}
        check_calls(c, bodies, choice.algorithm, choice.finish)


def check_calls(
    c: Collective,
    bodies: Mapping[int, tuple[Body, tuple[int, ...]]],
    algorithm: str,
    finish: UOp | None = None,
) -> None:
    """Proves the calls of all workers, each with its ranks, or raises `ProgramError` naming worker, call and values.
    `finish`: what each result has to be of its sum."""
    mail = _Mail()
    workers = [_Worker(w, body, ranks, c, mail, finish) for w, (body, ranks) in bodies.items()]
    running = {w: w.run() for w in workers}
    while running:
        before = sum(w.done for w in workers)
        waiting = {w: why for w, calls in running.items() if (why := next(calls, None)) is not None}
        if len(waiting) == len(running) and sum(w.done for w in workers) == before:
            told = "; ".join(f"worker {w.rank} for {why}" for w, why in waiting.items())
            raise ProgramError(f"the workers wait for each other: {told}")
        running = {w: running[w] for w in waiting}
    if any(mail.boxes.values()):
        raise ProgramError("messages are left that nobody received")
    for w in workers:
        for slot, r in enumerate(w.ranks):
            cells = next((m for u, m in w.memory.items() if u.arg.uid == slot), [])
            _check_result(c, r, cells, algorithm, finish is not None)


def _check_result(c: Collective, rank: int, cells: list[Cell | None], algorithm: str, is_finished: bool) -> None:
    wanted = expected(c, rank)
    if len(cells) != len(wanted):
        raise ProgramError(f"out of rank {rank} has {len(cells)} elements that are used, of {len(wanted)}")
    for i, (cell, want) in enumerate(zip(cells, wanted)):
        got = cell.value if cell is not None else None
        same = (
            got == want if ALGORITHMS[algorithm].order == "tree" else got and contributions(got) == contributions(want)
        )
        if not same:
            raise ProgramError(f"{algorithm} {c.kind}: out[{i}] of rank {rank} is {got}, expected {want}")
        if cell is not None and cell.is_finished is not is_finished:
            raise ProgramError(f"{algorithm} {c.kind}: out[{i}] of rank {rank} is finished: {cell.is_finished}")
