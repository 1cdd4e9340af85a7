"""The end of a run, in stages: told first (`abort`), SIGTERM after `grace_s`, then SIGKILL.

The first failure that is not itself the echo of another rank's failure is the root cause, which ends the run for all.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ..ranks import Failure, Rank, State
from .orders import Orders

KILL_AFTER_TERM_S, GIVE_UP_S, CLOSE_S = 0.7, 0.6, 1.5


class Ending:
    """How far the end of the run has come. `root` is its cause; None while it goes on or has gone well."""

    def __init__(self, ranks: Sequence[Rank], orders: Orders, grace_s: float) -> None:
        self.ranks, self.orders, self.grace_s = ranks, orders, grace_s
        self.root: Failure | None = None
        self.began_at = self.all_exited_at = 0.0
        self.term_sent = self.kill_sent = self.done = False

    def fail(self, failure: Failure, now: float) -> None:
        """The run is over; `failure` is its root cause unless an earlier one is."""
        if self.root is None:
            self.root, self.began_at = failure, now
            self.orders.log.cause()
            kind = failure.kind if failure.kind in ("plan", "interrupt", "preempted") else "failure"
            reason = (
                failure.title
                if failure.rank is None or failure.kind == "plan"
                else f"rank {failure.rank} failed: {failure.title}"
            )
            self.orders.send(
                "abort",
                rank=-1 if failure.rank is None else failure.rank,
                kind=kind,
                reason=reason.removeprefix("PlanMismatch: "),
            )
        elif self.root.consequence and not failure.consequence and not self.term_sent:
            self.root = failure

    def kill_at_once(self, now: float) -> None:
        """Skip what is left of the grace."""
        self.term_sent = self.kill_sent = True
        self.began_at = now - self.grace_s - KILL_AFTER_TERM_S
        self.orders.kill(signal.SIGKILL)

    def go_on(self, now: float) -> None:
        """The next stage, if it is time for it; done when every process has ended, or all time is up."""
        since_s = now - self.began_at
        if self.root is not None:
            if not self.term_sent and since_s > self.grace_s:
                self.term_sent = True
                self.orders.kill(signal.SIGTERM)
            elif self.term_sent and not self.kill_sent and since_s > self.grace_s + KILL_AFTER_TERM_S:
                self.kill_sent = True
                self.orders.kill(signal.SIGKILL)
        if all(r.state in (State.READY, State.EXITED) for r in self.ranks):
            self.all_exited_at = self.all_exited_at or now
            closed = all(r.closed or r.state is State.READY for r in self.ranks)
            self.done = closed or now - self.all_exited_at > CLOSE_S
        else:
            self.done = self.kill_sent and since_s > self.grace_s + KILL_AFTER_TERM_S + GIVE_UP_S
        if self.done:
            self.orders.done()
