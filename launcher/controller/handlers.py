"""What each kind of event does. The rank has its next state already (`table.py`, which says when a handler is called).

A rank that waited in vain is the echo of another rank's failure: the rank that did not come is the root cause.
Ctrl-C ends the run as a failure does, unless scripts have a handler for it: these hear of the first one. At SIGTERM
ranks that can save do so first.
"""

from __future__ import annotations

import signal

from manygrad.errors import EXIT_INTERRUPTED, Preempted

from ..causes import failure_of, failure_of_exit, late, unheard, unreachable
from ..messages import (
    PROTOCOL,
    AgentBeat,
    AgentLost,
    AtStep,
    Closed,
    Committed,
    Exited,
    Failed,
    Finished,
    Hello,
    Interrupt,
    NodesBack,
    Planned,
    Progress,
    Ready,
    Spawned,
    Started,
    Stopping,
    Terminated,
    Tick,
    Values,
)
from ..ranks import Failure, Rank, State, ranks_text, signal_name
from .run_state import RunState

# ---- a rank's life


def spawned(run: RunState, rank: Rank, event: Spawned, now: float) -> None:
    rank.pid, rank.host, rank.agent_pid = event.pid, event.host, event.agent_pid


def supervisor_beat(run: RunState, rank: Rank, event: AgentBeat, now: float) -> None:
    run.watch.supervisor_heard(rank, event, now)


def joined(run: RunState, rank: Rank, event: Hello, now: float) -> None:
    """The last one to join has all connect."""
    rank.card, rank.host, rank.ip, rank.pid, rank.port = event.card, event.host, event.ip, event.pid, event.port
    if event.protocol != PROTOCOL:
        text = (
            f"rank {rank.rank} on {rank.host} speaks protocol {event.protocol}, the launcher {PROTOCOL}: "
            "install the same manygrad on all nodes"
        )
        run.fail(Failure(rank.rank, "protocol", text, 1), now)
    elif run.root is None and all(r.state is State.JOINED for r in run.ranks):
        run.joined_at = now
        for r in run.ranks:
            r.state = State.CONNECTING
        first = run.ranks[0]
        run.orders.send("cards", cards=[r.card for r in run.ranks], master=[first.ip, first.port])


def started(run: RunState, rank: Rank, event: Started, now: float) -> None:
    run.watch.worker_heard(rank, now)
    if not run.running_at and all(r.state is not State.CONNECTING for r in run.ranks):
        run.running_at = now


def progress(run: RunState, rank: Rank, event: Progress, now: float) -> None:
    rank.step, rank.where = event.step, event.where or rank.where
    rank.takes_interrupt, rank.saves = event.takes_interrupt, event.saves
    rank.waits_for, rank.waits_s, rank.waits_in = event.waits_for, event.waits_ms / 1000, event.waits_in
    run.watch.worker_heard(rank, now)
    run.programs.position(rank, event)
    if run.root is None:
        run.differ(run.programs.divergence(now), now)
        if warning := run.programs.apart():
            run.orders.warn(warning)


def plan(run: RunState, rank: Rank, event: Planned, now: float) -> None:
    """Ranks go on when all have made the same plan."""
    if run.root is not None:
        return
    if event.n != rank.plans + 1:
        title = f"rank {rank.rank} sent plan {event.n} after plan {rank.plans}"
        run.fail(Failure(rank.rank, "protocol", title, 1), now)
    elif not run.differ(run.programs.plan(rank, event, now) or run.programs.divergence(now), now):
        if run.programs.agreed(event.n):
            run.orders.send("plan_ok", n=event.n)


def values(run: RunState, rank: Rank, event: Values, now: float) -> None:
    run.differ(run.programs.compare_values(event), now)


def committed(run: RunState, rank: Rank, event: Committed, now: float) -> None:
    """Nodes that have come back are used from here on: all ranks save once more, at the same step, and end."""
    rank.saved = event.step if rank.saved is None else max(rank.saved, event.step)
    preemption = run.preemption
    if run.root is None and preemption.nodes_back and not preemption.asked and preemption.possible():
        run.orders.warn(f"there are {preemption.nodes_back} nodes again: all ranks save, and go on on them")
        preemption.ask(None, now, for_nodes=preemption.nodes_back)


def at_step(run: RunState, rank: Rank, event: AtStep, now: float) -> None:
    if run.root is None:
        run.preemption.at_step(rank, event.step)


def terminated(run: RunState, rank: Rank, event: Terminated, now: float) -> None:
    """The rank is preempted, and the run without it is none."""
    if run.root is None and not run.preemption.asked:
        run.orders.warn(f"rank {rank.rank} got SIGTERM: all ranks save, within --grace")
        run.preemption.ask(rank.rank, now)
        run.preemption.settle()


def finished(run: RunState, rank: Rank, event: Finished, now: float) -> None:
    """When all have, they may go."""
    rank.stands_since = now
    run.programs.position(rank, event)
    if run.root is None and not run.differ(run.programs.divergence(now), now):
        run.preemption.settle()
        if all(r.state is State.FINISHED for r in run.ranks):
            run.released = True
            run.orders.send("release")


# ---- a rank's end


