"""Runs a job: this is the pipeline of the launcher, from a `Job` to an `Outcome`.

The controller decides, this module does: it starts the cluster and the agents, moves messages, prints the logs, sends
signals, and leaves nothing behind whatever happens.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from manygrad.tensor.environment import REGISTRY

from . import report
from .cluster import Cluster, Place
from .control import ControlServer
from .controller import Controller, Done, Instruction, Kill, Send
from .errors import UsageError
from .janitor import MARK, Janitor, adopt_orphans, collect_children, sweep
from .job import Job
from .logs import Console, RankLogs, make_run_directory
from .messages import AgentLost, Event, Exited, Failed, Interrupt, Output, Tick

TICK_S = 0.05
LOST_EVERY_S = 0.5


@dataclass
class Outcome:
    """How a run ended. `report` is empty if it succeeded; `results` are the pickled results of a function, by rank."""

    exit_code: int
    report: str
    rank: int | None
    run_dir: str
    details: dict[str, Any] = field(default_factory=dict)
    results: list[bytes] = field(default_factory=list)


class StartInterrupted(BaseException):
    """A signal came before the ranks were supervised."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """Ctrl-C and SIGTERM as values: queued while the run is supervised, raised before."""

    def __init__(self) -> None:
        self.queue: deque[int] = deque()
        self.raising, self.saved = True, dict[int, Any]()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self.saved[s] = signal.signal(s, self._take)
        return self

    def again(self) -> None:
        """Put the handlers back in place (Ray sets its own when it starts)."""
        for s in self.saved:
            signal.signal(s, self._take)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if self.raising:
            raise StartInterrupted(signum)
        self.queue.append(signum)

    def __exit__(self, *exc: object) -> None:
        for s, handler in self.saved.items():
            signal.signal(s, handler if handler is not None else signal.SIG_DFL)


def run(job: Job, *, last: bool = False) -> Outcome:
    """Run `job` to its end. `last`: this process ends right after, so a Ray of ours need not be left in order.

    Raises `UsageError` and `Infeasible` before anything runs; failures of the ranks are in the outcome.
    """
    began = time.monotonic()
    if last:
        adopt_orphans()
    check_port(job.port)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        run_dir = make_run_directory(job.run_dir, job.name, stamp)
    except OSError as e:
        raise UsageError(f"cannot create the run directory: {e}; choose another with --run-dir") from None
    base = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()  # Ray's socket paths must be short
    folder = os.path.join(base, f"mg-{job.id}")
    os.mkdir(folder, 0o700)
    cluster = Cluster(job, folder)
    janitor, server = Janitor(job.id, folder), None
    clean = False
    try:
        with Signals() as signals:
            try:
                cluster.start()
                signals.again()
                places = cluster.place()
                server = ControlServer(job.nodes, cluster.driver_ip, job.port)
                signals.raising = False
            except StartInterrupted as e:
                code = 128 + e.signum
                return Outcome(
                    code,
                    f"\nlauncher: {signal.Signals(e.signum).name} before the workers had started\nlauncher: exit code {code}\n",
                    None,
                    run_dir,
                )
            supervisor = Supervisor(job, cluster, server, places, run_dir, signals, began)
            outcome = supervisor.run()
            clean = outcome.exit_code == 0
            return outcome
    finally:
        if not clean and not os.listdir(run_dir):
            os.rmdir(run_dir)
        if server is not None:
            server.close()
        try:
            cluster.stop(fast=last)
        finally:
            sweep(job.id, folder)
            janitor.dismiss()
            if last:
                collect_children()


def check_port(port: int) -> None:
    """Say at once, before Ray is started, that the port for the control channel is taken."""
    if port:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("", port))
            except OSError as e:
                raise UsageError(
                    f"--port {port}: {e.strerror}; leave --port out to let the system choose a free one"
                ) from None


class Supervisor:
    """The loop between the controller and the world."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        server: ControlServer,
        places: list[Place],
        run_dir: str,
        signals: Signals,
        began: float,
    ) -> None:
        self.job, self.cluster, self.server, self.places, self.run_dir, self.signals, self.began = (
            job,
            cluster,
            server,
            places,
            run_dir,
            signals,
            began,
        )
        show = range(job.nodes) if job.show_stdout == "all" else [int(r) for r in job.show_stdout.split(",") if r]
        self.console = Console(job.nodes, frozenset(show), terminal=sys.stdout.isatty())
        self.logs = RankLogs(run_dir, job.nodes)
        self.command = shlex.join([job.target, *job.args]) if job.kind != "function" else f"launch({job.target})"
        self.ready_s = time.monotonic() - began
        self.controller = Controller(
            job.nodes,
            time.monotonic(),
            timeout_s=job.timeout_s,
            start_timeout_s=job.start_timeout_s,
            grace_s=job.grace_s,
            silent_s=float(REGISTRY["HEARTBEAT_TIMEOUT_S"].value),
        )

    def run(self) -> Outcome:
        job, started = self.job, time.time()
        self._announce()
        for rank in range(job.nodes):
            self.cluster.run(rank, self._spec(rank), job.payload)
        try:
            self._loop()
            c = self.controller
            results = []
            self.server.send("agent", range(job.nodes), "stop")
            if c.root is None and job.kind == "function":
                for _ in range(4):
                    self.server.receive(0.01)
                results = self.cluster.results()
            elif c.root is None:
                self.server.receive(0.01)
        finally:
            self._print(self.console.close(time.monotonic()))
            self.logs.close()
        text = report.render(c, self.logs.paths, self.command)
        startup_s = {
            "ray": round(self.ready_s, 3),
            "join": round(c.joined_at and c.joined_at - self.began, 3),
            "run": round(c.running_at and c.running_at - self.began, 3),
        }
        details = report.as_dict(
            c,
            self.logs.paths,
            job=job.id,
            command=self.command,
            nodes=job.nodes,
            devices_per_node=job.devices_per_node,
            started=started,
            duration_s=round(time.monotonic() - self.began, 3),
            startup_s=startup_s,
            rejected_messages=self.server.rejected,
        )
        report.write_json(os.path.join(self.run_dir, "report.json"), details)
        return Outcome(c.exit_code, text, c.root.rank if c.root else None, self.run_dir, details, results)

    def _announce(self) -> None:
        job, hosts = self.job, {p.host: p for p in self.places}
        shared = [p for p in hosts.values() if p.local_size > 1]
        for p in shared:
            cores = max(1, p.cores // p.local_size)
            machine = "this machine" if p.ip == "127.0.0.1" else p.host
            self._say(
                f"{p.local_size} workers share {machine}, {cores} core{'s' if cores > 1 else ''} each"
                + (f" of {p.cores}" if p.cores >= p.local_size else f" (it has {p.cores})")
            )
        if len(hosts) > 1:
            self._say(f"{job.nodes} nodes on {len(hosts)} hosts: {', '.join(hosts)}")
        self._say(f"logs in {self.run_dir}")

    def _say(self, text: str) -> None:
        if not self.job.quiet:
            print(f"launcher: {text}", file=sys.stderr, flush=True)

    def _spec(self, rank: int) -> dict[str, Any]:
        """All that an agent and its worker need to know."""
        job, place = self.job, self.places[rank]
        local = self.cluster.started_ray
        user_set = [
            n for n in ("THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS") if n in os.environ
        ]
        carried = (
            {v.name for v in REGISTRY.values() if v.travels}
            | {"PYTHONPATH", "PYTHONFAULTHANDLER"}
            | set(job.carry)
            | set(user_set)
        )
        env = {k: os.environ[k] for k in sorted(carried) if k in os.environ}
        if env.get("PROFILE") == "1":
            env["PROFILE"] = os.path.abspath(self.run_dir)
        env |= {
            MARK: job.id,
            "RANK": str(rank),
            "WORLD_SIZE": str(job.nodes),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_size),
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": self.places[0].ip,
        }
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} if local else None
        return {
            "rank": rank,
            "size": job.nodes,
            "local_rank": place.local_rank,
            "local_size": place.local_size,
            "devices_per_node": job.devices_per_node,
            "job": job.id,
            "epoch": 0,
            "control": self.server.address,
            "curve": self.server.curve(rank),
            "bind_host": place.ip,
            "endpoint": job.endpoint,
            "start_timeout_s": job.start_timeout_s,
            "kind": job.kind,
            "target": job.target,
            "args": job.args,
            "cwd": os.getcwd(),
            "environ": environ,
            "env": env,
            "user_set": user_set,
            "sweep": not local,
            "sys_path": [os.path.abspath(p) for p in sys.path] if job.kind == "function" else [],
        }

    def _loop(self) -> None:
        next_lost = 0.0
        while True:
            events: list[Event | Interrupt | Tick] = list(self.server.receive(TICK_S))
            now = time.monotonic()
            while self.signals.queue:
                events.append(Interrupt(self.signals.queue.popleft()))
            if now >= next_lost:
                next_lost = now + LOST_EVERY_S
                events += [AgentLost(rank, reason) for rank, reason in self.cluster.lost()]
            for event in [*events, Tick()]:
                if isinstance(event, Output):
                    self.logs.write(event.rank, event.text)
                    self._print(self.console.feed(event.rank, event.stream, event.text, now))
                    continue
                if isinstance(event, Failed) and event.traceback:
                    self.logs.write(event.rank, event.traceback)
                if isinstance(event, (Failed, Exited)):
                    self.logs.flush()
                for instruction in self.controller.handle(event, now):
                    if isinstance(instruction, Done):
                        return
                    self._do(instruction)
            self._print(self.console.tick(now))
            self.logs.flush()

    def _do(self, instruction: Instruction) -> None:
        if isinstance(instruction, Send):
            self.server.send("worker", instruction.ranks, instruction.type, **instruction.content)
        elif isinstance(instruction, Kill):
            self.server.send("agent", instruction.ranks, "signal", signum=instruction.signum)

    def _print(self, pieces: list[tuple[str, str]]) -> None:
        used: set[IO[str]] = set()
        for stream, text in pieces:
            f = sys.stdout if stream == "stdout" else sys.stderr
            try:
                f.write(text)
                used.add(f)
            except (BrokenPipeError, ValueError):
                pass
        for f in used:
            try:
                f.flush()
            except (BrokenPipeError, ValueError):
                pass
