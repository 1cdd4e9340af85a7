"""The ranks of a run: what is known of each, the states of its life, and how it may have failed."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .link import Silence


class State(Enum):
    """Where a rank is in its life; `controller/table.py` says how it comes from one to another."""

    WAITING = "waiting"  # no process yet
    SPAWNED = "spawned"  # the process runs
    JOINED = "joined"  # its card is here
    CONNECTING = "connecting"  # it has all cards
    RUNNING = "running"  # in the user's script, its threads or its exit handlers
    FINISHED = "finished"  # all of it ended well
    FAILED = "failed"  # the script ended by an exception
    READY = "ready"  # after that the process has left the epoch, and waits for the next one
    EXITED = "exited"  # the process is gone


@dataclass
class Failure:
    """Cause of the end of a rank or of the run. `rank` is None for a time-out or an interrupt;
    `code` is the exit code it stands for."""

    rank: int | None
    kind: str  # exception, exit, signal, lost, silent, late, plan, timeout, interrupt, protocol, preempted
    title: str
    code: int
    traceback: str = ""
    where: str = ""
    step: int | None = None
    consequence: bool = False


@dataclass
class Rank:
    """State of one rank. Large: what is known of a rank."""

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
    saved: int | None = None  # the step of the last checkpoint that it told of
    bytes_sent: int = 0
    collective_ms: int = 0
    waited_ms: int = 0
    takes_interrupt: bool = False  # its script has a handler for Ctrl-C
    saves: bool = False  # its script has a Checkpointer
    waits_for: int = -1  # the rank of which it needs something in a collective, `waits_in`, that does not come
    waits_s: float = 0.0
    waits_in: str = ""
    stands_since: float = 0.0  # when it came to its last plan, or to its end
    plans: int = 0
    plan_text: str = ""
    collectives: int = 0
    collective: str = ""
    where: str = ""
    failure: Failure | None = None
    exit_code: int | None = None
    closed: bool = False


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
