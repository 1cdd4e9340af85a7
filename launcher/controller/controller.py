"""The controller: takes the events of a run, in the order in which they came, and says what must be done.

An event that fits no row of the table fails the run: others may wait for what a confused worker does. Once the run is
over, or all ranks may go, such events are late and change nothing; they stand in the log like all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..causes import unfit
from ..instructions import Instruction
from ..messages import Event, Interrupt, NodesBack, Tick
from ..ranks import Failure, Rank, State
from .ending import Ending
from .handlers import pass_time
from .log import EventLog
from .orders import Orders
from .preemption import Preemption
from .programs import Programs
from .run_state import RunState
from .table import FITS, OF_THE_RUN, UNFIT
from .watch import Watch

NO_RANKS: Mapping[int, Rank] = MappingProxyType({})


class Controller:
    """Decides for a run of `size` ranks, of which some are `ready`: their processes wait for it since an earlier one.
    Times are seconds of any monotonic clock, passed in with every event."""

    def __init__(
        self,
        size: int,
        now: float,
        *,
        timeout_s: float | None = None,
        start_timeout_s: float = 120.0,
        grace_s: float = 2.0,
        silent_s: float = 60.0,
        spent_s: float = 0.0,
        ready: Mapping[int, Rank] = NO_RANKS,
    ) -> None:
        ranks, log = [Rank(r) for r in range(size)], EventLog(size, now)
        for r in ready.values():
            ranks[r.rank] = Rank(r.rank, State.SPAWNED, host=r.host, pid=r.pid, agent_pid=r.agent_pid)
        orders = Orders(ranks, log)
        ending = Ending(ranks, orders, grace_s)
        watch = Watch(
            ranks, now, timeout_s=timeout_s, start_timeout_s=start_timeout_s, silent_s=silent_s, spent_s=spent_s
        )
        preemption = Preemption(ranks, orders, grace_s)
        self.run = RunState(ranks, log, orders, ending, watch, Programs(ranks), preemption)

    @property
    def ranks(self) -> list[Rank]:
        return self.run.ranks

    @property
    def log(self) -> EventLog:
        return self.run.log

    @property
    def root(self) -> Failure | None:
        """Cause of the run's failure."""
        return self.run.root

    @property
    def done(self) -> bool:
        return self.run.ending.done

    @property
    def exit_code(self) -> int:
        return self.root.code if self.root else 0

    def story(self, rank: int) -> list[str]:
        """What happened to a rank: its last events and what it was told, as lines with times (seconds of the run)."""
        return self.log.story(rank)

    def handle(self, event: Event | Interrupt | NodesBack | Tick, now: float) -> list[Instruction]:
        """Take one event in; what must be done now comes out."""
        run, self.log.now = self.run, now
        if self.done:
            if not isinstance(event, Tick):
                self.log.event(event, "the run is over", refused=True)
            return []
        run.watch.awake(now)
        if isinstance(event, Event):
            self._of_a_rank(run.ranks[event.rank], event, now)
        else:
            if not isinstance(event, Tick):
                self.log.event(event)
            OF_THE_RUN[type(event)](run, event, now)
        pass_time(run, now)
        return run.orders.take()

    def _of_a_rank(self, rank: Rank, event: Event, now: float) -> None:
        key = before, _ = rank.state, type(event)
        if key in FITS:
            after, handler = FITS[key]
            self.log.event(event, "" if after is before else f"{before.value} -> {after.value}")
            rank.state = after
            handler(self.run, rank, event, now)
            return
        late = self.root is not None or self.run.released
        self.log.event(event, f"{'late' if late else 'does not fit'} in {before.value}", refused=True)
        if not late:
            self.run.fail(unfit(rank, event, UNFIT[key]), now)
