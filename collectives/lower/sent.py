"""Messages that a worker sends: as soon as they are ready, and lent until they are settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from manygrad.collectives.lower.calls import CallPlace, Calls, Phase
from manygrad.collectives.lower.memory import HOST, CallMemory
from manygrad.collectives.program import Chunk, Transfer
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import MessageArg, Ops, UOp


class Loan(NamedTuple):
    """Memory that a message reads until it is settled: `chunk` of a rank, or a copy of it that nobody writes (None)."""

    view: UOp
    rank: int
    chunk: Chunk | None


class Sent:
    """`loans`: what is sent and not settled, in order; `last`: by receiver, the place of the last send; `writes`: the
    parts of each rank's buffers that were written, each with its step."""

    def __init__(self, calls: Calls, memory: CallMemory, on_host: Callable[[str], bool]) -> None:
        self.calls, self.memory, self.on_host = calls, memory, on_host
        self.numbers: Counter[int] = Counter()  # of messages, by receiver
        self.loans: dict[MessageArg, Loan] = {}
        self.last: dict[int, CallPlace] = {}
        self.writes: dict[tuple[int, str], list[tuple[Chunk, int]]] = {}

    def send(self, i: Transfer, receiver: int, device: str) -> None:
        """Right after the last write to any part of what is sent, and after the receiver's message before."""
        view = self.memory.chunk(i.src_rank, i.src)
        steps = [step for c, step in self.writes.get((i.src_rank, i.src.buffer), ()) if _overlap(c, i.src)]
        ready = CallPlace(max(steps, default=-1), Phase.SENDS)
        at = self.last[receiver] = max(self.last.get(receiver, ready), ready)
        message = MessageArg(receiver, self.numbers[receiver], i.is_written)
        self.numbers[receiver] += 1
        chunk: Chunk | None = i.src
        if not self.on_host(device):
            staged, chunk = self.memory.temp(i.src.length, view.dtype, HOST), None
            self.calls.copy(staged, view, HOST, at=at)
            view = staged
        self.loans[message] = Loan(view, i.src_rank, chunk)
        self.calls.add(UOp(Ops.SEND, view.dtype, (), message), view, at=at)

    def before_write(self, rank: int, c: Chunk) -> None:
        """Settles what was lent of `c`; then takes note of the write, which is the next call."""
        lent = {m: x for m, x in self.loans.items() if x.rank == rank and x.chunk is not None and _overlap(x.chunk, c)}
        self.settle(lent)
        self.writes.setdefault((rank, c.buffer), []).append((c, self.calls.step))

    def settle_all(self) -> None:
        self.settle(self.loans)

    def settle(self, loans: Mapping[MessageArg, Loan]) -> None:
        if loans:
            self.calls.add(UOp(Ops.SETTLE, dtypes.void, (), tuple(loans)), *(x.view for x in loans.values()))
            self.loans = {m: x for m, x in self.loans.items() if m not in loans}


def _overlap(a: Chunk, b: Chunk) -> bool:
    return a.buffer == b.buffer and a.offset < b.end and b.offset < a.end
