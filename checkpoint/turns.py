"""The Checkpointers of a script, which may have several: where the run ends (SIGTERM) all of them save.

    a.step(7)  b.step(7)      the order in which they are called in a round of the loop
    a.step(8)                 the launcher says that all ranks are to save: a saves, and the script goes on
    b.step(8)                 b saves; now all of the round have, and the script ends

A Checkpointer that is called more rarely than each time the first one is (after each epoch, say) is not waited for; its
last checkpoint counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from manygrad.runtime.exchange.communication import Communication


@dataclass
class Turns:
    """Whose turn it was when, by number (0: it was not yet called), on all ranks alike."""

    count: int = 0
    last: WeakKeyDictionary[object, int] = field(default_factory=WeakKeyDictionary)
    others: WeakSet[object] = field(default_factory=WeakSet)  # of this round, that have not saved at the end
    ended: WeakSet[object] = field(default_factory=WeakSet)
    told: list[str] = field(default_factory=list)  # what those that have saved say
    ends: bool = False

    def enter(self, who: object) -> None:
        self.last[who] = 0

    def begin(self, who: object) -> bool:
        """`who` is called. Returns whether it has saved at the end already, so that the others do not come."""
        before = self.last.get(who, 0)
        self.count += 1
        self.last[who] = self.count
        if not self.ends:
            called = (c for c, at in self.last.items() if at > before or not before)
            self.others = WeakSet(c for c in called if c is not who)
        return who in self.ended

    def end(self, who: object, told: str) -> bool:
        """`who` has saved, for the run ends. Returns whether it was the last one."""
        self.ends = True
        self.ended.add(who)
        self.others.discard(who)
        self.told.append(told)
        return not self.others


def turns_of(communication: Communication) -> Turns:
    """The turns of this process in its epoch."""
    if communication.turns is None:
        communication.turns = Turns()
    turns: Turns = communication.turns
    return turns
