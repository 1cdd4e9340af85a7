"""One side of a reliable session: sequence numbers, acknowledgements, and what is sent again after a reconnect.

    sender                                    receiver
    number = s.reserve(1); s.keep(number, m)
    (number, m) over any connection    -->    if not s.has(number): s.come(number)
    s.acknowledge(below)               <--    s.told()        # below which number all have come
    s.kept: what a new connection is given again

Nothing is lost, as each message is kept until it is acknowledged; nothing comes twice, as the receiver knows what has
come. Both directions have an epoch: what is of another one is dropped by whoever reads the heads (`epoch`), and a new
epoch begins with new numbers (`enter`).

Two protocols use it: the links between workers (`collectives/transport/zmq.py`: frames over several lanes, taken in any
order) and the launcher's channel (`launcher/link.py`: one connection, taken in order). Each has its own heads and says
when it acknowledges. Pure, and standard library only, because the launcher's supervisor is up without the rest of
manygrad.
"""

from __future__ import annotations

from typing import Generic, TypeVar

M = TypeVar("M")


class Session(Generic[M]):
    """Messages `M` in both directions, each numbered from `first`."""

    def __init__(self, epoch: int = 0, first: int = 0) -> None:
        self.first = first
        self.enter(epoch)

    def enter(self, epoch: int) -> None:
        """Begins an epoch: new numbers; what was kept is of no use in it."""
        self.epoch = epoch
        self.kept: dict[int, M] = {}  # what was sent and is not acknowledged, in the order in which it was kept
        self.out_number = self.in_number = self.first  # of the next message to be made, and to be asked for
        self.acked_below = self.whole_below = self.first  # the other side has all below, and this one
        self.whole: dict[int, int] = {}  # what has come besides, with its bytes
        # messages that the other side can be told of and was not, and their bytes
        self.owed = self.owed_nbytes = 0
        self.urgent = False  # it waits for that

    # --- sending

    def reserve(self, count: int) -> int:
        """The number of the first of the next `count` messages, which are to be kept with these."""
        self.out_number += count
        return self.out_number - count

    def keep(self, number: int, message: M) -> None:
        """Keeps a message until it is acknowledged."""
        self.kept[number] = message

    def acknowledge(self, below: int) -> list[M]:
        """All messages below a number have come: they are kept no more, and returned. Raises ValueError where so many
        were not made."""
        if below > self.out_number:
            raise ValueError(f"all below message {below} is acknowledged, but only {self.out_number} were numbered")
        gone = [self.kept.pop(n) for n in range(self.acked_below, below) if n in self.kept]
        self.acked_below = max(self.acked_below, below)
        return gone

    # --- receiving

    def expect(self, count: int) -> int:
        """The number of the first of the next `count` messages of the other side."""
        self.in_number += count
        return self.in_number - count

    def has(self, number: int) -> bool:
        """Whether a message has come as a whole."""
        return number < self.whole_below or number in self.whole

    def repeat(self) -> None:
        """A message came again: the other side has not heard that it had come."""
        self.owed += 1

    def come(self, number: int, nbytes: int = 0) -> None:
        """A message has come as a whole. The other side can be told of it when all before it have, too."""
        self.whole[number] = nbytes
        while (size := self.whole.pop(self.whole_below, None)) is not None:
            self.whole_below += 1
            self.owed += 1
            self.owed_nbytes += size

    def told(self) -> int:
        """Below which number all have come: the other side is told now. What came before a message of a lower number
        is told when that one has come."""
        self.owed = self.owed_nbytes = 0
        self.urgent = self.urgent and bool(self.whole)
        return self.whole_below
