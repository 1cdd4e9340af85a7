"""Decides how a run goes: events in, instructions out. No I/O, no clock, no threads; tested without any process.

The life of a rank is one table (`TRANSITIONS`); an event that is not legal in a rank's state is counted and ignored, so
that nothing a confused worker sends can harm the others. The first failure that is not itself the echo of another
rank's failure is the root cause; it ends the run for everybody: told first (`abort`), SIGTERM after `grace_s`,
then SIGKILL. A rank that waited in vain is such an echo: the rank that did not come is the root cause.

Everybody hears a heartbeat of everybody that matters to it: workers and supervisors say each second that they are
there, and so do we (`Beat`). Progress is watched, not life alone: a worker whose process computes is not silent, even
when native code holds its interpreter.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from . import compare
from .errors import EXIT_INTERRUPTED, EXIT_TIMEOUT
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

KILL_AFTER_TERM_S, GIVE_UP_S, CLOSE_S = 0.7, 0.6, 1.5
APART_STEPS = 100  # of every rank without any communication: worth a warning
QUIET_S = 3.0  # a rank that missed so many seconds of heartbeats may be what another waits for
BUSY = 0.05  # of one core: a process that uses so much computes


class State(Enum):
    WAITING = "waiting"  # no process yet
    SPAWNED = "spawned"  # the process runs
    JOINED = "joined"  # its card is here
    CONNECTING = "connecting"  # it has all cards
    RUNNING = "running"  # in the user's script
    FINISHED = "finished"  # the script ended well
    FAILED = "failed"  # the script ended by an exception; the process is about to end
    EXITED = "exited"  # the process is gone


_ALIVE = (State.SPAWNED, State.JOINED, State.CONNECTING, State.RUNNING, State.FINISHED)
TRANSITIONS: dict[tuple[State, type[Event]], State] = {
    (State.WAITING, Spawned): State.SPAWNED,
    (State.JOINED, Spawned): State.JOINED,  # two connections: the agent's word may come after the worker's
    (State.CONNECTING, Spawned): State.CONNECTING,
    (State.RUNNING, Spawned): State.RUNNING,
    (State.FAILED, Spawned): State.FAILED,
    (State.WAITING, Hello): State.JOINED,
    (State.SPAWNED, Hello): State.JOINED,
    (State.CONNECTING, Started): State.RUNNING,
    (State.RUNNING, Plan): State.RUNNING,
    (State.RUNNING, Values): State.RUNNING,
    (State.RUNNING, Finished): State.FINISHED,
    **{(s, Progress): s for s in (State.WAITING, *_ALIVE)},
    **{(s, AgentBeat): s for s in State},
    **{(s, Stopping): s for s in (State.WAITING, *_ALIVE)},
    **{(s, Failed): State.FAILED for s in (State.WAITING, *_ALIVE)},
    **{(s, Exited): State.EXITED for s in (State.WAITING, *_ALIVE, State.FAILED)},
    **{(s, AgentLost): State.EXITED for s in (State.WAITING, *_ALIVE, State.FAILED)},
    (State.EXITED, Closed): State.EXITED,
    (State.EXITED, AgentLost): State.EXITED,
    (State.EXITED, Failed): State.EXITED,  # the worker's last words may come after the agent's report of its end
}


@dataclass
class Failure:
    """What ended a rank or the run. `rank` is None for a time-out or an interrupt;
    `code` is the exit code it stands for."""

    rank: int | None
    kind: str  # exception, exit, signal, lost, silent, late, plan, timeout, interrupt, protocol
    title: str
    code: int
    traceback: str = ""
    where: str = ""
    step: int | None = None
    consequence: bool = False


@dataclass
class Rank:
    """What is known of one rank."""

    rank: int
    state: State = State.WAITING
    host: str = ""
    ip: str = ""
    port: int = 0
    pid: int = 0
    agent_pid: int = 0
    card: dict[str, Any] = field(default_factory=dict)
    worker: Silence | None = None  # of the worker, since it runs; for how long we have heard nothing
    agent: Silence | None = None  # of its supervisor
    stopped: bool = False  # its process is stopped (SIGSTOP)
    beat_at: float = 0.0  # of the supervisor's last heartbeat
    cpu_ms: int = 0  # that the worker's process had used by then
    step: int | None = None
    bytes_sent: int = 0
    collective_ms: int = 0
    waited_ms: int = 0
    plans: int = 0
    plan_text: str = ""
    collectives: int = 0
    collective: str = ""
    where: str = ""
    failure: Failure | None = None
    exit_code: int | None = None
    closed: bool = False


@dataclass(frozen=True)
class Send:
    """Send one message to the workers of these ranks."""

    ranks: tuple[int, ...]
    type: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """Have the agents of these ranks send a signal to the worker's process group."""

    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True)
