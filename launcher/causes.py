"""Who and what made a run fail: pure functions of what is known of the ranks, and of what one of them reports.

A rank that waited in vain is an echo: the rank that did not come is the cause. All ranks make the same plans and enter
the same collectives between them, so where one has ended or waits elsewhere, those that wait for it wait for ever.
"""

from __future__ import annotations

import signal
from collections.abc import Container, Sequence

from .messages import Event, Exited, Failed, Planned
from .ranks import Failure, Rank, State, ranks_text, signal_name

QUIET_S = 3.0  # a rank that missed so many seconds of heartbeats may be what another waits for
ALONE_S = 5.0  # what a rank sent before its end has come by then, or at least some more of it
Difference = tuple[int, str]  # the rank that runs another program, and how it shows


def left_alone(ranks: Sequence[Rank], open_plans: Container[int]) -> Difference | None:
    """A rank is in a collective, and another, which has finished or waits in a plan, has not come to it.

    All ranks enter the same collectives between the same plans, so that one never will.
    """
    ahead = max(ranks, key=lambda r: r.collectives)
    for r in ranks:
        waits = r.plans in open_plans
        if r.collectives < ahead.collectives and (waits or r.state is State.FINISHED):
            last = f", the last {r.collective}" if r.collective else ""
            does = f"plan {r.plans}, {r.plan_text}" if waits else "the end of the script"
            return (
                r.rank,
                f"the ranks run different programs: rank {ahead.rank} is in collective {ahead.collectives}, "
                f"rank {r.rank} came to {'a plan' if waits else 'its end'} after {r.collectives}\n"
                f"  rank {ahead.rank}: {ahead.collective}\n  rank {r.rank}: {does}{last}",
            )
    return None


def left_by_peer(ranks: Sequence[Rank], open_plans: Container[int], now: float) -> Difference | None:
    """A rank of a group waits for another one, which has finished or waits in a plan of all ranks: what groups do among
    themselves nobody else counts."""
    for w in ranks:
        if w.state is not State.RUNNING or not 0 <= w.waits_for < len(ranks) or w.waits_s < ALONE_S:
            continue
        r = ranks[w.waits_for]
        waits = r.plans in open_plans
        if (waits or r.state is State.FINISHED) and now - r.stands_since > ALONE_S:
            does = f"came to plan {r.plans}, {r.plan_text}," if waits else "finished the script"
            return (
                r.rank,
                f"rank {r.rank} {does} while rank {w.rank} waits for it\n  rank {w.rank}: {w.waits_in}",
            )
    return None


def finished_early(ranks: Sequence[Rank]) -> Difference | None:
    """A rank has finished its script while others wait in a plan that it will never make."""
    for r in ranks:
        waiting = [w for w in ranks if w.plans > r.plans]
        if r.state is State.FINISHED and waiting:
            w = waiting[0]
            return (
                r.rank,
                f"rank {r.rank} finished the script while {ranks_text([x.rank for x in waiting])} "
                f"wait{'s' if len(waiting) == 1 else ''} "
                f"in plan {w.plans}\n  rank {w.rank}: {w.plan_text}\n"
                f"  rank {r.rank}: made {r.plans} plan{'s' if r.plans != 1 else ''}"
                f"{', the last ' + r.plan_text if r.plan_text else ''}, and finished",
            )
    return None


def late(ranks: Sequence[Rank], waiting: Rank, event: Failed) -> Failure | None:
    """Why `waiting` waited in vain: the rank that did not come to where it is, a stopped one first;
    None if that is not known."""
    others = [r for r in ranks if r is not waiting and r.failure is None and r.state is not State.EXITED]
    mute = [r for r in others if r.stopped or (r.worker is not None and r.worker.seconds > QUIET_S)]
    if event.waited_for == "plan":
        behind, point = (
            [r for r in others if r.plans < waiting.plans],
            f"plan {waiting.plans} ({waiting.plan_text})",
        )
    elif event.waited_for == "checkpoint":
        behind, point = [r for r in others if r.rank == event.peer], "a checkpoint"
    else:
        behind = [r for r in others if r.collectives < waiting.collectives]
        point = f"collective {waiting.collectives} ({waiting.collective})"
    peer = [r for r in others if r.rank == event.peer]
    found = [r for r in mute if r in behind] or mute or sorted(behind, key=lambda r: (r.plans, r.collectives)) or peer
    if not found:
        return None
    culprit = found[0]
    did = "did not come to" if culprit in behind else "did not get through"
    why = (
        ", its process is stopped (SIGSTOP)"
        if culprit.stopped
        else ", it gives no sign of life"
        if culprit in mute
        else ""
    )
    title = f"it {did} {point}, where {ranks_text([waiting.rank])} waited until its deadline{why}"
    return Failure(culprit.rank, "late", title, 1, where=culprit.where, step=culprit.step)


