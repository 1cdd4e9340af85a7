"""The control channel's messages: small JSON objects, checked field by field before anyone acts on them.

Workers and node agents send the events below to the driver; the rank is never read from a message but comes from the
connection's authenticated key. The driver answers with plain objects `{"type": "cards" | "abort" | ...}`.
Nothing received is ever unpickled, no text is longer than `MAX_TEXT`, no message larger than `MAX_MESSAGE`.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from typing import Any

from manygrad.errors import ProtocolError

PROTOCOL = 8
MAX_TEXT, MAX_MESSAGE = 1 << 17, 1 << 20


@dataclass(frozen=True)
class Event:
    """Something that happened to one rank."""

    rank: int


@dataclass(frozen=True)
class Spawned(Event):
    """The supervisor (process `agent_pid` of that host) started the rank's process."""

    pid: int
    host: str
    agent_pid: int = 0


@dataclass(frozen=True)
class Hello(Event):
    """The worker is up; `card` says how its peers reach it, `port` is free on its host (rank 0's is MASTER_PORT)."""

    card: dict
    host: str
    ip: str
    pid: int
    port: int
    protocol: int


@dataclass(frozen=True)
class Started(Event):
    """The worker is connected to its peers and enters the user's script."""


@dataclass(frozen=True)
class Progress(Event):
    """Heartbeat with counters. `collectives`: how many it has entered; `collective` describes the last;
    `where` is the main thread's line. `collective_ms`: the time collectives have taken, `waited_ms` the part of it in
    which the rank did nothing else. `takes_interrupt`: the script has a handler of its own for Ctrl-C. `waits_for`: the
    rank of which it needs something that does not come, since `waits_ms`, in the collective `waits_in`. `saves`: it has
    a Checkpointer, with which it can save when it is told to."""

    step: int | None
    plans: int
    bytes_sent: int
    collectives: int = 0
    collective: str = ""
    where: str = ""
    collective_ms: int = 0
    waited_ms: int = 0
    takes_interrupt: bool = False
    waits_for: int = -1
    waits_ms: int = 0
    waits_in: str = ""
    saves: bool = False


@dataclass(frozen=True)
class Planned(Event):
    """The rank made its `n`-th communication plan (counted from 1) and waits for the others to make the same.

    `collectives`: how many it has entered before. `outline`: its graph in words, packed (`compare.py`).
    """

    n: int
    hash: str
    description: str
    collectives: int = 0
    outline: str = ""


@dataclass(frozen=True)
class Values(Event):
    """Digests of values that all ranks must hold alike, of the comparison `name`; in the words of `compare.py`."""

    name: str
    values: str


@dataclass(frozen=True)
class Committed(Event):
    """A checkpoint of so many steps is whole and on disk."""

    step: int


@dataclass(frozen=True)
class AtStep(Event):
    """The rank was told to save, has done so many whole steps, and ends no other one before it has heard at which step
    all ranks save."""

    step: int


@dataclass(frozen=True)
class Terminated(Event):
    """The worker got SIGTERM, and can save a checkpoint: it is preempted."""


@dataclass(frozen=True)
class Failed(Event):
    """The script ended by an exception, or by `sys.exit` with a code that is not 0 (then `traceback` is empty).

    `consequence`: the exception only says that another rank failed. `where` is the user's source line. `waited_for`: it
    waited in vain until its deadline, in a "collective" or a "checkpoint" for rank `peer`, or in a "plan" for any; or
    it has lost the "peer", or heard nothing of the "launcher".
    """

    kind: str
    message: str
    traceback: str
    where: str
    step: int | None
    code: int
    consequence: bool
    waited_for: str = ""
    peer: int = -1


@dataclass(frozen=True)
class Stopping(Event):
    """The worker was told to stop; `where` is what its main thread was doing."""

    where: str


@dataclass(frozen=True)
class Ready(Event):
    """The worker, whose script has failed, has left the epoch; its process waits for the next one."""


@dataclass(frozen=True)
class Finished(Event):
    """The script, its threads and its exit handlers ended, after `collectives`, the last described;
    the worker keeps its connections until all have finished."""

    collectives: int = 0
    collective: str = ""
    bytes_sent: int = 0
    collective_ms: int = 0
    waited_ms: int = 0