class Done:
    """The run is over: every process ended, or all time for it is up."""


@dataclass(frozen=True)
class Warn:
    """Tell the user; the run goes on."""

    text: str


@dataclass(frozen=True)
class Beat:
    """Tell all workers and supervisors that the launcher is there."""


Instruction = Send | Kill | Beat | Done | Warn


class Controller:
    """The state of a run of `size` ranks. Times are seconds of any monotonic clock, passed in with every event."""

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
        self.ignored = 0
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
        rank.worker = _heard(rank.worker, now)
        self._position(rank, event)
        if self.root is None:
            self._diverged(now)
            self._look_apart()

    def _look_apart(self) -> None:
        """Ranks that train without ever communicating train a model each; warn once."""
        if self.warned or len(self.ranks) == 1:
            return
        if all((r.step or 0) >= APART_STEPS and not r.collectives and not r.plans for r in self.ranks):
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
        rank.plans, rank.plan_text = event.n, event.description
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
        self._position(rank, event)
        if self.root is None and not self._diverged(now) and all(r.state is State.FINISHED for r in self.ranks):
            self._send("release")

    def _position(self, rank: Rank, event: Progress | Finished) -> None:
        if event.collectives >= rank.collectives:
            rank.collectives, rank.collective = event.collectives, event.collective
        rank.bytes_sent, rank.collective_ms, rank.waited_ms = event.bytes_sent, event.collective_ms, event.waited_ms

    def _diverged(self, now: float) -> bool:
        """Fail the run if a rank waits for what another will never do."""
        return self._finished_early(now) or self._left_alone(now)

    def _left_alone(self, now: float) -> bool:
        """A rank is in a collective, and another, which has finished or waits in a plan, has not come to it.

        All ranks enter the same collectives between the same plans, so that one never will.
        """
        ahead = max(self.ranks, key=lambda r: r.collectives)
        for r in self.ranks:
            waits = r.plans in self.open_plans
            if r.collectives < ahead.collectives and (waits or r.state is State.FINISHED):
                last = f", the last {r.collective}" if r.collective else ""
                does = f"plan {r.plans}, {r.plan_text}" if waits else "the end of the script"
                self._mismatch(
                    r.rank,
                    f"the ranks run different programs: rank {ahead.rank} is in collective {ahead.collectives}, "
                    f"rank {r.rank} came to {'a plan' if waits else 'its end'} after {r.collectives}\n"
                    f"  rank {ahead.rank}: {ahead.collective}\n  rank {r.rank}: {does}{last}",
                    now,
                )
                return True
        return False

    def _finished_early(self, now: float) -> bool:
        """Fail the run if a rank has finished its script while others wait in a plan that it will never make."""
        for r in self.ranks:
            waiting = [w for w in self.ranks if w.plans > r.plans]
            if r.state is State.FINISHED and waiting:
                w = waiting[0]
                self._mismatch(
                    r.rank,
                    f"rank {r.rank} finished the script while {ranks_text([x.rank for x in waiting])} "
                    f"wait{'s' if len(waiting) == 1 else ''} "
                    f"in plan {w.plans}\n  rank {w.rank}: {w.plan_text}\n"
                    f"  rank {r.rank}: made {r.plans} plan{'s' if r.plans != 1 else ''}"
                    f"{', the last ' + r.plan_text if r.plan_text else ''}, and finished",
                    now,
                )
                return True
        return False

    def _on_failed(self, rank: Rank, event: Failed, before: State, now: float) -> None:
        if before is State.EXITED:
            if (
                rank.failure is not None
                and rank.failure.kind in ("exit", "signal")
                and not rank.failure.traceback
                and not self.term_sent
            ):
                better = self._failure_of(event)
                if self.root is rank.failure:
                    self.root = better
                rank.failure = better
            return
        rank.step = event.step if event.step is not None else rank.step
        rank.failure = self._failure_of(event)
        if self.root is None and event.waited_for:
            cause = {"launcher": self._unheard, "peer": self._unreachable}.get(event.waited_for, self._late)(
                rank, event
            )
            if cause is not None:
                rank.failure.consequence = True
                self._fail(cause, now)
        self._fail(rank.failure, now)

    def _late(self, waiting: Rank, event: Failed) -> Failure | None:
        """Why `waiting` waited in vain: the rank that did not come to where it is, a stopped one first;
        None if that is not known."""
        others = [r for r in self.ranks if r is not waiting and r.failure is None and r.state is not State.EXITED]
        mute = [r for r in others if r.stopped or (r.worker is not None and r.worker.seconds > QUIET_S)]
        if event.waited_for == "plan":
            behind, point = (
                [r for r in others if r.plans < waiting.plans],
                f"plan {waiting.plans} ({waiting.plan_text})",
            )
        else:
            behind = [r for r in others if r.collectives < waiting.collectives]
            point = f"collective {waiting.collectives} ({waiting.collective})"
        peer = [r for r in others if r.rank == event.peer]
        found = (
            [r for r in mute if r in behind] or mute or sorted(behind, key=lambda r: (r.plans, r.collectives)) or peer
        )
        if not found:
            return None
        late = found[0]
        did = "did not come to" if late in behind else "did not get through"
        why = (
            ", its process is stopped (SIGSTOP)"
            if late.stopped
            else ", it gives no sign of life"
            if late in mute
            else ""
        )
        title = f"it {did} {point}, where {ranks_text([waiting.rank])} waited until its deadline{why}"
        return Failure(late.rank, "late", title, 1, where=late.where, step=late.step)

    def _unreachable(self, waiting: Rank, event: Failed) -> Failure | None:
        """The rank that `waiting` has lost, if all that is known is that; what it says itself comes before."""
        lost = next((r for r in self.ranks if r.rank == event.peer), None)
        if lost is None or lost.failure is not None or lost.state is State.EXITED:
            return None
        return Failure(lost.rank, "unreachable", event.message, 1, where=lost.where, step=lost.step, consequence=True)

    def _unheard(self, waiting: Rank, event: Failed) -> Failure:
        """The ranks ended because they did not hear us."""
        why = f"it did not run for {self.absent_s:.0f} s (suspended?)" if self.absent_s else "the network was cut?"
        return Failure(None, "unheard", f"the ranks did not hear the launcher for {self.silent_s:g} s: {why}", 1)

    def _failure_of(self, event: Failed) -> Failure:
        kind = "exit" if event.kind == "SystemExit" else "exception"
        title = event.message if kind == "exit" else f"{event.kind}: {event.message}" if event.message else event.kind
        return Failure(
            event.rank, kind, title, event.code & 0xFF or 1, event.traceback, event.where, event.step, event.consequence
        )

    def _on_exited(self, rank: Rank, event: Exited, before: State, now: float) -> None:
        rank.exit_code = event.code
        if rank.failure is not None or (before is State.FINISHED and event.code == 0 and self.root is None):
            return
        if event.code < 0:
            ours = self.term_sent and -event.code in (signal.SIGTERM, signal.SIGKILL)
            rank.failure = Failure(
                rank.rank,
                "signal",
                f"killed by {signal_name(-event.code)}",
                128 - event.code,
                step=rank.step,
                consequence=ours,
            )
        else:
            why = (
                "after the script had finished"
                if before is State.FINISHED
                else "before it could report (os._exit, or a crash of the interpreter?)"
            )
            quiet = self.stopping_at > 0 and event.code in (0, 1)
            rank.failure = Failure(
                rank.rank,
                "exit",
                f"the process ended with code {event.code} {why}",
                event.code or 1,
                step=rank.step,
                consequence=quiet,
            )
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
        if self.root is not None and self.root.kind == "interrupt" and not self.kill_sent:  # asked twice: at once
            self.term_sent = self.kill_sent = True
            self.stopping_at = now - self.grace_s - KILL_AFTER_TERM_S
            self._kill(signal.SIGKILL)
        elif event.signum == signal.SIGINT:
            self._fail(Failure(None, "interrupt", "interrupted by Ctrl-C", EXIT_INTERRUPTED), now)
        else:
            self._fail(
                Failure(None, "interrupt", f"the launcher received {signal_name(event.signum)}", 128 + event.signum),
                now,
            )

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

    def _laggard(self) -> str:
        """`; rank 1 is behind the others, at train.py:9 in load`, if one is."""
        alive = [r for r in self.ranks if r.state is State.RUNNING]
        ahead = max((r.collectives for r in self.ranks), default=0)
        behind = [r for r in alive if r.stopped or r.collectives < ahead or len(alive) < len(self.ranks)]
        if not behind or len(behind) == len(self.ranks):
            return ""
        r = min(behind, key=lambda r: (not r.stopped, r.plans, r.collectives))
        return f"; rank {r.rank} is {'stopped (SIGSTOP)' if r.stopped else 'behind the others'}" + (
            f", at {r.where}" if r.where else ""
        )

    def _on_time(self, now: float) -> None:
        """Deadlines of the run and of its end."""
        if self.root is None:
            if self.timeout_s is not None and now - self.started_at > self.timeout_s:
                title = f"the run took longer than its time-out of {self.timeout_s:g} s{self._laggard()}"
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


def _heard(silence: Silence | None, now: float) -> Silence:
    """The silence that a heartbeat has just ended."""
    silence = silence or Silence(now)
    silence.heard(now)
    return silence


def signal_name(signum: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def ranks_text(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    ranks, runs = sorted(ranks), list[list[int]]()
    for r in ranks:
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    return f"rank{'s' if len(ranks) != 1 else ''} " + ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)
