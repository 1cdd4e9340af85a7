"""Questions to a run that goes on: `launcher status RUN_DIR`, `launcher stacks RUN_DIR`, `launcher stop RUN_DIR`.

The launcher answers on a Unix socket in the job's own folder, which no other user can enter; the run directory has a
file, `running.json`, that says where it is. A question is a line of JSON, and so is the answer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from manygrad.errors import EXIT_TIMEOUT, EXIT_USAGE, ProtocolError
from manygrad.tensor.threads import Threads

from .messages import Stacks, parse_object
from .ranks import State
from .report import write_json

if TYPE_CHECKING:
    from .controller import Controller
    from .interrupts import Signals
    from .link import Clock
    from .restarts import AttemptStory

FILE = "running.json"
QUESTIONS = ("status", "stacks", "stop")
LOOK_S, TALK_S, STACKS_S = 0.2, 5.0, 3.0  # for the end; for one question; for the workers' answers
STOP_S = 20.0  # after --grace, until a run that was told to end has ended; then it is told again, which ends it at once
MAX_QUESTION = 4096


class Inquiries:
    """The launcher's side. `controller` is that of the attempt that runs, or of the last; questions are answered in a
    thread."""

    def __init__(self, job: str, folder: str, run_dir: str, signals: Signals, grace_s: float) -> None:
        self.job, self.signals, self.path = job, signals, os.path.join(run_dir, FILE)
        self.controller: Controller | None = None
        self.clock: Clock | None = None
        self.stories: list[AttemptStory] = []
        self.stacks_wanted = False  # the loop of the attempt asks the workers
        self._stacks: dict[int, str] = {}
        self._came = threading.Condition()
        self._over = threading.Event()
        self._threads = Threads()
        self.address = os.path.join(folder, "inquiries")
        self._socket = socket.socket(socket.AF_UNIX)
        with suppress(OSError):  # (what only tells of a run does not end it)
            self._socket.bind(self.address)
            self._socket.listen()
            self._socket.settimeout(LOOK_S)
            self._threads.start("manygrad-inquiries", self._serve, stop=self._over.set)
            here = {"job": job, "pid": os.getpid(), "host": socket.gethostname(), "socket": self.address}
            here["stop_s"] = grace_s + STOP_S
            write_json(self.path, here)

    def close(self) -> None:
        self._threads.close(TALK_S)
        self._socket.close()
        with suppress(OSError):
            os.unlink(self.path)

    def begins(self, controller: Controller, clock: Clock) -> None:
        """Another attempt runs."""
        self.controller, self.clock = controller, clock

    def take(self, event: Stacks) -> None:
        """A worker's answer."""
        with self._came:
            self._stacks[event.rank] = event.text
            self._came.notify_all()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                talk, _ = self._socket.accept()
            except TimeoutError:
                continue
            with talk, suppress(OSError, ProtocolError):  # who asks may have gone, or ask nonsense
                talk.settimeout(TALK_S)
                question = parse_object(_line(talk))["type"]
                answer = self._answers[question](self) if question in self._answers else {"error": "unknown question"}
                talk.sendall(json.dumps(answer).encode() + b"\n")

    def _status(self) -> dict[str, Any]:
        c, clock, attempts = self.controller, self.clock, [s.line() for s in self.stories]
        if c is None or clock is None:
            return {"job": self.job, "attempts": attempts, "ranks": []}
        ranks = [
            {
                "rank": r.rank,
                "host": r.host,
                "pid": r.pid,
                "state": "stopped (SIGSTOP)" if r.stopped else r.state.value,
                "step": r.step,
                "saved": r.saved,
                "collectives": r.collectives,
                "where": r.where,
                "waits_for": r.waits_for,
                "waits_s": r.waits_s,
                "waits_in": r.waits_in,
            }
            for r in c.ranks
        ]
        for_s, attempt = round(clock() - c.log.began, 1), len(attempts) + (not c.done)
        return {"job": self.job, "attempt": attempt, "for_s": for_s, "attempts": attempts, "ranks": ranks}

    def _ask_for_stacks(self) -> dict[str, Any]:
        c = self.controller
        if c is None:
            return {"stacks": {}, "silent": {}}
        asked = [r.rank for r in c.ranks if r.state in (State.RUNNING, State.CONNECTING, State.FINISHED)]
        with self._came:
            self._stacks, self.stacks_wanted = {}, True
            self._came.wait_for(lambda: len(self._stacks) == len(asked), STACKS_S)
            self.stacks_wanted = False
            stacks = dict(self._stacks)
        silent = {r.rank: _why_silent(r.state, r.stopped) for r in c.ranks if r.rank not in stacks}
        return {"stacks": stacks, "silent": silent}

    def _stop(self) -> dict[str, Any]:
        self.signals.queue.append(signal.SIGTERM)
        return {"told": "SIGTERM"}

    _answers: dict[str, Callable[[Inquiries], dict[str, Any]]] = {
        "status": _status,
        "stacks": _ask_for_stacks,
        "stop": _stop,
    }