@dataclass(frozen=True)
class Output(Event):
    """Text that the rank's process wrote to `stream` (stdout or stderr); goes to the logs, not to the controller."""

    stream: str
    text: str


@dataclass(frozen=True)
class Stacks(Event):
    """Where the worker's threads are, for who has asked (`launcher/inquiries.py`); not for the controller."""

    text: str


@dataclass(frozen=True)
class AgentBeat(Event):
    """The supervisor's heartbeat, with the state of the worker's process (`T`: stopped; empty: ended)
    and the CPU time it has used."""

    process: str
    cpu_ms: int


@dataclass(frozen=True)
class Exited(Event):
    """The process ended: its exit code, or minus the signal that killed it."""

    code: int


@dataclass(frozen=True)
class Closed(Event):
    """The agent has forwarded all output of the ended process."""


@dataclass(frozen=True)
class AgentLost(Event):
    """Made by the driver: the rank's supervisor died, or Ray before there was one."""

    reason: str


@dataclass(frozen=True)
class Interrupt:
    """Made by the driver: it received a signal."""

    signum: int


@dataclass(frozen=True)
class NodesBack:
    """Made by the driver: the run could have so many nodes now, which are more than it has."""

    nodes: int


@dataclass(frozen=True)
class Tick:
    """Made by the driver: time has passed."""


WORKER_EVENTS = {
    c.__name__.lower(): c
    for c in (
        Hello,
        Started,
        Progress,
        Planned,
        Values,
        Failed,
        Stopping,
        Finished,
        Committed,
        AtStep,
        Terminated,
        Stacks,
        Ready,
    )
}
AGENT_EVENTS = {c.__name__.lower(): c for c in (Spawned, AgentBeat, Output, Exited, Closed)}
_ACCEPTED: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "dict": (dict,),
    "bool": (bool,),
    "int | None": (int, type(None)),
}


def encode(kind: str, /, **content: Any) -> bytes:
    """A message as bytes; texts too long for the other side are cut in the middle."""
    return json.dumps({"type": kind, **{k: clip(v) if isinstance(v, str) else v for k, v in content.items()}}).encode()


def clip(text: str, limit: int = MAX_TEXT) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2 - 20]}\n... {len(text) - limit} characters left out ...\n{text[-limit // 2 + 40 :]}"


def readable(text: str) -> str:
    """`text` as every file and terminal takes it: a lone surrogate (of a file name that is no UTF-8, say)
    as `\\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def parse(data: bytes, role: str, rank: int) -> Event:
    """The event in `data`, sent by `role` ("worker" or "agent") of `rank`. Raises ProtocolError."""
    message = parse_object(data)
    known: dict[str, type[Event]] = dict(WORKER_EVENTS if role == "worker" else AGENT_EVENTS if role == "agent" else {})
    cls = known.get(message.pop("type"))
    if cls is None:
        raise ProtocolError(f"unknown message from {role} {rank}")
    wanted = {f.name: str(f.type) for f in fields(cls) if f.name != "rank"}
    optional = {f.name for f in fields(cls) if f.default is not MISSING}
    if not set(wanted) - optional <= set(message) <= set(wanted):
        raise ProtocolError(
            f"{cls.__name__} from {role} {rank} has fields {sorted(message)}, expected {sorted(wanted)}"
        )
    for name, value in message.items():
        kind = wanted[name]
        if not isinstance(value, _ACCEPTED[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ProtocolError(f"{cls.__name__}.{name} from {role} {rank} must be {kind}, got {type(value).__name__}")
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise ProtocolError(
                f"{cls.__name__}.{name} from {role} {rank} has {len(value)} characters, limit {MAX_TEXT}"
            )
        if isinstance(value, int) and not -(1 << 31) <= value < 1 << 63:
            raise ProtocolError(f"{cls.__name__}.{name} from {role} {rank} is out of range")
        if isinstance(value, str):
            message[name] = readable(value)
    return cls(rank, **message)


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object with a text `type`. Raises ProtocolError."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"not JSON: {e}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("not a JSON object with a type")
    return message
