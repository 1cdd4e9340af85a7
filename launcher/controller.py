"""Decides how a run goes: events in, instructions out. No I/O, no clock, no threads; tested without any process.

The life of a rank is one table (`TRANSITIONS` in `ranks.py`); an event that is not legal in a rank's state fails the
run: others may wait for what a confused worker does. Once the run is over such events are late, and ignored. The first
failure that is not itself the echo of another rank's failure is the root cause; it ends the run for everybody: told
first (`abort`), SIGTERM after `grace_s`, then SIGKILL. A rank that waited in vain is such an echo: the rank that did
not come is the root cause.
Ctrl-C ends the run as a failure does, unless scripts have a handler for it: these hear of the first one.

Everybody hears a heartbeat of everybody that matters to it: workers and supervisors say each second that they are
there, and so do we (`Beat`). Progress is watched, not life alone: a worker whose process computes is not silent, even
when native code holds its interpreter.
"""

from __future__ import annotations

import signal
from typing import Any

from manygrad.errors import EXIT_INTERRUPTED, EXIT_TIMEOUT

from . import compare
from .causes import (
    failure_of,
    failure_of_exit,
    finished_early,
    laggard,
    late,
    left_alone,
    left_by_peer,
    unfit,
    unheard,
    unreachable,
)
from .instructions import Beat, Done, Instruction, Kill, Send, Warn
from .link import BEAT_S, SUSPENDED_S, Silence
from .messages import (
    PROTOCOL,
    AgentBeat,
    AgentLost,
    Closed,
    Event,
    Exited,
    Failed,
    Finished,
    Hello,
    Interrupt,
    Plan,
    Progress,
    Spawned,
    Started,
    Stopping,
    Tick,
    Values,
)
from .ranks import TRANSITIONS, Failure, Rank, State, ranks_text, signal_name

KILL_AFTER_TERM_S, GIVE_UP_S, CLOSE_S = 0.7, 0.6, 1.5
APART_STEPS = 100  # of every rank without any communication: worth a warning
BUSY = 0.05  # of one core: a process that uses so much computes


