"""Runs a job: this is the pipeline of the launcher, from a `Job` to an `Outcome`.

The controller decides, this module does: it starts the cluster and the agents, moves messages, prints the logs, sends
signals, and leaves nothing behind whatever happens. Nothing that only tells of the run (a terminal that is held, a full
disk, a run directory that was deleted) ends the run.
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
from dataclasses import asdict, dataclass, field
from typing import Any

from manygrad.errors import Infeasible, UsageError
from manygrad.tensor.environment import MANYGRAD_PLAIN_LINKS, REGISTRY

from . import report, traces
from .cluster import Cluster, Guard, Place
from .control import ControlServer
from .controller import Controller
from .instructions import Beat, Done, Instruction, Kill, Send, Warn
from .interrupts import START_FAILED, Signals, StartFailed, StartInterrupted
from .janitor import MARK, Janitor, adopt_orphans, collect_children, sweep
from .job import Job
from .link import Clock
from .logs import Console, RankLogs, Terminal, make_run_directory, write
from .messages import AgentLost, Event, Exited, Failed, Interrupt, Output, Spawned, Tick, readable
from .ranks import State
from .spec import WorkerSpec
from .supervisor import SHARES

TICK_S = 0.05
LOST_EVERY_S = 0.5
START_FAILED_S = 2.0  # how long Ray's client may take to notice that its Ray has ended


@dataclass
class Outcome:
    """How a run ended. `report` is empty if it succeeded; `results` are the pickled results of a function, by rank."""

    exit_code: int
    report: str
    rank: int | None
    run_dir: str
    details: dict[str, Any] = field(default_factory=dict)
    results: list[bytes] = field(default_factory=list)


def run(job: Job, *, last: bool = False) -> Outcome:
    """Run `job` to its end. `last`: this process ends right after, so a Ray of ours need not be left in order.

    Raises `UsageError` and `Infeasible` before anything runs; failures of the ranks are in the outcome.
    """
    began = time.monotonic()
    with Signals(last) as signals:
        if last:
            adopt_orphans()
        check_port(job.port)
        try:
            os.getcwd()
            run_dir = make_run_directory(job.run_dir, job.name, time.strftime("%Y-%m-%d_%H-%M-%S"))
        except (OSError, ValueError) as e:
            raise UsageError(readable(f"cannot create the run directory: {e}; choose another with --run-dir")) from None
        try:
            return _run_in(run_dir, job, signals, began, last)
        except StartInterrupted as e:
            code, name = 128 + e.signum, signal.Signals(e.signum).name
            return Outcome(
                code, f"\nlauncher: {name} before the workers had started\nlauncher: exit code {code}\n", None, run_dir
            )
        except StartFailed as e:
            raise Infeasible(str(e)) from None
        finally:
            try:
                os.rmdir(run_dir)  # if the run has left nothing in it
            except OSError:
                pass


def _run_in(run_dir: str, job: Job, signals: Signals, began: float, last: bool) -> Outcome:
    base = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()  # Ray's socket paths must be short
    folder = os.path.join(base, f"mg-{job.id}")
    signals.check()
    logs = None
    try:
        logs = RankLogs(run_dir, job.nodes)
        os.mkdir(folder, 0o700)
    except OSError as e:
        if logs is not None:
            logs.close()
            logs.remove()
        raise UsageError(readable(f"cannot write: {e}; choose another run directory with --run-dir")) from None
    cluster, server = Cluster(job, folder), None
    janitor = Janitor(job.id, folder)
    guard = Guard(lambda text: _start_failed(text, job, folder, signals, last))
    began_well = False
    try:
        guard.start()
        with signals.raising():
            cluster.start()
            signals.again()
            places = cluster.place()
        server = ControlServer(job.nodes, cluster.driver_ip, job.port, Clock(job.clock_rate))
        signals.check()
        signals.supervised = began_well = True
        return Run(job, cluster, server, places, run_dir, logs, signals, guard, began).run()
    finally:
        guard.stop()
        logs.close()
        if not began_well:
            logs.remove()
        if server is not None:
            server.close()
        try:
            if trouble := cluster.stop(fast=last):
                hint = "the run's outcome stands, and `ray status` shows what Ray still holds"
                write(sys.stderr, f"launcher: warning: Ray could not be left in order ({trouble}); {hint}\n")
        finally:
            guard.close()
            sweep(job.id, folder)
            janitor.dismiss()
            if last:
                collect_children()


def _start_failed(text: str, job: Job, folder: str, signals: Signals, last: bool) -> None:
    """A part of our Ray has died at the start (called by the guard's thread).
    What waits for it in Ray's client cannot be woken from here."""
    signals.failed = text
    if signals.saved:
        signal.pthread_kill(threading.main_thread().ident or 0, START_FAILED)
    if last:
        time.sleep(START_FAILED_S)
        if not signals.supervised:
            write(sys.stderr, f"launcher: {text}\n")
            sweep(job.id, folder)
            os._exit(Infeasible.exit_code)


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


class Run:
    """The loop between the controller and the world. Large: a run's parts, made and ended together."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        server: ControlServer,
        places: list[Place],
        run_dir: str,
        logs: RankLogs,
        signals: Signals,
        guard: Guard,
        began: float,
    ) -> None:
        self.job, self.cluster, self.server, self.places, self.run_dir = job, cluster, server, places, run_dir
        self.logs, self.signals, self.guard, self.began = logs, signals, guard, began
        self.clock = server.clock
        show = range(job.nodes) if job.log_ranks == "all" else [int(r) for r in job.log_ranks.split(",") if r]
        self.console = Console(job.nodes, frozenset(show), terminal=sys.stdout is not None and sys.stdout.isatty())
        self.terminal = Terminal()
        self.command = readable(
            shlex.join([job.target, *job.args]) if job.kind != "function" else f"launch({job.target})"
        )
        self.ready_s = time.monotonic() - began
        self.silent_s = float(REGISTRY["HEARTBEAT_TIMEOUT_S"].value)
        self.ray_is_gone = False
        self.controller = Controller(
            job.nodes,
            self.clock(),
            timeout_s=job.timeout_s,
            start_timeout_s=job.start_timeout_s,
            grace_s=job.grace_s,
            silent_s=self.silent_s,
        )

    def run(self) -> Outcome:
        job, c, started = self.job, self.controller, time.time()
        self._announce()
        for rank in range(job.nodes):
            self.cluster.run(rank, asdict(self._spec(rank)), job.payload)
        lost_result, results = "", list[bytes]()
        try:
            at, began_at = time.monotonic(), self.clock()
            self._loop()
            self.server.send("agent", range(job.nodes), "stop")
            for _ in range(4 if c.root is None and job.kind == "function" else 1):
                self.server.receive(0.01)
            if c.root is None and job.kind == "function":
                try:
                    results = self.cluster.results()
                except Exception as e:
                    lost_result = f"{type(e).__name__}: {e}"
        finally:
            self._print(self.console.close(time.monotonic()))
            self.terminal.close(lambda: bool(self.signals.queue))
            self.logs.close()
        paths = [readable(p) for p in self.logs.paths]
        text, code = report.render(c, paths, self.command), c.exit_code
        if lost_result:
            text, code = (
                (
                    f"\nlauncher: every rank has finished, but their results are lost: {lost_result}\n"
                    "launcher: exit code 1\n"
                ),
                1,
            )

        if not text and (spent := report.communication(c)):
            write(sys.stderr, f"launcher: {spent}\n")

        def after(moment: float) -> float:
            """Seconds from the beginning of the run to a moment of its clock."""
            return round(moment and at - self.began + self.clock.real(moment - began_at), 3)

        details = report.as_dict(
            c,
            paths,
            job=job.id,
            command=self.command,
            nodes=job.nodes,
            devices_per_node=job.devices_per_node,
            started=started,
            duration_s=round(time.monotonic() - self.began, 3),
            startup_s={"ray": round(self.ready_s, 3), "join": after(c.run.joined_at), "run": after(c.run.running_at)},
            rejected_messages=self.server.rejected,
        )
        self._keep(details)
        return Outcome(code, text, c.root.rank if c.root else None, self.run_dir, details, results)

    def _keep(self, details: dict[str, Any]) -> None:
        """Write `report.json`; say once what could not be kept. The run's outcome stands."""
        trouble = self.logs.trouble()
        try:
            report.write_json(os.path.join(self.run_dir, "report.json"), details)
            if os.environ.get("PROFILE") == "1" and (path := traces.join(self.run_dir)):
                write(sys.stderr, f"launcher: the profile of all ranks is in {path}\n")
        except (OSError, ValueError) as e:
            trouble = trouble or str(e)
        trouble = trouble or self.terminal.trouble
        if trouble:
            write(
                sys.stderr,
                f"launcher: warning: the logs or the report could not be kept whole: {trouble}; "
                "the run's outcome stands\n",
            )

    def _announce(self) -> None:
        job, hosts = self.job, {(p.host, p.ip): p for p in self.places}
        shared = [p for p in hosts.values() if p.local_size > 1]
        for p in shared:
            cores = max(1, p.cores // p.local_size)
            machine = "this machine" if p.ip == "127.0.0.1" else p.host
            self._say(
                f"{p.local_size} workers share {machine}, {cores} core{'s' if cores > 1 else ''} each"
                + (f" of {p.cores}" if p.cores >= p.local_size else f" (it has {p.cores})")
            )
        if len(hosts) > 1:
            names = [p.host for p in hosts.values()]
            names = [n if names.count(n) == 1 else f"{n} ({p.ip})" for n, p in zip(names, hosts.values(), strict=True)]
            self._say(f"{job.nodes} nodes on {len(hosts)} hosts: {', '.join(names)}")
            if job.plain_links or MANYGRAD_PLAIN_LINKS:
                self._say("links between hosts are not encrypted (--plain-links)")
        self._say(f"logs in {self.run_dir}")

    def _say(self, text: str) -> None:
        if not self.job.quiet:
            self.terminal.put([("stderr", f"launcher: {text}\n")])

    def _spec(self, rank: int) -> WorkerSpec:
        """All that an agent and its worker need to know."""
        job, place = self.job, self.places[rank]
        local = self.cluster.started_ray
        user_set = [n for n in SHARES if n in os.environ]
        carried = (
            {v.name for v in REGISTRY.values() if v.travels}
            | {"PYTHONPATH", "PYTHONFAULTHANDLER"}
            | set(job.env)
            | set(user_set)
        )
        env = {k: os.environ[k] for k in sorted(carried) if k in os.environ}
        if env.get("PROFILE") == "1":
            env["PROFILE"] = os.path.abspath(self.run_dir)
        if job.device:
            env["DEVICE"] = job.device
        if job.plain_links:
            env["MANYGRAD_PLAIN_LINKS"] = "1"
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
        return WorkerSpec(
            rank=rank,
            size=job.nodes,
            local_rank=place.local_rank,
            local_size=place.local_size,
            devices_per_node=job.devices_per_node,
            job=job.id,
            epoch=self.server.epoch,
            control=self.server.address,
            curve=self.server.curve(rank),
            bind_host=place.ip,
            endpoint=job.endpoint,
            kind=job.kind,
            target=job.target,
            args=job.args,
            sys_path=[os.path.abspath(p) for p in sys.path] if job.kind == "function" else [],
            cwd=os.getcwd(),
            environ=environ,
            env=env,
            user_set=user_set,
            sweep=not local,
            scratch=self.cluster.folder if local else "",
            start_timeout_s=job.start_timeout_s,
            silent_s=self.silent_s,
            clock_rate=job.clock_rate,
        )

    def _loop(self) -> None:
        next_lost = 0.0
        while True:
            self.server.hold = self.terminal.full
            events: list[Event | Interrupt | Tick] = list(self.server.receive(self.clock.real(TICK_S)))
            now, real = self.clock(), time.monotonic()
            while self.signals.queue:
                events.append(Interrupt(self.signals.queue.popleft()))
            if real >= next_lost:
                next_lost = real + LOST_EVERY_S
                events += self._lost()
            for event in [*events, Tick()]:
                if isinstance(event, Output):
                    self.logs.write(event.rank, event.text)
                    self._print(self.console.feed(event.rank, event.stream, event.text, real))
                    continue
                if isinstance(event, Spawned):
                    self.cluster.supervise(event.rank, event.agent_pid)
                if isinstance(event, Failed) and event.traceback:
                    self.logs.write(event.rank, event.traceback)
                if isinstance(event, (Failed, Exited)):
                    self.logs.flush()
                for instruction in self.controller.handle(event, now):
                    if isinstance(instruction, Done):
                        return
                    self._do(instruction)
            self._print(self.console.tick(real))
            self.logs.flush()

    def _lost(self) -> list[AgentLost]:
        """Supervisors that are gone; until they are all there, Ray's end is theirs."""
        lost, trouble = self.cluster.lost()
        if trouble and not self.ray_is_gone:
            self.ray_is_gone = True
            self._say(f"Ray is gone ({trouble}); the run goes on without it")
        waiting = [r.rank for r in self.controller.ranks if r.state is State.WAITING]
        if not waiting:
            self.guard.stop()
        elif self.signals.failed:
            lost += [(r, self.signals.failed) for r in waiting]
        return [AgentLost(rank, reason) for rank, reason in lost]

    def _do(self, instruction: Instruction) -> None:
        if isinstance(instruction, Send):
            self.server.send("worker", instruction.ranks, instruction.type, **instruction.content)
        elif isinstance(instruction, Kill):
            self.server.send("agent", instruction.ranks, "signal", signum=instruction.signum)
        elif isinstance(instruction, Beat):
            self.server.beat()
        elif isinstance(instruction, Warn):
            self._say(f"warning: {instruction.text}")

    def _print(self, pieces: list[tuple[str, str]]) -> None:
        self.terminal.put(pieces)
