"""Ray, as far as the launcher needs it: start or attach, count what fits, place one agent a node, go away.

A Ray that we start belongs to one run: its own token (a private file), its own short temporary folder, and at the end
its processes are killed by their ids and the folder is removed. A Ray that we attach to is left as it is.

Ray is needed to find the places and to start the supervisors there. After that nothing of a run depends on it: what it
says comes from a thread of its own, which may wait for a dead Ray as long as it likes (`lost`).
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from manygrad.errors import Infeasible, UsageError
from manygrad.tensor.threads import ScopedThread, Threads

from . import agent as agent_module
from .janitor import MARK, sweep_starts
from .job import Job
from .places import Place, check_fits, has, needs, share
from .ray_settings import OWN, QUIET, on_loopback, reach, reread_settings, tamed
from .surroundings import check_memory, check_surroundings

RAY_STOP_S = 10.0  # how long a Ray may take to be told that we go
ENDING_S = 2.0  # how long supervisors that were told to end may take
LOOK_S = 1.0  # between looks for nodes
ROOM_EVERY_S, LONGEST_ROOM_S = 3.0, 3600.0  # between looks for more nodes than an attempt has
LOOK_AGENTS_S = 0.02  # likewise for the words of agents whose supervisors have ended
FREE_S = 5.0  # how long nodes that Ray says are there may take to be free
News = queue.SimpleQueue[tuple[int, int, bytes | None, str]]  # rank, epoch of its start, result, or what failed


@dataclass
class Cluster:
    """Use as: `start()`, `place()`, `run(specs, payload)`, `supervise(rank, pid)`, `lost()`, then `keeps(ready)` or
    `again()` for another attempt, or `stop()`.

    Large: the dealings with Ray, and those with the supervisors of one attempt.
    """

    job: Job
    folder: str
    started_ray: bool = False
    was_initialized: bool = False
    places: list[Place] = field(default_factory=list)
    _agents: list[Any] = field(default_factory=list)
    _epochs: dict[int, int] = field(default_factory=dict)  # in which the supervisors of the ranks were started
    _news: News = field(default_factory=queue.SimpleQueue)
    _results: dict[int, bytes] = field(default_factory=dict)
    # ranks whose supervisor runs, or did; of one on this host (descriptor, pid), until it ends
    _supervised: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)  # ranks whose processes of the next attempt are started already
    _without_agents: set[int] = field(default_factory=set)  # ranks that are supervised, but whose agents are gone
    _without_ray: bool = False  # this process starts the supervisors itself
    _stopping: bool = False
    room: int = 0  # as many nodes as there could be now, where they are more than this attempt has
    _room_every_s: float = ROOM_EVERY_S
    _threads: Threads = field(default_factory=Threads)
    _listeners: list[ScopedThread] = field(default_factory=list)
    _finding: ScopedThread | None = None
    _group: Any = None
    _saved: dict[str, str | None] = field(default_factory=dict)

    # ---- start

    def start(self) -> None:
        """Have a Ray to work with. Raises `UsageError` if there is none at the address,
        `Infeasible` if it does not start or the nodes do not fit."""
        loaded = sys.modules.get("ray")
        self.was_initialized = bool(loaded is not None and loaded.is_initialized())
        if self.was_initialized:
            import ray
        elif self.job.address and self.job.address != "local":
            ray = self._attach()
        else:
            check_memory(self.job.nodes)
            check_surroundings()
            ray = self._start_local()
        if not self.started_ray:
            check_fits(self.job, [n for n in ray.nodes() if n["Alive"]])

    def _start_local(self) -> Any:
        token = os.path.join(self.folder, "token")
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(secrets.token_hex(32))
        self._set_env(
            {**QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token, MARK: self.job.id},
            drop=("RAY_AUTH_TOKEN", "RAY_ADDRESS"),
        )
        fresh = "ray" not in sys.modules
        import ray

        self._set_env(OWN)  # after the import: what this process starts later is not ours
        if not fresh:
            reread_settings()
        self.started_ray = True
        temporary = os.path.join(self.folder, "ray")  # Ray makes it everybody's; the folder around it is ours alone
        os.mkdir(temporary, 0o700)
        try:
            with tamed():
                ray.init(
                    address="local",
                    num_cpus=self.job.nodes,
                    num_gpus=0,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level=logging.ERROR,
                    object_store_memory=80 << 20,
                    _temp_dir=temporary,
                    _node_ip_address="127.0.0.1",
                )
        except Exception as e:  # of many types, none of them documented; all mean that there is no Ray to work with
            raise Infeasible(f"Ray did not start: {_first_line(e)}") from e
        return ray

    def _attach(self) -> Any:
        address = self.job.address
        if address.startswith("ray://"):
            raise UsageError(
                f"--address {address}: Ray Client addresses are not supported; "
                "run the launcher on a node of the cluster with --address auto, "
                "or as a Ray job"
            )
        self._set_env(QUIET)
        if address != "auto":
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise UsageError(
                    f"--address {address!r}: expected HOST:PORT of the Ray head (port 6379 by default), or 'auto'"
                )
            try:
                reach(host.strip("[]"), port)
            except (OSError, OverflowError) as e:
                raise UsageError(
                    f"--address {address}: nothing answers there ({e}); `ray status` on the head shows its address"
                ) from None
        import ray

        try:
            with on_loopback(address):
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    namespace=f"manygrad-{self.job.id}",
                )
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise UsageError(f"--address {address}: cannot attach to a Ray cluster: {_first_line(e)}") from e
        return ray

    # ---- agents

    def place(self, n: int = 0, wait_s: float = 30.0) -> list[Place]:
        """One agent for each of `n` nodes (0: as many as were asked for): spread over hosts if there are enough, else
        sharing them. Raises `Infeasible` if they are not free within `wait_s`."""
        import ray
        from ray import cloudpickle

        n = n or self.job.nodes
        cloudpickle.register_pickle_by_value(agent_module)
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 1}
        if not self.started_ray:
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            wanted = needs(self.job)
            gpus = wanted.get("GPU", 0)
            options |= {"num_gpus": gpus} if gpus else {}
            hosts = [x for x in ray.nodes() if x["Alive"] and all(has(x, k) >= v for k, v in wanted.items())]
            self._group = placement_group([wanted] * n, strategy="STRICT_SPREAD" if len(hosts) >= n else "PACK")
            if not self._group.wait(timeout_seconds=min(wait_s, self.job.start_timeout_s)):
                free = ray.available_resources().get("CPU", 0)
                also, hosts_of = f" and {n * gpus} GPUs" if gpus else "", "as many" if len(hosts) >= n else "its"
                raise Infeasible(
                    f"the Ray cluster is busy: {n} nodes need {n} free CPUs{also} on {hosts_of} hosts, {free:g} CPUs "
                    "are free now. `ray status` shows who uses them; try again later or ask for fewer nodes"
                )
        try:
            remote = ray.remote(**options)(agent_module.Agent)
            for r in range(n):
                placed = PlacementGroupSchedulingStrategy(self._group, r) if self._group is not None else None
                self._agents.append((remote.options(scheduling_strategy=placed) if placed else remote).remote())
            if self.started_ray:
                here, cores = socket.gethostname(), len(os.sched_getaffinity(0))
                self.places = [Place(here, "127.0.0.1", cores, r, n) for r in range(n)]
            else:
                self._look(ray)
        finally:
            cloudpickle.unregister_pickle_by_value(agent_module)
        return self.places

    def _look(self, ray: Any) -> None:
        """Ask every agent where it is."""
        try:
            found = ray.get([a.host.remote() for a in self._agents], timeout=self.job.start_timeout_s)
        except ray.exceptions.RayError as e:
            raise Infeasible(
                f"the node agents did not start: {_last_line(e)}; manygrad and pyzmq must be installed on every host"
            ) from e
        ips = {x["NodeID"]: x["NodeManagerAddress"] for x in ray.nodes()}
        me = ray.util.get_node_ip_address()
        here = all(ips.get(f["node_id"]) == me for f in found)
        self.places = share([(f["host"], "127.0.0.1" if here else ips[f["node_id"]], f["cores"]) for f in found])

    @property
    def driver_ip(self) -> str:
        """The address under which the workers reach the driver."""
        if all(p.ip == "127.0.0.1" for p in self.places):
            return "127.0.0.1"
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, specs: dict[int, dict[str, Any]], payload: bytes) -> None:
        """Have the agents of these ranks start their supervisors."""
        news = self._news
        self._epochs |= {rank: spec["epoch"] for rank, spec in specs.items()}
        if self._without_ray:
            for rank, spec in specs.items():
                self._threads.start("manygrad-agent", _run_here, rank, spec, payload, news)
            return
        refs = {self._agents[r].run.remote(spec, payload): (r, spec["epoch"]) for r, spec in specs.items()}

        def failed(error: BaseException) -> None:
            """Nobody asks Ray any more, which is for the rest of the agents as if it were gone."""
            for start in refs.values():
                news.put((*start, None, f"{type(error).__name__}: {_first_line(error)}"))

        self._listeners.append(self._threads.start("manygrad-ray", self._listen, refs, news, on_error=failed))

    def _listen(self, refs: dict[Any, tuple[int, int]], news: News) -> None:
        """Ray's word on the agents, for `lost` and `results`. Ends with them, with the attempt, or when Ray cannot even
        be asked."""
        import ray

        while refs and not self._stopping and news is self._news:
            try:
                found = ray.wait(list(refs), num_returns=1, timeout=0.5)
            except Exception as e:  # a dead Ray says so by errors of its own, of gRPC and of Python; `lost` tells it
                for start in refs.values():
                    news.put((*start, None, _first_line(e)))
                return
            ready, _ = found
            if not ready:
                time.sleep(0.1)  # a dead Ray does not wait
            for ref in ready:
                try:
                    result, why = ray.get(ref, timeout=5), ""
                except Exception as e:  # what has ended the agent, of whatever type; `lost` tells it
                    result, why = None, f"{type(e).__name__}: {_last_line(e).partition(' Worker exit detail')[0][:300]}"
                news.put((*refs.pop(ref), None if result is None else bytes(result), why))

    def supervise(self, rank: int, pid: int) -> None:
        """The rank's supervisor runs, as process `pid` of its host. From now on Ray's end is not this rank's."""
        self._supervised[rank] = None
        if self.places[rank].ip == "127.0.0.1" and pid > 0:
            with suppress(OSError):
                self._supervised[rank] = os.pidfd_open(pid), pid

    def lost(self) -> tuple[list[tuple[int, str]], str]:
        """Supervisors that ended, or never came to be, since the last call, as (rank, reason);
        and what is the matter with Ray, or nothing."""
        out, trouble = [], ""
        for rank, process in self._supervised.items():
            if process is not None and select.select([process[0]], [], [], 0)[0]:
                os.close(process[0])
                self._supervised[rank] = None
                out.append((rank, f"process {process[1]} ended"))
        while not self._news.empty():
            rank, epoch, result, reason = self._news.get()
            if epoch != self._epochs[rank]:  # of a supervisor in whose place there is another one
                continue
            if result is not None:
                self._results[rank] = result
                out.append((rank, "it ended"))
            elif rank in self._supervised:
                trouble = reason
                self._without_agents.add(rank)
            else:
                out.append((rank, reason))
        return out, trouble

    def results(self, timeout_s: float = 60.0) -> list[bytes]:
        """Results of the function, by rank; for a run that succeeded.
        Raises `RuntimeError` if Ray, which brings it from other hosts, is gone."""
        if self.started_ray:
            found = []
            for r in range(len(self.places)):
                with open(os.path.join(self.folder, f"result-{r}"), "rb") as f:
                    found.append(f.read())
            return found
        until = time.monotonic() + timeout_s
        while len(self._results) < len(self.places):
            rank, epoch, result, reason = self._news.get(timeout=max(0.01, until - time.monotonic()))
            if result is None and epoch == self._epochs[rank]:
                raise RuntimeError(f"the result of rank {rank} did not come back: {reason}")
            if result is not None and epoch == self._epochs[rank]:
                self._results[rank] = result
        return [self._results[r] for r in range(len(self.places))]

    # ---- another attempt

    def look_for_room(self) -> None:
        """Have a thread look whether there are more nodes for an attempt that has fewer than were asked for: `room`."""
        self.room = 0
        self._listeners.append(self._threads.start("manygrad-room", self._look_for_room, len(self.places), self._news))

    def _look_for_room(self, size: int, news: News) -> None:
        """Ends when room is found, with the attempt, or when Ray cannot be asked: what that means others tell."""
        import ray

        wanted, looked = needs(self.job), time.monotonic()
        while not self._stopping and news is self._news and not self.room:
            time.sleep(LOOK_AGENTS_S)
            if time.monotonic() - looked > self._room_every_s:
                try:
                    free = ray.available_resources()
                except Exception:  # a dead Ray says so by errors of its own, of gRPC and of Python
                    return
                more = min(int(free.get(kind, 0)) // n for kind, n in wanted.items())
                self.room, looked = min(self.job.nodes, size + more) if more else 0, time.monotonic()

    def replace(self, rank: int, spec: dict[str, Any], payload: bytes) -> None:
        """Have the process that takes a rank's place in the next attempt start now: its supervisor of this one was told
        to end. Only on this machine; elsewhere agents have to end first."""
        if self.started_ray:
            self._let_go([rank])
            self._without_ray = True
            self.early.add(rank)
            self.run({rank: spec}, payload)

    def keeps(self, ready: Container[int]) -> bool:
        """Whether the places stay for another attempt, in which the processes of `ready` ranks go on: those of the
        others, which have been told to end, have, and their agents can start new ones. Where a ready rank's agent is
        gone, so is its node for Ray, and another one is looked for, as for a run that has fewer than it wants."""
        ended = [r for r in range(len(self.places)) if r not in ready and r not in self.early]
        self._let_go(ended)
        if self.started_ray:
            self._without_ray = True
            return True
        if len(self.places) < self.job.nodes:
            return False
        until = time.monotonic() + ENDING_S
        while any(r not in self._results for r in ended) and time.monotonic() < until:
            self.lost()
            time.sleep(LOOK_AGENTS_S)
        return not ended or (not self._without_agents and all(self._results.pop(r, None) is not None for r in ended))

    def again(self, least: int, give_up: Callable[[], bool]) -> list[Place]:
        """Places for another attempt, when the last one's supervisors have been told to end.

        On this machine they are the same, and Ray is not needed for them. In another's cluster they are new ones, on as
        many nodes as are left, at most those that were asked for and not less than `least`, for which it waits as long
        as a start may take. Raises `Infeasible`; or returns no places, where it is to `give_up`.
        """
        before, for_room, self.room = len(self.places), self.room > 0, 0
        self._let_go(range(before))
        self.early.clear()
        self._news, self._results, self._without_agents = queue.SimpleQueue(), {}, set()
        if self.started_ray:
            self._without_ray = True
            return self.places
        self._finding = finding = self._threads.start("manygrad-places", self._find_places, least)
        until = time.monotonic() + self.job.start_timeout_s + RAY_STOP_S
        while finding.is_alive():
            finding.join(0.1)
            if give_up():
                return []
            if time.monotonic() > until:
                raise Infeasible(f"the Ray cluster has not answered for {self.job.start_timeout_s + RAY_STOP_S:g} s")
        finding.check()
        # what Ray says is free may be taken before it is asked for, or lie on hosts that have too little each
        is_wrong = for_room and len(self.places) <= before
        self._room_every_s = min(10 * self._room_every_s, LONGEST_ROOM_S) if is_wrong else ROOM_EVERY_S
        return self.places

    def _let_go(self, ranks: Iterable[int]) -> None:
        """Forget these ranks, once their supervisors have ended or their time is up; nothing is left of them on this
        machine."""
        until = time.monotonic() + ENDING_S
        for rank in ranks:
            if (process := self._supervised.pop(rank, None)) is not None:
                select.select([process[0]], [], [], max(0.0, until - time.monotonic()))
                os.close(process[0])
            if self.started_ray:
                with suppress(OSError):
                    os.unlink(os.path.join(self.folder, f"result-{rank}"))
        if self.started_ray:
            sweep_starts(self.job.id, self.folder, [f"{self._epochs[r]}.{r}" for r in ranks if r in self._epochs])

    def _find_places(self, least: int) -> None:
        """New agents on the nodes that are left, as many as wanted and there are; others may have some of them."""
        import ray

        until, most = time.monotonic() + self.job.start_timeout_s, self.job.nodes
        while not self._stopping:
            self._give_back(ray, [])
            there = sum(has(n, "CPU") for n in ray.nodes() if n["Alive"])
            why = f"{there} node{'s are' if there != 1 else ' is'} left, of at least {least}"
            if there >= least:
                n = min(most, there)
                try:
                    self.place(n, FREE_S)
                    return
                except Infeasible as e:  # a node may have died meanwhile, or be dead without Ray's knowing it yet
                    why, most = str(e), n - 1 if n > least else self.job.nodes
            if time.monotonic() > until:
                self._give_back(ray, [])
                raise Infeasible(f"no places for another attempt within {self.job.start_timeout_s:g} s: {why}")
            time.sleep(LOOK_S)

    # ---- stop

    def stop(self, fast: bool) -> str:
        """Take our agents away. Of a Ray that we started nothing is left;
        `fast` (the process ends next) leaves that to the sweep.

        Returns what could not be done, or nothing: it ends no run, and what is left may be the user's Ray.
        """
        self._stopping = True
        ray = sys.modules.get("ray")
        for process in self._supervised.values():
            if process is not None:
                os.close(process[0])
        self._supervised = {}
        try:
            if ray is None or not ray.is_initialized():
                return ""
            if self.started_ray and fast:
                return ""
            trouble = list[str]()
            # a dead Ray would keep us waiting
            leaving = self._threads.start("manygrad-leave-ray", self._leave, ray, trouble)
            leaving.join(RAY_STOP_S)
            if leaving.is_alive():
                trouble.append(f"it has not answered for {RAY_STOP_S:g} s")
            elif leaving.error is not None:
                trouble.append(f"{type(leaving.error).__name__}: {_first_line(leaving.error)}")
            return "; ".join(dict.fromkeys(trouble))
        finally:
            self._threads.close(0.0)  # (they have ended, or wait for a Ray that does not answer)
            self._restore_env(fast)

    def _leave(self, ray: Any, trouble: list[str]) -> None:
        if self._finding is not None:
            self._finding.join()
        self._give_back(ray, trouble)
        if not self.was_initialized:
            _attempt("leaving Ray", ray.shutdown, trouble)

    def _give_back(self, ray: Any, trouble: list[str]) -> None:
        """Each step on its own: where one fails (Ray is gone, say), the others may not."""
        agents, group, listeners = self._agents, self._group, self._listeners
        self._agents, self._group, self._listeners = [], None, []
        for listener in listeners:
            listener.join()  # Ray ends a process that asks it for anything once it was shut down

        if not self.started_ray:
            while agents:
                kill = functools.partial(ray.kill, agents.pop(), no_restart=True)
                _attempt("ending a node agent", kill, trouble)
            if group is not None:
                _attempt("giving back the places", functools.partial(_remove, group), trouble)

    def _set_env(self, values: dict[str, str], drop: tuple[str, ...] = ()) -> None:
        for k in (*values, *drop):
            self._saved.setdefault(k, os.environ.get(k))
        os.environ.update(values)
        for k in drop:
            os.environ.pop(k, None)

    def _restore_env(self, ended: bool) -> None:
        for k, v in self._saved.items():
            if v is None:
                os.environ.pop(k, None)
            else:
                os.environ[k] = v
        self._saved = {}
        if self.started_ray and not ended:
            reread_settings()


def _attempt(what: str, step: Callable[[], object], trouble: list[str]) -> None:
    try:
        step()
    except Exception as e:  # whatever Ray raises: it is the user's to know, and the next step's turn
        trouble.append(f"{what}: {type(e).__name__}: {_first_line(e)}")


def _run_here(rank: int, spec: dict[str, Any], payload: bytes, news: News) -> None:
    """What an agent of Ray's does, in a thread of this process."""
    try:
        news.put((rank, spec["epoch"], agent_module.Agent().run(spec, payload), ""))
    except (OSError, RuntimeError, ValueError) as e:
        news.put((rank, spec["epoch"], None, f"{type(e).__name__}: {e}"))


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def _last_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[-1]
