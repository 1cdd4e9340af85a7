"""Time-outs: of the run, of its start, and of the silence of workers and supervisors.

Everybody hears a heartbeat of everybody that matters to it: workers and supervisors say each second that they are
there, and so do we (`Beat`). Progress is watched, not life alone: a worker whose process computes is not silent, even
when native code holds its interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence

from manygrad.errors import EXIT_TIMEOUT

from ..causes import laggard
from ..link import BEAT_S, SUSPENDED_S, Silence
from ..messages import AgentBeat
from ..ranks import Failure, Rank, State, ranks_text

LATE_S = 60.0  # after the first rank has ended: then the user is told which have not
BUSY = 0.05  # of one core: a process that uses so much computes


class Watch:
    """Deadlines in seconds; `timeout_s` None: a run takes as long as it likes. `spent_s`: by earlier attempts."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        now: float,
        *,
        timeout_s: float | None,
        start_timeout_s: float,
        silent_s: float,
        spent_s: float = 0.0,
    ) -> None:
        self.spent_s = spent_s
        self.ranks, self.timeout_s, self.start_timeout_s, self.silent_s = ranks, timeout_s, start_timeout_s, silent_s
        self.started_at = self.next_beat = self.seen_at = now
        self.next_late = LATE_S  # when the user is told next, in seconds after the first rank has ended
        self.absent_s = 0.0  # the last time that we ourselves were suspended

    def awake(self, now: float) -> None:
        """We look at the clock, as we do many times a second unless we were suspended."""
        if now - self.seen_at > SUSPENDED_S:
            self.absent_s = now - self.seen_at
        self.seen_at = now

    def beat_is_due(self, now: float) -> bool:
        if now < self.next_beat:
            return False
        self.next_beat = now + BEAT_S
        return True

    def worker_heard(self, rank: Rank, now: float) -> None:
        rank.worker = rank.worker or Silence(now)
        rank.worker.heard(now)

    def supervisor_heard(self, rank: Rank, event: AgentBeat, now: float) -> None:
        rank.agent = rank.agent or Silence(now)
        rank.agent.heard(now)
        rank.stopped = event.process in ("T", "t")
        # D: waits for a disk
        busy = event.process == "D" or event.cpu_ms - rank.cpu_ms > 1000 * BUSY * (now - rank.beat_at)
        if busy and rank.beat_at and rank.worker is not None:
            rank.worker.heard(now)  # native code that holds the interpreter lets no heartbeat through, but computes
        rank.beat_at, rank.cpu_ms = now, event.cpu_ms

    def silent(self, now: float) -> Failure | None:
        """The first rank that has been silent for too long. To be asked when everything that had come was taken in."""
        found = None
        for r in self.ranks:
            worker_s = r.worker.look(now) if r.worker is not None else 0.0
            supervisor_s = r.agent.look(now) if r.agent is not None else 0.0
            if found is not None or r.state not in (State.RUNNING, State.CONNECTING, State.FINISHED):
                continue
            if worker_s > self.silent_s:
                why = "its process is stopped (SIGSTOP)" if r.stopped else "stopped, or the network is cut"
                title = f"no sign of life for {self.silent_s:g} s ({why})"
                found = Failure(r.rank, "silent", title, 1, where=r.where, step=r.step)
            elif supervisor_s > self.silent_s:
                title = (
                    f"no sign of life of its supervisor (pid {r.agent_pid}) for {self.silent_s:g} s (stopped, "
                    "or the network is cut)"
                )
                found = Failure(r.rank, "silent", title, 1, where=r.where, step=r.step)
        return found

    def late(self, now: float) -> str:
        """Which ranks have not ended, when others ended long ago. (They may take as long as they like.)"""
        ended = [r for r in self.ranks if r.state is State.FINISHED]
        left = [r for r in self.ranks if r.state is State.RUNNING]
        first = min((r.stands_since for r in ended), default=now)
        if not left or now - first < self.next_late:
            return ""
        self.next_late *= 2
        places = ", ".join(f"rank {r.rank} at {r.where}" for r in left[:4] if r.where)
        some, others = ranks_text([r.rank for r in ended]), ranks_text([r.rank for r in left])
        at = f": {places}" if places else ""
        return f"{some} ended {now - first:.0f} s ago, {others} did not{at} (`launcher stacks RUN_DIR` says more)"

    def overdue(self, now: float, is_running: bool) -> Failure | None:
        """The run takes longer than it may, or its start does. `is_running`: all ranks have started once."""
        passed_s = now - self.started_at
        if self.timeout_s is not None and self.spent_s + passed_s > self.timeout_s:
            title = f"the run took longer than its time-out of {self.timeout_s:g} s{laggard(self.ranks)}"
            return Failure(None, "timeout", title, EXIT_TIMEOUT)
        if not is_running and passed_s > self.start_timeout_s:
            missing = [r.rank for r in self.ranks if r.state in (State.WAITING, State.SPAWNED, State.CONNECTING)]
            title = f"{ranks_text(missing)} did not start within {self.start_timeout_s:g} s"
            return Failure(None, "timeout", title, EXIT_TIMEOUT)
        return None
