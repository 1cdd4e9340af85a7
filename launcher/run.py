"""One attempt to run a job: the loop between the controller, which decides, and the world.

It starts the supervisors, moves messages, prints the logs and sends signals.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from manygrad.tensor.environment import CUDA_DEVICE, MANYGRAD_PLAIN_LINKS, REGISTRY

from .cluster import Cluster
from .control import ControlServer
from .controller import Controller
from .guard import Guard
from .inquiries import Inquiries
from .instructions import Beat, Done, Instruction, Kill, Send, Warn
from .interrupts import Signals
from .janitor import MARK, START_MARK
from .job import Job
from .logs import Console, RankLogs, Terminal
from .messages import AgentLost, Closed, Event, Exited, Failed, Interrupt, NodesBack, Output, Spawned, Stacks, Tick
from .places import Place
from .ranks import Rank, State
from .spec import WorkerSpec
from .supervisor import SHARES

TICK_S = 0.05
LOST_EVERY_S = 0.5


@dataclass
class Surroundings:
    """What all attempts of a job share. `began`: when the launcher was started."""

    job: Job
    cluster: Cluster
    run_dir: str
    folder: str
    logs: RankLogs
    terminal: Terminal
    signals: Signals
    guard: Guard
    began: float
    inquiries: Inquiries

    def say(self, text: str) -> None:
        if not self.job.quiet:
            self.terminal.put([("stderr", f"launcher: {text}\n")])


class Run:
    """The loop between the controller and the world, for one attempt on these places; earlier ones have spent
    `spent_s`, and left `ready` ranks, whose processes are there. Large: its parts, made and ended together."""

    def __init__(
        self,
        around: Surroundings,
        server: ControlServer,
        places: list[Place],
        began: float,
        spent_s: float,
        ready: Mapping[int, Rank],
    ) -> None:
        job = around.job
        self.around, self.job, self.server, self.places, self.began = around, job, server, places, began
        self.cluster, self.logs, self.clock, self.size = around.cluster, around.logs, server.clock, len(places)
        show = range(self.size) if job.log_ranks == "all" else [int(r) for r in job.log_ranks.split(",") if r]
        self.console = Console(self.size, frozenset(show), terminal=sys.stdout is not None and sys.stdout.isatty())
        self.ready_s, self.kept = time.monotonic() - began, len(ready)
        self.silent_s = float(REGISTRY["HEARTBEAT_TIMEOUT_S"].value)
        self.ray_is_gone = False
        self.results = list[bytes]()  # of a function, by rank
        self.lost_result = ""  # why there are none
        self.at, self.began_at = time.monotonic(), self.clock()
        self.controller = Controller(
            self.size,
            self.clock(),
            timeout_s=job.timeout_s,
            spent_s=spent_s,
            start_timeout_s=job.start_timeout_s,
            grace_s=job.grace_s,
            silent_s=self.silent_s,
            ready=ready,
        )

    def run(self) -> None:
        """Until every process has ended, or is ready for another epoch, or all time for it is up."""
        job, c = self.job, self.controller
        self._announce()
        starts = [r.rank for r in c.ranks if r.state is State.WAITING and r.rank not in self.cluster.early]
        self.cluster.early.clear()
        self.cluster.run({rank: asdict(self._spec(rank, self.server.epoch)) for rank in starts}, job.payload)
        if job.max_restarts and self.size < job.nodes:
            self.cluster.look_for_room()
        try:
            self._loop()
            self.server.send("agent", [r.rank for r in c.ranks if r.state is not State.READY], "stop")
            for _ in range(4 if c.root is None and job.kind == "function" else 1):
                self.server.receive(0.01)
            if c.root is None and job.kind == "function":
                try:
                    self.results = self.cluster.results()
                except Exception as e:
                    self.lost_result = f"{type(e).__name__}: {e}"
        finally:
            self._print(self.console.close(time.monotonic()))
            self.logs.flush()

    def after(self, moment: float) -> float:
        """Seconds from the beginning of the attempt to a moment of its clock; 0 for one that has not come."""
        return round(moment and self.at - self.began + self.clock.real(moment - self.began_at), 3)

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
            self._say(f"{self.size} nodes on {len(hosts)} hosts: {', '.join(names)}")
            if job.plain_links or MANYGRAD_PLAIN_LINKS:
                self._say("links between hosts are not encrypted (--plain-links)")
        if not self.server.epoch:
            self._say(f"logs in {self.around.run_dir}")

    def _say(self, text: str) -> None:
        self.around.say(text)

    def _spec(self, rank: int, epoch: int) -> WorkerSpec:
        """All that an agent and its worker need to know, which is started in that epoch."""
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
            env["PROFILE"] = os.path.abspath(self.around.run_dir)
        if job.device:
            env["DEVICE"] = job.device
        if local:  # (a cluster's Ray gives each agent GPUs of its own)
            env["CUDA_DEVICE"] = str(int(CUDA_DEVICE.value) + place.local_rank * job.devices_per_node)
        if job.plain_links:
            env["MANYGRAD_PLAIN_LINKS"] = "1"
        env |= {
            MARK: job.id,
            START_MARK: f"{epoch}.{rank}",
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_size),
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": self.places[0].ip,
        }
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} if local else None
        return WorkerSpec(
            rank=rank,
            size=self.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            devices_per_node=job.devices_per_node,
            job=job.id,
            epoch=epoch,
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
            restarts=job.max_restarts > 0,
        )

    def _loop(self) -> None:
        next_lost = 0.0
        while True:
            self.server.hold = self.around.terminal.full
            events: list[Event | Interrupt | NodesBack | Tick] = list(self.server.receive(self.clock.real(TICK_S)))
            now, real = self.clock(), time.monotonic()
            while self.around.signals.queue:
                events.append(Interrupt(self.around.signals.queue.popleft()))
            if real >= next_lost:
                next_lost = real + LOST_EVERY_S
                events += self._lost()
                if self.cluster.room > max(self.size, self.controller.run.preemption.nodes_back):
                    events.append(NodesBack(self.cluster.room))
            if self.around.inquiries.stacks_wanted:
                self.around.inquiries.stacks_wanted = False
                self.server.send("worker", range(self.size), "stacks")
            for event in [*events, Tick()]:
                if isinstance(event, Stacks):
                    self.around.inquiries.take(event)
                    continue
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
                if isinstance(event, Closed):
                    self._replace(self.controller.ranks[event.rank])
            self._print(self.console.tick(real))
            self.logs.flush()

    def _replace(self, lost: Rank) -> None:
        """Start the process that takes the place of a lost one in the next attempt, while others end this one. If there
        is none, or they do not survive, it goes with the rest."""
        root, others = self.controller.root, [r for r in self.controller.ranks if r.state is not State.EXITED]
        if root is None or root.kind in ("interrupt", "timeout") or self.controller.run.preemption.by_launcher:
            return
        if self.job.max_restarts and others and lost.closed:
            self.server.send("agent", [lost.rank], "stop")
            self.cluster.replace(lost.rank, asdict(self._spec(lost.rank, self.server.epoch + 1)), self.job.payload)

    def _lost(self) -> list[AgentLost]:
        """Supervisors that are gone; until they are all there, Ray's end is theirs."""
        lost, trouble = self.cluster.lost()
        if trouble and not self.ray_is_gone:
            self.ray_is_gone = True
            self._say(f"Ray is gone ({trouble}); the run goes on without it")
        waiting = [r.rank for r in self.controller.ranks if r.state is State.WAITING]
        if not waiting:
            self.around.guard.stop()
        elif self.around.signals.failed and not self.server.epoch:  # (later attempts do without our Ray)
            lost += [(r, self.around.signals.failed) for r in waiting]
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
        self.around.terminal.put(pieces)