class Controller:
    """The state of a run of `size` ranks. Times are seconds of any monotonic clock, passed in with every event.

    Large: a handler for each kind of event.
    """

    def __init__(
        self,
        size: int,
        now: float,
        *,
        timeout_s: float | None = None,
        start_timeout_s: float = 120.0,
        grace_s: float = 2.0,
        silent_s: float = 60.0,
    ) -> None:
        self.ranks = [Rank(r) for r in range(size)]
        self.timeout_s, self.start_timeout_s, self.grace_s, self.silent_s = (
            timeout_s,
            start_timeout_s,
            grace_s,
            silent_s,
        )
        self.started_at, self.joined_at, self.running_at = now, 0.0, 0.0
        self.root: Failure | None = None
        self.stopping_at = self.all_exited_at = 0.0
        self.term_sent = self.kill_sent = self.done = False
        self.next_beat = self.seen_at = now
        self.absent_s = 0.0  # the last time that we ourselves were suspended
        self.open_plans: dict[int, Plan] = {}
        self.values = compare.Comparisons(size)
        self.warned = False
        self.interrupted = 0  # the signal that scripts were told of
        self.ignored = 0
        self.released = False  # all ranks have finished, and may go
        self._out: list[Instruction] = []

    @property
    def exit_code(self) -> int:
        return self.root.code if self.root else 0

    def handle(self, event: Event | Interrupt | Tick, now: float) -> list[Instruction]:
        """Take one event in; what must be done now comes out."""
        self._out = []
        if self.done:
            return []
        if now - self.seen_at > SUSPENDED_S:
            self.absent_s = now - self.seen_at
        self.seen_at = now
        if isinstance(event, Event):
            rank = self.ranks[event.rank]
            after = TRANSITIONS.get((rank.state, type(event)))
            if after is None:
                self.ignored += 1
                if self.root is None and not self.released:
                    self._fail(unfit(rank, event), now)
            else:
                before, rank.state = rank.state, after
                getattr(self, f"_on_{type(event).__name__.lower()}")(rank, event, before, now)
        elif isinstance(event, Interrupt):
            self._on_interrupt(event, now)
        else:
            self._on_tick(now)
        self._on_time(now)
        return self._out

    # ---- a rank's life

    def _on_spawned(self, rank: Rank, event: Spawned, before: State, now: float) -> None:
        rank.pid, rank.host, rank.agent_pid = event.pid, event.host, event.agent_pid

    def _on_agentbeat(self, rank: Rank, event: AgentBeat, before: State, now: float) -> None:
        rank.agent = _heard(rank.agent, now)
        rank.stopped = event.process in ("T", "t")
        # D: waits for a disk
        busy = event.process == "D" or event.cpu_ms - rank.cpu_ms > 1000 * BUSY * (now - rank.beat_at)
        if busy and rank.beat_at and rank.worker is not None:
            rank.worker.heard(now)  # native code that holds the interpreter lets no heartbeat through, but computes
        rank.beat_at, rank.cpu_ms = now, event.cpu_ms

    def _on_hello(self, rank: Rank, event: Hello, before: State, now: float) -> None:
        rank.card, rank.host, rank.ip, rank.pid, rank.port = event.card, event.host, event.ip, event.pid, event.port
        if event.protocol != PROTOCOL:
            text = (
                f"rank {rank.rank} on {rank.host} speaks protocol {event.protocol}, the launcher {PROTOCOL}: "
                "install the same manygrad on all nodes"
            )
            self._fail(Failure(rank.rank, "protocol", text, 1), now)
        elif self.root is None and all(r.state is State.JOINED for r in self.ranks):
            self.joined_at = now
            for r in self.ranks:
                r.state = State.CONNECTING
            first = self.ranks[0]
            self._send("cards", cards=[r.card for r in self.ranks], master=[first.ip, first.port])

    def _on_started(self, rank: Rank, event: Started, before: State, now: float) -> None:
        rank.worker = _heard(rank.worker, now)
        if not self.running_at and all(r.state is not State.CONNECTING for r in self.ranks):
            self.running_at = now

    def _on_progress(self, rank: Rank, event: Progress, before: State, now: float) -> None:
        rank.step, rank.where = event.step, event.where or rank.where
        rank.takes_interrupt = event.takes_interrupt
        rank.waits_for, rank.waits_s, rank.waits_in = event.waits_for, event.waits_ms / 1000, event.waits_in
        rank.worker = _heard(rank.worker, now)
        self._position(rank, event)
        if self.root is None:
            self._diverged(now)
            self._look_apart()

    def _look_apart(self) -> None:
        """Ranks that train without ever communicating train a model each; warn once."""
        if self.warned or len(self.ranks) == 1:
            return
        # (what groups of ranks do among themselves is in the bytes alone)
        if all((r.step or 0) >= APART_STEPS and not (r.collectives or r.plans or r.bytes_sent) for r in self.ranks):
            self.warned = True
            self._out.append(
                Warn(
                    f"{len(self.ranks)} ranks have each made {min(r.step or 0 for r in self.ranks)} steps without any "
                    "communication: each trains a model of its own. Put the parameters on all devices "
                    "(p.shard_(world.devices)) and cut the batch over them (x.shard(world.devices, axis=0))"
                )
            )

    def _on_stopping(self, rank: Rank, event: Stopping, before: State, now: float) -> None:
        rank.where = event.where
        if self.root is not None and self.root.kind == "late" and self.root.rank == rank.rank:
            self.root.where = event.where

    def _on_plan(self, rank: Rank, event: Plan, before: State, now: float) -> None:
        if self.root is not None:
            return
        if event.n != rank.plans + 1:
            return self._fail(
                Failure(rank.rank, "protocol", f"rank {rank.rank} sent plan {event.n} after plan {rank.plans}", 1), now
            )
        rank.plans, rank.plan_text, rank.stands_since = event.n, event.description, now
        rank.collectives = max(rank.collectives, event.collectives)
        first = self.open_plans.setdefault(event.n, event)
        if first.hash != event.hash:
            return self._mismatch(
                event.rank,
                compare.plans_differ(
                    event.n,
                    (first.rank, event.rank),
                    (first.description, event.description),
                    (compare.unpack(first.outline), compare.unpack(event.outline)),
                ),
                now,
            )
        if not self._diverged(now) and all(r.plans >= event.n for r in self.ranks):
            del self.open_plans[event.n]
            self._send("plan_ok", n=event.n)

    def _on_values(self, rank: Rank, event: Values, before: State, now: float) -> None:
        differs = self.values.take(rank.rank, event.name, event.values)
        if differs is not None:
            self._mismatch(rank.rank, differs, now)

    def _on_finished(self, rank: Rank, event: Finished, before: State, now: float) -> None:
        rank.stands_since = now
        self._position(rank, event)
        if self.root is None and not self._diverged(now) and all(r.state is State.FINISHED for r in self.ranks):
            self.released = True
            self._send("release")

    def _position(self, rank: Rank, event: Progress | Finished) -> None:
        if event.collectives >= rank.collectives:
            rank.collectives, rank.collective = event.collectives, event.collective
        rank.bytes_sent, rank.collective_ms, rank.waited_ms = event.bytes_sent, event.collective_ms, event.waited_ms

    def _diverged(self, now: float) -> bool:
        """Fail the run if a rank waits for what another will never do."""
        found = (
            finished_early(self.ranks)
            or left_alone(self.ranks, self.open_plans)
            or left_by_peer(self.ranks, self.open_plans, now)
        )
        if found is not None:
            self._mismatch(*found, now)
        return found is not None

    def _on_failed(self, rank: Rank, event: Failed, before: State, now: float) -> None:
        if before is State.EXITED:
            if (
                rank.failure is not None
                and rank.failure.kind in ("exit", "signal")
                and not rank.failure.traceback
                and not self.term_sent
            ):
                better = failure_of(event)
                if self.root is rank.failure:
                    self.root = better
                rank.failure = better
            return
        rank.step = event.step if event.step is not None else rank.step
        rank.failure = failure_of(event)
        if self.root is None and self.interrupted and event.kind == "KeyboardInterrupt":
            self._fail(_interruption(self.interrupted), now)
        if self.root is None and event.waited_for:
            cause = self._cause_of_waiting(rank, event)
            if cause is not None:
                rank.failure.consequence = True
                self._fail(cause, now)
        self._fail(rank.failure, now)

    def _cause_of_waiting(self, waiting: Rank, event: Failed) -> Failure | None:
        if event.waited_for == "launcher":
            return unheard(self.absent_s, self.silent_s)
        return unreachable(self.ranks, event) if event.waited_for == "peer" else late(self.ranks, waiting, event)

    def _on_exited(self, rank: Rank, event: Exited, before: State, now: float) -> None:
        rank.exit_code = event.code
        if rank.failure is not None or (before is State.FINISHED and event.code == 0 and self.root is None):
            return
        rank.failure = failure_of_exit(rank, event, before, stopping=self.stopping_at > 0, killing=self.term_sent)
        self._fail(rank.failure, now)

    def _on_closed(self, rank: Rank, event: Closed, before: State, now: float) -> None:
        rank.closed = True

    def _on_agentlost(self, rank: Rank, event: AgentLost, before: State, now: float) -> None:
        rank.closed = True
        if before is not State.EXITED and rank.failure is None:
            rank.failure = Failure(
                rank.rank,
                "lost",
                f"its supervisor is gone: {event.reason}",
                1,
                step=rank.step,
                consequence=self.term_sent,
            )
            self._fail(rank.failure, now)

    # ---- the run's end

    def _on_interrupt(self, event: Interrupt, now: float) -> None:
        takers = [r.rank for r in self.ranks if r.state is State.RUNNING and r.takes_interrupt]
        if self.root is None and takers and not self.interrupted:
            self.interrupted = event.signum
            self._out.append(Send(tuple(takers), "interrupt", {}))
            text = f"{signal_name(event.signum)} goes to {ranks_text(takers)}, whose script ends by itself; "
            self._out.append(Warn(text + "a second one ends the run at once"))
            return
        if self.root is not None and self.root.kind == "interrupt" and not self.kill_sent:  # asked twice: at once
            self.term_sent = self.kill_sent = True
            self.stopping_at = now - self.grace_s - KILL_AFTER_TERM_S
            self._kill(signal.SIGKILL)
        else:
            self._fail(_interruption(event.signum), now)

    def _mismatch(self, culprit: int, text: str, now: float) -> None:
        self._fail(Failure(culprit, "plan", f"PlanMismatch: {text}", 1), now)

    def _fail(self, failure: Failure, now: float) -> None:
        """The run is over; `failure` is its root cause unless an earlier one is."""
        if self.root is None:
            self.root, self.stopping_at = failure, now
            kind = failure.kind if failure.kind in ("plan", "interrupt") else "failure"
            reason = (
                failure.title
                if failure.rank is None or failure.kind == "plan"
                else f"rank {failure.rank} failed: {failure.title}"
            )
            self._send(
                "abort",
                rank=-1 if failure.rank is None else failure.rank,
                kind=kind,
                reason=reason.removeprefix("PlanMismatch: "),
            )
        elif self.root.consequence and not failure.consequence and not self.term_sent:
            self.root = failure

    def _on_tick(self, now: float) -> None:
        """Heartbeats, ours and theirs. Looked at only now, when everything that had come was taken in."""
        if self.root is None and now >= self.next_beat:
            self.next_beat = now + BEAT_S
            self._out.append(Beat())
        for r in self.ranks:
            silent_s = r.worker.look(now) if r.worker is not None else 0.0
            agent_silent_s = r.agent.look(now) if r.agent is not None else 0.0
            if self.root is not None or r.state not in (State.RUNNING, State.CONNECTING, State.FINISHED):
                continue
            if silent_s > self.silent_s:
                why = "its process is stopped (SIGSTOP)" if r.stopped else "stopped, or the network is cut"
                title = f"no sign of life for {self.silent_s:g} s ({why})"
                self._fail(Failure(r.rank, "silent", title, 1, where=r.where, step=r.step), now)
            elif agent_silent_s > self.silent_s:
                title = (
                    f"no sign of life of its supervisor (pid {r.agent_pid}) for {self.silent_s:g} s (stopped, "
                    "or the network is cut)"
                )
                self._fail(Failure(r.rank, "silent", title, 1, where=r.where, step=r.step), now)

    def _on_time(self, now: float) -> None:
        """Deadlines of the run and of its end."""
        if self.root is None:
            if self.timeout_s is not None and now - self.started_at > self.timeout_s:
                title = f"the run took longer than its time-out of {self.timeout_s:g} s{laggard(self.ranks)}"
                self._fail(Failure(None, "timeout", title, EXIT_TIMEOUT), now)
            elif not self.running_at and now - self.started_at > self.start_timeout_s:
                missing = [r.rank for r in self.ranks if r.state in (State.WAITING, State.SPAWNED, State.CONNECTING)]
                self._fail(
                    Failure(
                        None,
                        "timeout",
                        f"{ranks_text(missing)} did not start within {self.start_timeout_s:g} s",
                        EXIT_TIMEOUT,
                    ),
                    now,
                )
        elif not self.term_sent and now - self.stopping_at > self.grace_s:
            self.term_sent = True
            self._kill(signal.SIGTERM)
        elif self.term_sent and not self.kill_sent and now - self.stopping_at > self.grace_s + KILL_AFTER_TERM_S:
            self.kill_sent = True
            self._kill(signal.SIGKILL)
        if all(r.state is State.EXITED for r in self.ranks):
            self.all_exited_at = self.all_exited_at or now
            closed = all(r.closed for r in self.ranks) or now - self.all_exited_at > CLOSE_S
        else:
            closed = self.kill_sent and now - self.stopping_at > self.grace_s + KILL_AFTER_TERM_S + GIVE_UP_S
        if closed:
            self.done = True
            self._out.append(Done())

    def _send(self, type: str, /, **content: Any) -> None:
        ranks = tuple(r.rank for r in self.ranks if r.state not in (State.EXITED, State.FAILED))
        if ranks:
            self._out.append(Send(ranks, type, content))

    def _kill(self, signum: int) -> None:
        ranks = tuple(r.rank for r in self.ranks if r.state is not State.EXITED)
        if ranks:
            self._out.append(Kill(ranks, int(signum)))


def _interruption(signum: int) -> Failure:
    if signum == signal.SIGINT:
        return Failure(None, "interrupt", "interrupted by Ctrl-C", EXIT_INTERRUPTED)
    return Failure(None, "interrupt", f"the launcher received {signal_name(signum)}", 128 + signum)


def _heard(silence: Silence | None, now: float) -> Silence:
    """The silence that a heartbeat has just ended."""
    silence = silence or Silence(now)
    silence.heard(now)
    return silence