def _why_silent(state: State, stopped: bool) -> str:
    if stopped:
        return "its process is stopped (SIGSTOP)"
    if state in (State.RUNNING, State.CONNECTING, State.FINISHED):
        return f"no answer within {STACKS_S:g} s: native code holds its interpreter, or the network is cut"
    return f"it is {state.value}"


def _line(talk: socket.socket) -> bytes:
    """One line, of bounded length."""
    data = b""
    while not data.endswith(b"\n") and len(data) < MAX_QUESTION:
        more = talk.recv(MAX_QUESTION)
        if not more:
            break
        data += more
    return data


# ---- who asks


def inquire(question: str, run_dir: str) -> int:
    """Ask the launcher of a run, and print its answer; returns the exit code."""
    try:
        with open(os.path.join(run_dir, FILE), encoding="utf-8") as f:
            where = json.load(f)
        answer = _asked(where, question)
    except TimeoutError:
        why = f"the launcher of the run in {run_dir} does not answer within {TALK_S + STACKS_S:g} s"
        print(f"launcher: {why}; {_to_end(where)}", file=sys.stderr)
        return EXIT_TIMEOUT
    except (OSError, ValueError, KeyError) as e:
        print(f"launcher: {_why_not(run_dir, e)}", file=sys.stderr)
        return EXIT_USAGE
    if question == "stop":
        return _stopped(where, run_dir)
    print(_SHOWN[question](answer))
    return 0


def _why_not(run_dir: str, error: Exception) -> str:
    if not os.path.isdir(run_dir):
        return f"there is no run directory {run_dir}"
    report = os.path.join(run_dir, "report.json")
    try:
        with open(report, encoding="utf-8") as f:
            code = json.load(f)["exit_code"]
    except (OSError, ValueError, KeyError):
        return f"no run answers in {run_dir} on {socket.gethostname()} ({error}); it has ended, or runs on another host"
    return f"the run in {run_dir} has ended, with exit code {code}; see {report}"


def _asked(where: dict[str, Any], question: str) -> Any:
    """The launcher's answer. OSError and ValueError: there is none."""
    with socket.socket(socket.AF_UNIX) as talk:
        talk.settimeout(TALK_S + STACKS_S)
        talk.connect(where["socket"])
        talk.sendall(json.dumps({"type": question}).encode() + b"\n")
        with talk.makefile("rb") as f:
            return json.loads(f.readline())


def _stopped(where: dict[str, Any], run_dir: str) -> int:
    """Waits until the run has ended; returns the exit code. A run that has not by its deadline is told again."""
    within_s = float(where["stop_s"])
    print(
        "launcher: the run was told to end (SIGTERM): ranks that can save do so first; it is waited for up to "
        f"{within_s:g} s",
        file=sys.stderr,
    )
    if _has_ended(where, within_s):
        return 0
    print("launcher: it goes on, so it was told again, which ends it without saving", file=sys.stderr)
    with suppress(OSError, ValueError):
        _asked(where, "stop")
    if _has_ended(where, STOP_S):
        return 0
    print(f"launcher: the run in {run_dir} does not end; {_to_end(where)}", file=sys.stderr)
    return EXIT_TIMEOUT


def _to_end(where: dict[str, Any]) -> str:
    pid = where["pid"]
    return f"is process {pid} suspended, or its file system gone? `kill -KILL {pid}` ends it, and its workers with it"


def _has_ended(where: dict[str, Any], within_s: float) -> bool:
    ends = time.monotonic() + within_s
    while os.path.exists(where["socket"]) and os.path.exists(f"/proc/{where['pid']}"):
        if time.monotonic() > ends:
            return False
        time.sleep(LOOK_S)
    return True


def show_status(answer: dict[str, Any]) -> str:
    """Lines of `launcher status`."""
    lines = [f"job {answer['job']}", *(f"  {line}" for line in answer["attempts"])]
    if answer["ranks"]:
        lines.append(f"attempt {answer['attempt']}, for {answer['for_s']:g} s:")
    for r in answer["ranks"]:
        step = "" if r["step"] is None else f", step {r['step']}"
        saved = "" if r["saved"] is None else f" (saved: {r['saved']})"
        at = f", at {r['where']}" if r["where"] else ""
        lines.append(f"  rank {r['rank']} on {r['host'] or '?'}, pid {r['pid']}: {r['state']}{step}{saved}{at}")
        if r["waits_for"] >= 0:
            lines.append(f"    waits for rank {r['waits_for']} since {r['waits_s']:.1f} s in {r['waits_in']}")
    return "\n".join(lines)


def show_stacks(answer: dict[str, Any]) -> str:
    """Lines of `launcher stacks`."""
    found = {int(r): text.rstrip() for r, text in answer["stacks"].items()}
    found |= {int(r): f"  {why}" for r, why in answer["silent"].items()}
    return "\n".join(f"rank {r}:\n{text}" for r, text in sorted(found.items()))


_SHOWN = {"status": show_status, "stacks": show_stacks}
