"""Messages that a worker receives: as late as they are needed, borrowed until they were last read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from manygrad.collectives.lower.calls import CallPlace, Calls, Phase
from manygrad.collectives.lower.memory import HOST, CallMemory
from manygrad.collectives.program import Slot, Source
from manygrad.tensor.dtype import DType
from manygrad.tensor.uop import BufferSpec, MessageArg, Ops, UOp

Key = tuple[int, str]  # a rank and the name of its slot


class Expected(NamedTuple):
    """A message for a slot of a device."""

    message: MessageArg
    length: int
    dtype: DType
    device: str


class Received:
    """`slots`: what is read as each slot; `expected`: those that are not received yet, and `awaited` the same by
    sender, in their order; `last_read`: the step of the last read of what is borrowed."""

    def __init__(self, calls: Calls, memory: CallMemory, on_host: Callable[[str], bool]) -> None:
        self.calls, self.memory, self.on_host = calls, memory, on_host
        self.numbers: Counter[int] = Counter()  # of messages, by sender
        self.slots: dict[Key, UOp] = {}
        self.expected: dict[Key, Expected] = {}
        self.awaited: dict[int, deque[Key]] = {}
        self.last_read: dict[Key, int] = {}
        self.borrowed = 0

    def expect(self, key: Key, sender: int, length: int, dtype: DType, device: str, is_written: bool) -> None:
        message = MessageArg(sender, self.numbers[sender], is_written)
        self.numbers[sender] += 1
        self.expected[key] = Expected(message, length, dtype, device)
        self.awaited.setdefault(sender, deque()).append(key)

    def is_awaited(self, key: Key) -> bool:
        return key in self.expected

    def await_all(self, rank: int, srcs: Sequence[Source]) -> None:
        for s in srcs:
            if isinstance(s, Slot):
                self.receive_until((rank, s.name))

    def receive_until(self, key: Key) -> None:
        """Receives what its sender sends up to a slot, if it is still awaited."""
        while self.is_awaited(key):
            self.borrow(self.awaited[self.expected[key].message.peer].popleft())

    def in_place(self, key: Key) -> MessageArg:
        """The message of a slot, which the next call receives in its place, when all before it are received."""
        message = self.expected[key].message
        queue = self.awaited[message.peer]
        while queue[0] != key:
            self.borrow(queue.popleft())
        del self.expected[queue.popleft()]
        return message

    def borrow(self, key: Key) -> None:
        message, length, d, device = self.expected.pop(key)
        seen = self.on_host(device)
        self.borrowed += 1
        lent = UOp(Ops.BUFFER, d, (), BufferSpec(-self.borrowed, (length,), d, device if seen else HOST))
        if seen:
            self.last_read[key] = self.calls.step
        self.slots[key] = lent
        self.calls.add(UOp(Ops.RECEIVE, d, (), message), lent)
        if not seen:
            self.slots[key] = own = self.memory.temp(length, d, device)
            self.calls.copy(own, lent, device)
            self.calls.add(UOp(Ops.RELEASE, d), lent)

    def was_read(self, rank: int, srcs: Sequence[Source]) -> None:
        """The last call read these."""
        for s in srcs:
            if isinstance(s, Slot) and (rank, s.name) in self.last_read:
                self.last_read[rank, s.name] = self.calls.step - 1

    def release(self, key: Key) -> None:
        self.receive_until(key)
        if (step := self.last_read.pop(key, None)) is not None:
            lent = self.slots[key]
            self.calls.add(UOp(Ops.RELEASE, lent.dtype), lent, at=CallPlace(step, Phase.RELEASES))
