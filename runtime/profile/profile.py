"""A profile: events of a process as a Chrome trace (chrome://tracing, ui.perfetto.dev).

    PROFILE=1 python train.py             writes profile.json when the program ends
    with manygrad.profile("step.json"):   writes what runs inside of it

Tracks: steps, schedule (with its passes), compile (one a thread), kernels, copies, waiting (for collectives) and
collectives (kernels and copies one a device). A trace's `pid` is the worker's rank, and its clock the host's time, so
that the files of several workers can be loaded as one.

Whoever has an event to tell asks `if active` first: where nobody listens, that is all it costs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from manygrad.runtime.current import current
from manygrad.tensor.environment import PROFILE
from manygrad.tensor.uop import passes

TRACKS = ("steps", "schedule", "compile", "kernels", "copies", "waiting", "collectives", "calls")  # in the order shown
FILE = "profile.json"
MAX_EVENTS = 1_000_000


class TraceEvent(NamedTuple):
    """`start` and `end` are of `time.perf_counter`; `args` a dict,
    or a function that makes it when the trace is written."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, Any] | Callable[[], dict[str, Any]] = {}


class Profile:
    """The events of one stretch of a program. `path` as PROFILE has it; empty: nothing is written."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.events: list[TraceEvent] = []
        self.dropped = 0  # events beyond MAX_EVENTS
        self.epoch = time.time() - time.perf_counter()

    def chrome(self) -> dict[str, Any]:
        """The trace in Chrome's JSON form: complete events (`ph` X, times in microseconds),
        after the names of process and tracks (M)."""
        names = sorted({e.track for e in self.events}, key=lambda n: (TRACKS.index(n.split()[0]), n))
        tracks = {name: i for i, name in enumerate(names)}
        pid = current().world.rank
        rows: list[dict[str, Any]] = [
            _meta("process_name", pid, 0, name=f"rank {pid} on {socket.gethostname()}"),
            _meta("process_sort_index", pid, 0, sort_index=pid),
        ]
        for name, tid in tracks.items():
            rows += [_meta("thread_name", pid, tid, name=name), _meta("thread_sort_index", pid, tid, sort_index=tid)]
        for e in self.events:
            args = e.args() if callable(e.args) else e.args
            rows.append({
                "name": e.name, "cat": e.track.split()[0], "ph": "X", "pid": pid, "tid": tracks[e.track],
                "ts": round((e.start + self.epoch) * 1e6, 3), "dur": round(max(0.0, e.end - e.start) * 1e6, 3),
                "args": args,
            })  # fmt: skip
            if "message" in args:
                rows.append(_arrow(rows[-1]))
        return {"traceEvents": rows, "displayTimeUnit": "ms"}

    def write(self) -> str:
        """Writes the trace and gives its path; a whole file or none."""
        path = file_of(self.path)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        new = f"{path}.{os.getpid()}.new"
        try:
            with open(new, "w", encoding="utf-8") as file:
                json.dump(self.chrome(), file, default=str)
            os.replace(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        return path


def _arrow(row: dict[str, Any]) -> dict[str, Any]:
    """The end of an arrow at the event of a message: it leaves where that is sent, and comes in where it has been
    received. Both have the message's text as their id, also in the traces of two ranks."""
    leaves = row["name"].startswith("send")
    end = {"name": "message", "cat": "message", "id": row["args"]["message"], "pid": row["pid"], "tid": row["tid"]}
    return (
        {**end, "ph": "s", "ts": row["ts"]} if leaves else {**end, "ph": "f", "bp": "e", "ts": row["ts"] + row["dur"]}
    )


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


active: list[Profile] = []


_NOTHING: dict[str, Any] = {}


def record(
    track: str, name: str, start: float, end: float, args: dict[str, Any] | Callable[[], dict[str, Any]] = _NOTHING
) -> None:
    """Tells everyone who listens now of an event."""
    event = TraceEvent(track, name, start, end, args)
    for p in active:
        if len(p.events) < MAX_EVENTS:
            p.events.append(event)
        else:
            p.dropped += 1


def compile_track() -> str:
    """The compile track of this thread."""
    return (
        "compile"
        if threading.current_thread() is threading.main_thread()
        else f"compile {threading.current_thread().name}"
    )


def file_of(path: str) -> str:
    """The file of this rank: `1` is profile.json here; a folder (one that exists, or a path without .json)
    holds one file a rank."""
    path, world = FILE if path in ("1", "") else path, current().world
    if os.path.isdir(path) or not path.endswith(".json"):
        return os.path.join(path, f"profile.rank{world.rank}.json")
    return path if world.size == 1 else f"{path.removesuffix('.json')}.rank{world.rank}.json"


def _pass_event(stage: str, name: str, start: float, end: float, args: dict[str, Any]) -> None:
    if stage == "schedule":  # (those of a kernel are part of its compilation)
        record(stage, name, start, end, args)


def _listen(p: Profile) -> None:
    if not active:
        passes.timers.append(_pass_event)
    active.append(p)


def _leave(p: Profile) -> None:
    active.remove(p)
    if not active:
        passes.timers.remove(_pass_event)


@contextlib.contextmanager
def profile(path: str = "") -> Iterator[Profile]:
    """Records what runs inside; writes it to `path` (as PROFILE names it; one file a rank) at the end,
    also after an exception.

    >>> with manygrad.profile("step.json") as p: step(x, y)
    >>> sorted({e.track for e in p.events})
    """
    p = Profile(path)
    _listen(p)
    try:
        yield p
    finally:
        _leave(p)
        if path:
            p.write()


def profile_program() -> None:
    """PROFILE: from now to the end of the process."""
    if not PROFILE.value or PROFILE.value == "0":
        return
    p = Profile(PROFILE.value)
    _listen(p)

    def finish() -> None:
        try:
            path = p.write()
        except OSError as error:
            print(f"profile: cannot write {file_of(p.path)}: {error}; name another place with PROFILE=path")
        else:
            left_out = (
                f" ({p.dropped} later ones left out: profile a part with manygrad.profile())" if p.dropped else ""
            )
            print(
                f"profile: {len(p.events)} events in {path}{left_out}; load it in chrome://tracing or ui.perfetto.dev"
            )

    atexit.register(finish)
