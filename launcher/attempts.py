"""The attempts of a job: one, and after a failure others, each in an epoch of its own.

Workers that survive a failure keep their processes, with all that these have compiled, and so does the launcher's
channel: what is on its way in an old epoch is dropped (`link.Conversation`). In the place of each other one a new
process is started. Where none survives, or places are lost, every process is started anew, on a channel with new keys.
`restarts.py` decides whether there is another attempt.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from manygrad.errors import EXIT_INFEASIBLE, Infeasible

from . import report, traces
from .control import ControlServer
from .link import Clock
from .logs import write
from .messages import Closed, Output, readable
from .places import Place
from .ranks import Rank, State
from .restarts import Again, AttemptStory, Over, Restarts
from .run import Run, Surroundings

WAIT_S = 0.05  # between looks for a signal
LEAVE_S = 2.0  # how long processes that are not needed any more may take to end


@dataclass
class Outcome:
    """How a run ended. `report` is empty if it succeeded; `results` are the pickled results of a function, by rank."""

    exit_code: int
    report: str
    rank: int | None
    run_dir: str
    details: dict[str, Any] = field(default_factory=dict)
    results: list[bytes] = field(default_factory=list)


class Attempts:
    """Runs the job until an attempt ends well, or there is no other."""

    def __init__(self, around: Surroundings) -> None:
        self.around, self.job = around, around.job
        self.started = time.time() - (time.monotonic() - around.began)
        self.running_since = 0.0  # of the first attempt: what came before is no part of --timeout
        self.told = False  # the report of the last attempt
        self.restarts = Restarts(around.job.max_restarts)
        self.server: ControlServer | None = None
        self.ready: dict[int, Rank] = {}  # ranks whose processes wait for the next attempt
        around.inquiries.stories = self.restarts.stories
        self.command = readable(
            shlex.join([self.job.target, *self.job.args])
            if self.job.kind != "function"
            else f"launch({self.job.target})"
        )

    def run(self, places: list[Place]) -> Outcome:
        around, epoch, began = self.around, 0, self.around.began
        try:
            while True:
                run = self._attempt(epoch, places, began)
                story = self._story(run)
                of = run.controller.run
                if all(r.state in (State.READY, State.EXITED) for r in of.ranks):  # (else one might still take part)
                    self.ready = {r.rank: r for r in of.ranks if r.state is State.READY}
                asked = bool(of.interrupted) or of.preemption.by_launcher
                then = self.restarts.after(story, ends=asked or self._spent_s() > (self.job.timeout_s or math.inf))
                if isinstance(then, Again):
                    self._tell(run, then.text)
                    found = self._places(then)
                    if isinstance(found, list):
                        places, epoch, began = found, epoch + 1, time.monotonic()
                        self._mark(epoch, len(places))
                        continue
                    then = found
                break
        finally:
            self._dismiss()
            around.terminal.close(lambda: bool(around.signals.queue))
            around.logs.close()
        return self._outcome(run, then)

    def _attempt(self, epoch: int, places: list[Place], began: float) -> Run:
        around, job = self.around, self.job
        if self.server is None:
            clock = Clock(job.clock_rate)
            self.server = ControlServer(len(places), around.cluster.driver_ip, job.port, clock, epoch)
        else:
            self.server.begin(epoch, [r for r in range(len(places)) if r not in self.ready])
            self.server.beat()
        if not epoch:
            around.signals.check()
            around.signals.supervised = True
            self.running_since = time.monotonic()
        self.told = False
        run = Run(around, self.server, places, began, self._spent_s(), self.ready)
        around.inquiries.begins(run.controller, self.server.clock)
        run.run()
        return run

    def _dismiss(self) -> None:
        """End the processes that are ready, as they end by themselves, and the channel."""
        if self.server is not None:
            self.server.send("worker", self.ready, "release")
            left, until = set(self.ready), time.monotonic() + LEAVE_S
            while left and time.monotonic() < until:
                for event in self.server.receive(WAIT_S):
                    left -= {event.rank} if isinstance(event, Closed) else set()
                    if isinstance(event, Output):
                        self.around.logs.write(event.rank, event.text)
            self.server.send("agent", self.ready, "stop")
            self.server.receive(0.01)
            self.server.close()
        self.server, self.ready = None, {}

    def _spent_s(self) -> float:
        """Seconds of the job's clock since the first attempt began."""
        return (time.monotonic() - self.running_since) * self.job.clock_rate

    def _story(self, run: Run) -> AttemptStory:
        c, now, began = run.controller, time.monotonic(), self.around.began
        steps, saved = ([x for x in found if x is not None] for found in zip(*((r.step, r.saved) for r in c.ranks)))
        return AttemptStory(
            epoch=run.server.epoch,
            nodes=run.size,
            at_s=run.began - began,
            took_s=now - run.began,
            running_s=run.after(c.run.running_at) or None,
            joined_s=run.after(c.run.joined_at) or None,
            step=max(steps, default=None),
            saved=max(saved, default=None),
            root=c.root,
            kept=run.kept,
        )

    def _places(self, then: Again) -> list[Place] | Over:
        """After the back-off, where the next attempt runs."""
        around, least = self.around, self.job.min_nodes or self.job.nodes
        until = time.monotonic() + then.delay_s / self.job.clock_rate
        while time.monotonic() < until and not around.signals.queue:
            time.sleep(WAIT_S)
            if self.server is not None:
                self.server.beat()
        if self.ready and around.cluster.keeps(self.ready):
            places = around.cluster.places
        else:
            self._dismiss()
            try:
                places = around.cluster.again(least, lambda: bool(around.signals.queue))
            except Infeasible as e:
                return Over(f"no restart: {e}", EXIT_INFEASIBLE)
        if around.signals.queue:
            signum = around.signals.queue.popleft()
            return Over("a signal came between two attempts", 128 + signum)
        return places

    def _tell(self, run: Run, then: str) -> None:
        """The failure of an attempt that is not the last. `report.json` has it at once: a launcher may be killed."""
        self._keep(self._details(run, run.controller.exit_code))
        text = report.render(run.controller, self._paths(run), self.command, ends=False)
        self.around.terminal.put([("stderr", text)])
        self.around.say(then)
        self.told = True

    def _mark(self, epoch: int, nodes: int) -> None:
        """Tell apart what the attempts have written to the logs."""
        text = f"attempt {epoch + 1} begins, on {nodes} node{'s' if nodes != 1 else ''}"
        self.around.say(text)
        for rank in range(self.job.nodes):
            self.around.logs.write(rank, f"launcher: {text}\n")

    def _paths(self, run: Run) -> list[str]:
        return [readable(p) for p in self.around.logs.paths[: run.size]]

    def _outcome(self, run: Run, then: Over) -> Outcome:
        c, stories = run.controller, self.restarts.stories
        code = c.exit_code if then.exit_code is None else then.exit_code
        text = "\n" if self.told else report.render(c, self._paths(run), self.command, ends=False)
        if run.lost_result:
            text, code = f"\nlauncher: every rank has finished, but their results are lost: {run.lost_result}\n", 1
        if len(stories) > 1:
            lines = [f"launcher: {len(stories)} attempts:", *(f"  {s.line()}" for s in stories)]
            if text:
                text += "\n".join([*lines, *([f"launcher: {then.text}"] if then.text else [])]) + "\n"
            else:
                write(sys.stderr, "\n".join(lines) + "\n")
        if text:
            text += f"launcher: exit code {code}\n"
        elif spent := report.communication(c):
            write(sys.stderr, f"launcher: {spent}\n")
        details = self._details(run, code)
        self._keep(details, last=True)
        return Outcome(code, text, c.root.rank if c.root else None, self.around.run_dir, details, run.results)

    def _details(self, run: Run, exit_code: int) -> dict[str, Any]:
        """The content of `report.json`."""
        c = run.controller
        startup = {"ray": run.ready_s, "join": run.after(c.run.joined_at), "run": run.after(c.run.running_at)}
        details: dict[str, Any] = report.as_dict(
            c,
            self._paths(run),
            job=self.job.id,
            command=self.command,
            nodes=run.size,
            devices_per_node=self.job.devices_per_node,
            started=self.started,
            duration_s=round(time.monotonic() - self.around.began, 3),
            startup_s={k: round(v, 3) for k, v in startup.items()},
            rejected_messages=run.server.rejected,
            attempts=[s.as_dict() for s in self.restarts.stories],
        )
        return details | {"exit_code": exit_code}

    def _keep(self, details: dict[str, Any], last: bool = False) -> None:
        """Write `report.json`; say once what could not be kept. The run's outcome stands."""
        around = self.around
        trouble = around.logs.trouble()
        try:
            report.write_json(os.path.join(around.run_dir, "report.json"), details)
            if last and os.environ.get("PROFILE") == "1" and (path := traces.join(around.run_dir)):
                write(sys.stderr, f"launcher: the profile of all ranks is in {path}\n")
        except (OSError, ValueError) as e:
            trouble = trouble or str(e)
        trouble = trouble or around.terminal.trouble
        if trouble and last:
            write(
                sys.stderr,
                f"launcher: warning: the logs or the report could not be kept whole: {trouble}; "
                "the run's outcome stands\n",
            )
