"""The end of a run in words (root cause first, then its consequences, then what to do) and as `report.json`."""

from __future__ import annotations

import json
import os
from typing import Any

from .controller import Controller
from .messages import AgentBeat, clip
from .ranks import Failure, Rank, ranks_text, signal_name

# characters of an exception that the report shows; the rest is in the rank's log
MAX_TITLE, MAX_TRACEBACK = 2000, 20_000
EVENTS = 5  # how many of the last ones it shows

_NEXT = {
    "SIGKILL": (
        "SIGKILL comes from `kill -9` or the kernel's out-of-memory killer: see `dmesg | tail`, and try a smaller "
        "batch or fewer nodes a machine."
    ),
    "SIGSEGV": (
        "A crash in native code: run the script with `PYTHONFAULTHANDLER=1` and look at the end of the rank's log."
    ),
    "SIGBUS": "A crash in native code, or /dev/shm is full (`df -h /dev/shm`).",
    "plan": (
        "Every rank must build the same graph in the same order: look for branches on the rank, on time or on "
        "unordered sets around the lines above."
    ),
    "timeout": "Each rank's last place is shown above; --timeout and --start-timeout set the limits.",
    "silent": (
        "The process was suspended, or native code holds the interpreter; `py-spy dump --pid PID` shows where. "
        "The knob is HEARTBEAT_TIMEOUT_S."
    ),
    "lost": (
        "Something ended the process beside the worker (out of memory? `dmesg | tail`), or Ray before it ran: "
        "see `ray status` on its host."
    ),
    "late": (
        "A rank that only needs longer (loading data, compiling) needs a larger COLLECTIVE_TIMEOUT_S; "
        "else see what it does at the line above."
    ),
    "unreachable": (
        "Its host, or the network between the two, is down, or a firewall closes its ports; `ping` from the one to the "
        "other. The knob is RECONNECT_TIMEOUT_S."
    ),
    "preempted": "The same command, run again, goes on at the last checkpoint.",
    "unheard": "The launcher may be suspended for HEARTBEAT_TIMEOUT_S; after that the ranks end by themselves.",
}


def render(c: Controller, logs: list[str], command: str, ends: bool = True) -> str:
    """The failure report; empty if the run succeeded. `ends`: the run does with it, and its exit code is told."""
    root = c.root
    if root is None:
        return ""
    head = root.title if root.kind == "plan" else clip(root.title, MAX_TITLE)
    if root.kind == "preempted":
        head = f"{'the run' if root.rank is None else f'rank {root.rank}'} {head}"
    elif root.rank is not None and root.kind != "plan":
        head = f"rank {root.rank} failed: {head}"
    lines = ["", f"launcher: {head}", f"  command: {command}"]
    if root.rank is not None:
        lines.append("  " + _facts(c.ranks[root.rank], root, logs[root.rank]))
    if root.traceback:
        lines += ["", *("  " + x for x in clip(root.traceback, MAX_TRACEBACK).rstrip().splitlines())]
    others: dict[str, list[int]] = {}
    for r in c.ranks:
        if r.rank != root.rank:
            others.setdefault(_fate(r, root), []).append(r.rank)
    if others:
        lines += ["", "Consequences:" if root.rank is not None else "Ranks:"]
        lines += [f"  {ranks_text(ranks)}: {fate}" for fate, ranks in others.items()]
    late = [
        r
        for r in c.ranks
        if r.failure is not None
        and r.failure is not root
        and not r.failure.consequence
        and r.failure.traceback
        and r.failure.title != root.title
    ]
    for r in late[:2]:
        assert r.failure is not None
        lines += [
            "",
            f"  rank {r.rank}, later:",
            *("    " + x for x in clip(r.failure.traceback, MAX_TRACEBACK).rstrip().splitlines()[-12:]),
        ]
    lines += _last_events(c, root)
    lines += ["", f"Next: {_next(root, logs)}", *([f"launcher: exit code {root.code}"] if ends else [])]
    return "\n".join(lines) + "\n"


def _facts(r: Rank, failure: Failure, log: str) -> str:
    end = (
        ""
        if r.exit_code is None
        else f", {signal_name(-r.exit_code)}"
        if r.exit_code < 0
        else f", exit code {r.exit_code}"
    )
    step = "" if r.step is None else f", step {r.step}"
    at = f", at {failure.where}" if failure.where else ""
    return f"node {r.rank} ({r.host or 'not started'}), rank {r.rank}, pid {r.pid}{end}{step}{at}, log {log}"


