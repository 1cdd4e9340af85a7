"""The life of a rank, as one table: what each kind of event does in each of its states.

    running + Finished  ->  finished, by `handlers.finished`

`FITS` has what can happen, `UNFIT` what cannot, and why; together they have every state with every kind of event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..messages import (
    AgentBeat,
    AgentLost,
    AtStep,
    Closed,
    Committed,
    Event,
    Exited,
    Failed,
    Finished,
    Hello,
    Interrupt,
    NodesBack,
    Output,
    Planned,
    Progress,
    Ready,
    Spawned,
    Stacks,
    Started,
    Stopping,
    Terminated,
    Tick,
    Values,
)
from ..ranks import Rank, State
from . import handlers as h
from .run_state import RunState

Kind = type[Event]
Handler = Callable[[RunState, Rank, Any, float], None]
KINDS: tuple[Kind, ...] = (
    Spawned, Hello, Started, Progress, Planned, Values, Finished, Failed, Stopping, AgentBeat, Exited, Closed,
    AgentLost, Output, Committed, AtStep, Terminated,
    Stacks, Ready,
)  # fmt: skip

WAITING, SPAWNED, JOINED, CONNECTING, RUNNING, FINISHED, FAILED, READY, EXITED = State
BEFORE_RUNNING = (WAITING, SPAWNED, JOINED, CONNECTING)
OF_SCRIPTS: tuple[Kind, ...] = (Planned, Values, Finished, Terminated)
NOT_ENDED = (*BEFORE_RUNNING, RUNNING, FINISHED)


Rows = dict[tuple[State, Kind], tuple[State, Handler]]


def _in(states: tuple[State, ...], kind: Kind, handler: Handler, after: State | None = None) -> Rows:
    """Rows for several states; without `after` a rank stays in its state."""
    return {(s, kind): (after or s, handler) for s in states}


FITS: Rows = {
    (WAITING, Spawned): (SPAWNED, h.spawned),
    # two connections: the supervisor's word may come after the worker's
    **_in((JOINED, CONNECTING, RUNNING, FINISHED, FAILED, READY), Spawned, h.spawned),
    **_in((WAITING, SPAWNED), Hello, h.joined, after=JOINED),
    (CONNECTING, Started): (RUNNING, h.started),
    (RUNNING, Planned): (RUNNING, h.plan),
    (RUNNING, Values): (RUNNING, h.values),
    (RUNNING, Finished): (FINISHED, h.finished),
    **_in((RUNNING, FAILED, EXITED), Committed, h.committed),  # (a save goes on beside the script)
    **_in((RUNNING, FINISHED, FAILED, READY, EXITED), AtStep, h.at_step),  # (an answer, whatever the script does)
    (RUNNING, Terminated): (RUNNING, h.terminated),
    **_in(NOT_ENDED, Progress, h.progress),
    **_in(tuple(State), AgentBeat, h.supervisor_beat),
    **_in(NOT_ENDED, Stopping, h.stopping),
    **_in(NOT_ENDED, Failed, h.failed, after=FAILED),
    (EXITED, Failed): (EXITED, h.last_words),  # here, too, the supervisor may be first
    (FAILED, Ready): (READY, h.ready),
    (READY, Progress): (READY, h.heard),
    **_in((*BEFORE_RUNNING, RUNNING, FAILED, READY), Exited, h.exited, after=EXITED),
    (FINISHED, Exited): (EXITED, h.exited_after_finish),
    (EXITED, Closed): (EXITED, h.closed),
    **_in((*NOT_ENDED, FAILED, READY), AgentLost, h.supervisor_lost, after=EXITED),
    (EXITED, AgentLost): (EXITED, h.supervisor_ended),
}
# events of the run, not of a rank
OF_THE_RUN: dict[type, Callable[[RunState, Any, float], None]] = {
    Interrupt: h.interrupt,
    NodesBack: h.nodes_back,
    Tick: h.tick,
}


def _not_in(states: tuple[State, ...], why: str, *kinds: Kind) -> dict[tuple[State, Kind], str]:
    return {(s, kind): why for s in states for kind in kinds}


UNFIT: dict[tuple[State, Kind], str] = {
    **_not_in((SPAWNED,), "it was started before", Spawned),
    **_not_in((JOINED, CONNECTING, RUNNING, FINISHED), "it has joined before", Hello),
    **_not_in((WAITING, SPAWNED, JOINED), "it has not got the cards of all ranks", Started),
    **_not_in((RUNNING, FINISHED), "it has started before", Started),
    **_not_in(BEFORE_RUNNING, "its script does not run", *OF_SCRIPTS, AtStep, Committed),
    **_not_in((FINISHED,), "its script, its threads and its exit handlers have ended", *OF_SCRIPTS, Committed),
    **_not_in((FAILED,), "its script failed", Hello, Started, Progress, *OF_SCRIPTS, Failed, Stopping),
    **_not_in((EXITED,), "its process ended", Spawned, Hello, Started, Progress, *OF_SCRIPTS, Stopping),
    **_not_in((READY,), "its script failed", Hello, Started, *OF_SCRIPTS, Committed, Failed, Stopping, Ready),
    **_not_in(NOT_ENDED, "its script has not failed", Ready),
    **_not_in((EXITED,), "it has ended before", Exited, Ready),
    **_not_in((*NOT_ENDED, FAILED, READY), "its process has not ended", Closed),
    **_not_in(tuple(State), "output goes to the logs", Output),
    **_not_in(tuple(State), "stacks go to who has asked for them", Stacks),
}


def text() -> str:
    """The table as text: a line for each kind of event, a column for each state; `-` where the event does not fit."""
    rows = [["", *(s.value for s in State)]]
    for kind in KINDS:
        cells = (f"{FITS[s, kind][0].value}" if (s, kind) in FITS else "-" for s in State)
        rows.append([kind.__name__, *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
