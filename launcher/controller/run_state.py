"""The state of a run, which the handlers of events change."""

from __future__ import annotations

from dataclasses import dataclass

from ..causes import Difference
from ..ranks import Failure, Rank
from .ending import Ending
from .log import EventLog
from .orders import Orders
from .preemption import Preemption
from .programs import Programs
from .watch import Watch


@dataclass
class RunState:
    """What is known of a run, by concept. Times are seconds of any monotonic clock, 0.0: not yet."""

    ranks: list[Rank]
    log: EventLog
    orders: Orders
    ending: Ending
    watch: Watch
    programs: Programs
    preemption: Preemption
    joined_at: float = 0.0  # all ranks have sent their cards
    running_at: float = 0.0  # all are connected
    interrupted: int = 0  # the signal that scripts were told of
    released: bool = False  # all ranks have finished, and may go

    @property
    def root(self) -> Failure | None:
        return self.ending.root

    def fail(self, failure: Failure | None, now: float) -> None:
        """End the run for this reason, if it is one."""
        if failure is not None:
            self.ending.fail(failure, now)

    def differ(self, found: Difference | None, now: float) -> bool:
        """End the run if ranks differ; whether they do."""
        if found is not None:
            self.ending.fail(Failure(found[0], "plan", f"PlanMismatch: {found[1]}", 1), now)
        return found is not None