def failed(run: RunState, rank: Rank, event: Failed, now: float) -> None:
    rank.step = event.step if event.step is not None else rank.step
    rank.failure = failure_of(event)
    if event.kind == Preempted.__name__:
        run.fail(run.preemption.done(event.message), now)
    if run.root is None and run.interrupted and event.kind == "KeyboardInterrupt":
        run.fail(_interruption(run.interrupted), now)
    if run.root is None and event.waited_for:
        cause = _cause_of_waiting(run, rank, event)
        if cause is not None:
            rank.failure.consequence = True
            run.fail(cause, now)
    run.fail(rank.failure, now)


def _cause_of_waiting(run: RunState, waiting: Rank, event: Failed) -> Failure | None:
    if event.waited_for == "launcher":
        return unheard(run.watch.absent_s, run.watch.silent_s)
    return unreachable(run.ranks, event) if event.waited_for == "peer" else late(run.ranks, waiting, event)


def last_words(run: RunState, rank: Rank, event: Failed, now: float) -> None:
    """The worker's own word on its end, after the supervisor's: it says more than an exit code."""
    told = rank.failure
    if told is None or told.kind not in ("exit", "signal") or told.traceback or run.ending.term_sent:
        return
    rank.failure = failure_of(event)
    if run.root is told:
        run.ending.root = rank.failure


def stopping(run: RunState, rank: Rank, event: Stopping, now: float) -> None:
    rank.where = event.where
    if run.root is not None and run.root.kind == "late" and run.root.rank == rank.rank:
        run.root.where = event.where


def ready(run: RunState, rank: Rank, event: Ready, now: float) -> None:
    """Unless it was told to end, which it may hear a moment later."""
    if run.ending.term_sent:
        rank.state = State.FAILED


def heard(run: RunState, rank: Rank, event: Progress, now: float) -> None:
    run.watch.worker_heard(rank, now)


def exited(run: RunState, rank: Rank, event: Exited, now: float) -> None:
    """Without a word: the exit code is the failure."""
    rank.exit_code = event.code
    if rank.failure is None:
        _exit_is_failure(run, rank, event, now, after_finish=False)


def exited_after_finish(run: RunState, rank: Rank, event: Exited, now: float) -> None:
    rank.exit_code = event.code
    if rank.failure is None and (event.code != 0 or run.root is not None):
        _exit_is_failure(run, rank, event, now, after_finish=True)


def _exit_is_failure(run: RunState, rank: Rank, event: Exited, now: float, *, after_finish: bool) -> None:
    rank.failure = failure_of_exit(
        rank, event, after_finish=after_finish, stopping=run.root is not None, killing=run.ending.term_sent
    )
    run.fail(rank.failure, now)


def closed(run: RunState, rank: Rank, event: Closed, now: float) -> None:
    rank.closed = True


def supervisor_lost(run: RunState, rank: Rank, event: AgentLost, now: float) -> None:
    rank.closed = True
    if rank.failure is None:
        title = f"its supervisor is gone: {event.reason}"
        rank.failure = Failure(rank.rank, "lost", title, 1, step=rank.step, consequence=run.ending.term_sent)
        run.fail(rank.failure, now)


def supervisor_ended(run: RunState, rank: Rank, event: AgentLost, now: float) -> None:
    """After its worker: nothing more comes of the two."""
    rank.closed = True


# ---- the run


def interrupt(run: RunState, event: Interrupt, now: float) -> None:
    if run.root is None and event.signum == signal.SIGTERM and run.preemption.possible():
        run.orders.warn("SIGTERM: all ranks save, within --grace; a second one ends the run at once")
        run.preemption.ask(None, now)
        return
    takers = [r.rank for r in run.ranks if r.state is State.RUNNING and r.takes_interrupt]
    if run.root is None and takers and not run.interrupted and not run.preemption.asked:
        run.interrupted = event.signum
        run.orders.send_to(takers, "interrupt")
        text = f"{signal_name(event.signum)} goes to {ranks_text(takers)}, whose script ends by itself; "
        run.orders.warn(text + "a second one ends the run at once")
    elif run.root is not None and run.root.kind == "interrupt" and not run.ending.kill_sent:  # asked twice: at once
        run.ending.kill_at_once(now)
    else:
        run.fail(_interruption(event.signum), now)


def _interruption(signum: int) -> Failure:
    if signum == signal.SIGINT:
        return Failure(None, "interrupt", "interrupted by Ctrl-C", EXIT_INTERRUPTED)
    return Failure(None, "interrupt", f"the launcher received {signal_name(signum)}", 128 + signum)


def nodes_back(run: RunState, event: NodesBack, now: float) -> None:
    run.preemption.nodes_back = event.nodes


def tick(run: RunState, event: Tick, now: float) -> None:
    """Heartbeats, ours and theirs. Looked at only now, when everything that had come was taken in."""
    if run.root is None and run.watch.beat_is_due(now):
        run.orders.beat()
        if text := run.watch.late(now):
            run.orders.warn(text)
    silent = run.watch.silent(now)
    if run.root is None:
        run.fail(silent, now)


def pass_time(run: RunState, now: float) -> None:
    """Deadlines of the run and of its end, after each event."""
    if run.root is None:
        run.fail(run.watch.overdue(now, run.running_at > 0) or run.preemption.overdue(now), now)
    run.ending.go_on(now)