def _fate(r: Rank, root: Failure) -> str:
    """How a rank that is not the first cause ended."""
    place = (r.failure.where if r.failure else "") or r.where
    at = f" at {place}" if place else ""
    if r.failure is None:
        return "finished" if r.exit_code == 0 else f"state {r.state.value}{at}"
    if root.kind == "plan" and r.failure.title == root.title:
        return f"stopped by the same PlanMismatch{at}"
    title = clip((r.failure.title.splitlines() or [""])[0], MAX_TITLE)
    if root.rank is not None and r.failure.kind == root.kind == "exception" and r.failure.title == root.title:
        return f"failed with the same error{at}"
    if r.failure.consequence and r.failure.kind == "exception":
        title = title.partition(":")[0]  # the rest repeats the root cause
    return f"{'stopped' if r.failure.consequence else 'failed'}: {title}{at}"


def _last_events(c: Controller, root: Failure) -> list[str]:
    """The last ones of the rank that failed, or of all up to the failure; `report.json` has more of them."""
    if root.rank is None:
        found = [r.line() for r in c.log.until_cause]
        return ["", "Last events before that:", *(f"  {line}" for line in found[-EVENTS:])] if found else []
    found = [r.line(with_ranks=False) for r in c.log.stories[root.rank] if r.is_event and r.what != AgentBeat.__name__]
    return ["", f"Last events of rank {root.rank}:", *(f"  {line}" for line in found[-EVENTS:])] if found else []


def _next(root: Failure, logs: list[str]) -> str:
    if root.kind == "interrupt":
        return f"the output of all ranks is in {os.path.dirname(logs[0])}"
    key = next((k for k in _NEXT if k == root.kind or (root.kind == "signal" and root.title.endswith(k))), "")
    return _NEXT.get(key) or f"the rank's whole output is in {logs[root.rank or 0]}"


def communication(c: Controller) -> str:
    """Cost of communication, by the rank that waited longest; empty where there was none. Collectives of a group
    are in bytes and seconds, and not in the number: that is of those in which ranks are compared."""
    r = max(c.ranks, key=lambda r: r.waited_ms)
    sent = max(x.bytes_sent for x in c.ranks)
    if not r.collectives and not sent:
        return ""
    amount = f"{sent / 1e9:.2f} GB" if sent >= 1e9 else f"{sent / 1e6:.1f} MB"
    which = f"{r.collectives} collectives of all ranks" if r.collectives else "collectives of groups of ranks"
    return (
        f"{which}, up to {amount} sent; {r.collective_ms / 1000:.1f} s, "
        f"of which rank {r.rank} waited {r.waited_ms / 1000:.1f} s"
    )


def as_dict(c: Controller, logs: list[str], **more: Any) -> dict[str, Any]:
    """The content of `report.json`. Of a run that failed it has the log, too."""

    def failure(f: Failure | None) -> dict[str, Any] | None:
        return (
            None
            if f is None
            else {
                "rank": f.rank,
                "kind": f.kind,
                "title": f.title,
                "traceback": f.traceback,
                "where": f.where,
                "step": f.step,
                "consequence": f.consequence,
            }
        )

    ranks = [
        {
            "rank": r.rank,
            "host": r.host,
            "pid": r.pid,
            "state": r.state.value,
            "exit_code": r.exit_code,
            "step": r.step,
            "plans": r.plans,
            "collectives": r.collectives,
            "bytes_sent": r.bytes_sent,
            "collective_s": r.collective_ms / 1000,
            "waited_s": r.waited_ms / 1000,
            "where": r.where,
            "failure": failure(r.failure),
            "log": log,
            **({"story": c.story(r.rank)} if c.root is not None else {}),
        }
        for r, log in zip(c.ranks, logs, strict=True)
    ]
    return {
        **more,
        "exit_code": c.exit_code,
        "root_cause": failure(c.root),
        "ranks": ranks,
        "ignored_events": c.log.refused,
        **({"events": [r.line() for r in c.log.run_records()]} if c.root is not None else {}),
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write at once or not at all."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as f:
            json.dump(content, f, indent=1)
            f.write("\n")
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