def unreachable(ranks: Sequence[Rank], event: Failed) -> Failure | None:
    """The rank that a waiting rank has lost, if all that is known is that; what it says itself comes before."""
    lost = next((r for r in ranks if r.rank == event.peer), None)
    if lost is None or lost.failure is not None or lost.state is State.EXITED:
        return None
    return Failure(lost.rank, "unreachable", event.message, 1, where=lost.where, step=lost.step, consequence=True)


def unheard(absent_s: float, silent_s: float) -> Failure:
    """The ranks ended because they did not hear us, who may have been suspended for `absent_s`."""
    why = f"it did not run for {absent_s:.0f} s (suspended?)" if absent_s else "the network was cut?"
    return Failure(None, "unheard", f"the ranks did not hear the launcher for {silent_s:g} s: {why}", 1)


def unfit(rank: Rank, event: Event, why: str) -> Failure:
    """Failure of a rank whose state leaves no room for the event, which is `why`."""
    what = type(event).__name__
    if isinstance(event, Planned) and rank.state is State.FINISHED:
        title = (
            f"it makes plan {event.n} ({event.description}) after its script, its threads and its exit handlers have "
            "ended: a daemon thread does, for which nobody waits; let the script join it"
        )
    else:
        title = f"its {what} does not fit, it is {rank.state.value}: {why}"
    return Failure(rank.rank, "protocol", title, 1, where=rank.where, step=rank.step)


def failure_of(event: Failed) -> Failure:
    """Failure that a rank reports of itself."""
    kind = "exit" if event.kind == "SystemExit" else "exception"
    title = event.message if kind == "exit" else f"{event.kind}: {event.message}" if event.message else event.kind
    return Failure(
        event.rank, kind, title, event.code & 0xFF or 1, event.traceback, event.where, event.step, event.consequence
    )


def failure_of_exit(rank: Rank, event: Exited, *, after_finish: bool, stopping: bool, killing: bool) -> Failure:
    """Failure of a process that has ended without a word. `after_finish`: its script had finished; `stopping`: the run
    was over already; `killing`: SIGTERM was sent."""
    if event.code < 0:
        ours = killing and -event.code in (signal.SIGTERM, signal.SIGKILL)
        return Failure(
            rank.rank,
            "signal",
            f"killed by {signal_name(-event.code)}",
            128 - event.code,
            step=rank.step,
            consequence=ours,
        )
    why = (
        "after the script had finished"
        if after_finish
        else "before it could report (os._exit, or a crash of the interpreter?)"
    )
    quiet = stopping and event.code in (0, 1)
    return Failure(
        rank.rank,
        "exit",
        f"the process ended with code {event.code} {why}",
        event.code or 1,
        step=rank.step,
        consequence=quiet,
    )


def laggard(ranks: Sequence[Rank]) -> str:
    """`; rank 1 is behind the others, at train.py:9 in load`, if one is."""
    alive = [r for r in ranks if r.state is State.RUNNING]
    ahead = max((r.collectives for r in ranks), default=0)
    behind = [r for r in alive if r.stopped or r.collectives < ahead or len(alive) < len(ranks)]
    if not behind or len(behind) == len(ranks):
        return ""
    r = min(behind, key=lambda r: (not r.stopped, r.plans, r.collectives))
    return f"; rank {r.rank} is {'stopped (SIGSTOP)' if r.stopped else 'behind the others'}" + (
        f", at {r.where}" if r.where else ""
    )
