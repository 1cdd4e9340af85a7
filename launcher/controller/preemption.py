"""A run that is to end, or to lose a rank, saves first: all ranks at the same step.

    SIGTERM  ->  `save` to all ranks  ->  AtStep of each  ->  `save_at` the step after the last of these to all

Ranks answer at once, in the middle of a step too: there they may be waiting for one another. Who has answered ends no
other step before `save_at` comes. The ranks that are behind train on up to that step. All save there and end
(`Preempted`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ..ranks import Failure, Rank, State
from .orders import Orders

NEVER = 1 << 62  # a rank has finished its script, so the others are about to
PREEMPTED = 128 + signal.SIGTERM


class Preemption:
    """`rank` is the one that got SIGTERM, None where the launcher did. Saving may take `grace_s`; as long as it takes
    where the run ends to go on on more nodes."""

    def __init__(self, ranks: Sequence[Rank], orders: Orders, grace_s: float) -> None:
        self.ranks, self.orders, self.grace_s = ranks, orders, grace_s
        self.asked_at = 0.0
        self.rank: int | None = None
        self.nodes_back = 0  # as many nodes as there could be, if they are more than there are
        self.for_nodes = 0  # likewise, where the run ends for them
        self.steps: dict[int, int] = {}  # steps that the ranks have done
        self.at: int | None = None  # the step at which all save

    @property
    def asked(self) -> bool:
        return self.asked_at > 0

    @property
    def by_launcher(self) -> bool:
        """The whole run is to end."""
        return self.asked and self.rank is None and not self.for_nodes

    def possible(self) -> bool:
        """Whether all ranks train, and have said that they can save."""
        is_free = not self.asked or self.for_nodes > 0
        return is_free and all(r.state is State.RUNNING and r.saves for r in self.ranks)

    def ask(self, rank: int | None, now: float, for_nodes: int = 0) -> None:
        if not self.asked:
            self.orders.send("save")
        self.rank, self.asked_at, self.for_nodes = rank, now, for_nodes

    def at_step(self, rank: Rank, step: int) -> None:
        self.steps[rank.rank] = step
        self.settle()

    def settle(self) -> None:
        """Once it is known where each rank is."""
        finished = {r.rank for r in self.ranks if r.state is State.FINISHED}
        if self.asked and self.at is None and len(finished | self.steps.keys()) == len(self.ranks):
            self.at = NEVER if finished else max(self.steps.values()) + 1
            self.orders.send("save_at", step=self.at)

    def done(self, message: str) -> Failure:
        """The cause of the end of a run whose ranks have saved."""
        if self.for_nodes:
            return Failure(None, "preempted", f"ends to go on on {self.for_nodes} nodes: {message}", PREEMPTED)
        return Failure(self.rank, "preempted", f"was preempted (SIGTERM): {message}", PREEMPTED)

    def overdue(self, now: float) -> Failure | None:
        if not self.asked or self.for_nodes or now - self.asked_at <= self.grace_s:
            return None
        return self.done(f"no checkpoint was saved within --grace {self.grace_s:g} s")
