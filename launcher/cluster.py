"""Ray, as far as the launcher needs it: start or attach, count what fits, place one agent a node, go away.

A Ray that we start belongs to one run: its own token (a private file), its own short temporary folder, and at the end
its processes are killed by their ids and the folder is removed. A Ray that we attach to is left as it is.

Ray is needed to find the places and to start the supervisors there. After that nothing of a run depends on it: what it
says comes from a thread of its own, which may wait for a dead Ray as long as it likes (`lost`).
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import queue
import resource
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from manygrad.errors import Infeasible, UsageError
from manygrad.tensor.threads import ScopedThread, Threads

from . import agent as agent_module
from .janitor import MARK
from .job import Job

WORKER_MIB = 192  # memory that the smallest worker and its agent need
LEAST_FILES = 256  # that a process of Ray has open, and some more
_QUIET = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "false",
    "RAY_worker_niceness": "0",  # the workers are the job, not something in its background
    # without its GCS Ray ends the processes that use it, the launcher too
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",
}
# Of a Ray that is ours. It would take the host's address instead of the one we give, and listen on all interfaces;
# in a world of one host it takes loopback.
_OWN = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Processes that a Ray of ours has no use for: autoscaler, dashboard, and what sends logs to the driver. Each imports
# Ray, while on a busy machine the others give up waiting for each other.
_UNUSED = ("start_monitor", "start_api_server", "start_log_monitor")
RAY_STOP_S = 10.0  # how long a Ray may take to be told that we go


@dataclass
class Place:
    """Where a rank runs."""

    host: str
    ip: str
    cores: int
    local_rank: int
    local_size: int


def share(found: list[tuple[str, str, int]]) -> list[Place]:
    """Places from each rank's (host name, address, cores).
    Hosts may have the same name (two clones, `localhost`): the address tells them apart."""
    seen = dict[tuple[str, str], int]()
    places = list[Place]()
    for host, ip, cores in found:
        seen[host, ip] = seen.get((host, ip), 0) + 1
        places.append(Place(host, ip, cores, seen[host, ip] - 1, 0))
    for p in places:
        p.local_size = seen[p.host, p.ip]
    return places


@dataclass
class Cluster:
    """Use as: `start()`, `place()`, `run(rank, spec, payload)`, `supervise(rank, pid)`, `lost()`, `stop()`."""

    job: Job
    folder: str
    started_ray: bool = False
    was_initialized: bool = False
    places: list[Place] = field(default_factory=list)
    _agents: list[Any] = field(default_factory=list)
    _refs: dict[Any, int] = field(default_factory=dict)
    # rank, result, or what failed
    _news: queue.SimpleQueue[tuple[int, bytes | None, str]] = field(default_factory=queue.SimpleQueue)
    _results: dict[int, bytes] = field(default_factory=dict)
    # ranks whose supervisor runs, or did; of one on this host (descriptor, pid), until it ends
    _supervised: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    _stopping: bool = False
    _threads: Threads = field(default_factory=Threads)
    _listener: ScopedThread | None = None
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
            self._check_fits(ray)

    def _start_local(self) -> Any:
        token = os.path.join(self.folder, "token")
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(secrets.token_hex(32))
        self._set_env(
            {**_QUIET, **_OWN, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token, MARK: self.job.id},
            drop=("RAY_AUTH_TOKEN", "RAY_ADDRESS"),
        )
        fresh = "ray" not in sys.modules
        import ray

        if not fresh:
            _reread_settings()
        self.started_ray = True
        temporary = os.path.join(self.folder, "ray")  # Ray makes it everybody's; the folder around it is ours alone
        os.mkdir(temporary, 0o700)
        try:
            with _tamed():
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
        self._set_env(_QUIET)
        if address != "auto":
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise UsageError(
                    f"--address {address!r}: expected HOST:PORT of the Ray head (port 6379 by default), or 'auto'"
                )
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            except (OSError, OverflowError) as e:
                raise UsageError(
                    f"--address {address}: nothing answers there ({e}); `ray status` on the head shows its address"
                ) from None
        import ray

        try:
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=f"manygrad-{self.job.id}"
            )
        except (ConnectionError, RuntimeError, ValueError) as e:
            raise UsageError(f"--address {address}: cannot attach to a Ray cluster: {_first_line(e)}") from e
        return ray

    def _check_fits(self, ray: Any) -> None:
        """Refuse what can never be placed, and say what is there."""
        nodes = [n for n in ray.nodes() if n["Alive"]]
        fits = sum(int(n["Resources"].get("CPU", 0)) for n in nodes)
        if fits < self.job.nodes:
            there = ", ".join(f"{n['NodeManagerHostname']} ({n['Resources'].get('CPU', 0):g} CPUs)" for n in nodes)
            raise Infeasible(
                f"{self.job.nodes} nodes were asked for, each needs one CPU; "
                f"the Ray cluster has {len(nodes)} host{'s' * (len(nodes) != 1)} with {fits} CPUs in all: {there}. "
                f"Ask for at most {fits} nodes, or add hosts with `ray start --address=...`"
            )

    # ---- agents

    def place(self) -> list[Place]:
        """One agent a node: spread over hosts if there are enough, else sharing them."""
        import ray
        from ray import cloudpickle

        n = self.job.nodes
        cloudpickle.register_pickle_by_value(agent_module)
        options: dict[str, Any] = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 1}
        if not self.started_ray:
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            hosts = [x for x in ray.nodes() if x["Alive"] and x["Resources"].get("CPU", 0) >= 1]
            self._group = placement_group([{"CPU": 1}] * n, strategy="STRICT_SPREAD" if len(hosts) >= n else "PACK")
            if not self._group.wait(timeout_seconds=min(30.0, self.job.start_timeout_s)):
                free = ray.available_resources().get("CPU", 0)
                raise Infeasible(
                    "the Ray cluster is busy: "
                    f"{n} nodes need {n} free CPUs on {'as many hosts' if len(hosts) >= n else 'its hosts'}, {free:g} "
                    "are free now. `ray status` shows who uses them; try again later or ask for fewer nodes"
                )
        try:
            remote = ray.remote(**options)(agent_module.Agent)
            for r in range(n):
                placed = (
                    {}
                    if self._group is None
                    else {
                        "scheduling_strategy": PlacementGroupSchedulingStrategy(
                            self._group, placement_group_bundle_index=r
                        )
                    }
                )
                self._agents.append(remote.options(**placed).remote())
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

    def run(self, rank: int, spec: dict[str, Any], payload: bytes) -> None:
        self._refs[self._agents[rank].run.remote(spec, payload)] = rank
        if len(self._refs) == self.job.nodes:
            refs = dict(self._refs)

            def failed(error: BaseException) -> None:
                """Nobody asks Ray any more, which is for the rest of the agents as if it were gone."""
                for rank in refs.values():
                    self._news.put((rank, None, f"{type(error).__name__}: {_first_line(error)}"))

            self._listener = self._threads.start("manygrad-ray", self._listen, refs, on_error=failed)

    def _listen(self, refs: dict[Any, int]) -> None:
        """Ray's word on the agents, for `lost` and `results`. Ends with them, or when Ray cannot even be asked."""
        import ray

        while refs and not self._stopping:
            try:
                found = ray.wait(list(refs), num_returns=1, timeout=0.5)
            except Exception as e:  # a dead Ray says so by errors of its own, of gRPC and of Python; `lost` tells it
                for rank in refs.values():
                    self._news.put((rank, None, _first_line(e)))
                return
            ready, _ = found
            if not ready:
                time.sleep(0.1)  # a dead Ray does not wait
            for ref in ready:
                rank = refs[ref]
                try:
                    result, why = ray.get(ref, timeout=5), ""
                except Exception as e:  # what has ended the agent, of whatever type; `lost` tells it
                    result, why = None, f"{type(e).__name__}: {_last_line(e).partition(' Worker exit detail')[0][:300]}"
                self._news.put((rank, None if result is None else bytes(result), why))
                del refs[ref]

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
            rank, result, reason = self._news.get()
            if result is not None:
                self._results[rank] = result
                out.append((rank, "it ended"))
            elif rank in self._supervised:
                trouble = reason
            else:
                out.append((rank, reason))
        return out, trouble

    def results(self, timeout_s: float = 60.0) -> list[bytes]:
        """Results of the function, by rank; for a run that succeeded.
        Raises `RuntimeError` if Ray, which brings it from other hosts, is gone."""
        if self.started_ray:
            found = []
            for r in range(self.job.nodes):
                with open(os.path.join(self.folder, f"result-{r}"), "rb") as f:
                    found.append(f.read())
            return found
        until = time.monotonic() + timeout_s
        while len(self._results) < self.job.nodes:
            rank, result, reason = self._news.get(timeout=max(0.01, until - time.monotonic()))
            if result is None:
                raise RuntimeError(f"the result of rank {rank} did not come back: {reason}")
            self._results[rank] = result
        return [self._results[r] for r in range(self.job.nodes)]

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
        """Each step on its own: where one fails (Ray is gone, say), the others may not."""
        agents, group = self._agents, self._group
        self._agents, self._refs, self._group = [], {}, None
        if self._listener is not None:
            self._listener.join()  # Ray ends a process that asks it for anything once it was shut down

        def attempt(what: str, step: Callable[[], object]) -> None:
            try:
                step()
            except Exception as e:  # whatever Ray raises: it is the user's to know, and the next step's turn
                trouble.append(f"{what}: {type(e).__name__}: {_first_line(e)}")

        if not self.started_ray:
            while agents:
                attempt("ending a node agent", functools.partial(ray.kill, agents.pop(), no_restart=True))
            if group is not None:
                attempt("giving back the places", functools.partial(_remove, group))
        del agents
        if not self.was_initialized:
            attempt("leaving Ray", ray.shutdown)

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
            _reread_settings()


def _remove(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def _reread_settings() -> None:
    """Ray reads its environment variables once, when it is loaded; have it do so again."""
    import ray._raylet as raylet

    config, tokens = getattr(raylet, "Config", None), getattr(raylet, "AuthenticationTokenLoader", None)
    if config is not None and tokens is not None:
        config.initialize("")
        tokens.instance().reset_cache()


@contextmanager
def _tamed() -> Iterator[None]:
    """Ray's start with what no setting of it changes. A name that a version of Ray does not have is left alone."""
    with ExitStack() as stack:

        def put(module: str, name: str, make: Callable[[Any], Any], of: str = "") -> None:
            there: Any = importlib.import_module(f"ray._private.{module}")
            there = getattr(there, of, None) if of else there
            if hasattr(there, name):
                before = getattr(there, name)
                stack.callback(setattr, there, name, before)
                setattr(there, name, make(before))

        put("ray_constants", "ENABLE_RAY_CLUSTER", lambda before: False)  # as in _OWN, if Ray was loaded before
        # else our command line, which may be no UTF-8
        put("utils", "get_entrypoint_name", lambda before: lambda: "launcher")
        put("node", "wait_for_persisted_port", _in_slices)
        for process in _UNUSED:
            put("node", process, lambda before: lambda self, **settings: None, of="Node")
        yield


def _in_slices(wait: Callable[..., int]) -> Callable[..., int]:
    """Ray waits half a minute for its GCS in one call that holds the interpreter: no signal, and no `Guard`,
    would get through."""

    def in_slices(*args: Any, timeout_ms: int = 30_000, **kwargs: Any) -> int:
        until = time.monotonic() + timeout_ms / 1000
        while True:
            try:
                return wait(*args, timeout_ms=100, **kwargs)
            except RuntimeError:  # (so it says that the time is over)
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)  # (it may have failed at once)

    return in_slices


def _first_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]


def _last_line(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[-1]


class Guard:
    """Looks after the Ray that we start, from before its start until the supervisors run:
    calls `ended(text)` when a part of it dies, in a thread of its own.

    `ray.init` itself would find out after half a minute, and end in a traceback.
    """

    EVERY_S, CLOSE_S = 0.1, 0.5

    def __init__(self, ended: Callable[[str], None]) -> None:
        self.ended, self.done = ended, threading.Event()
        self.seen: dict[int, tuple[str, int]] = {}  # by id: name, and a descriptor that tells of its end
        self._threads = Threads()

    def start(self) -> None:
        self._threads.start("manygrad-guard", self._watch, stop=self.stop)

    def _watch(self) -> None:
        try:
            while not self.done.is_set():
                for pid, name in ray_processes().items():
                    if pid not in self.seen:
                        with suppress(OSError):  # (one that has just ended is gone)
                            self.seen[pid] = name, os.pidfd_open(pid)
                descriptors = {fd: pid for pid, (_, fd) in self.seen.items()}
                ended = select.select(list(descriptors), [], [], self.EVERY_S)[0]
                if ended and not self.done.is_set():
                    self._tell(descriptors[ended[0]])
                    return
        finally:
            for _, fd in self.seen.values():
                os.close(fd)

    def _tell(self, pid: int) -> None:
        for other, (name, _) in self.seen.items():
            if name == "raylet" and other != pid:
                # it ends with its agents, and with it Ray's client, which is this process, before it could say why
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGSTOP)
        self.ended(
            f"Ray's {self.seen[pid][0]} (process {pid}) ended while the run was starting; start it again "
            "(on a very busy machine Ray's processes give up waiting for each other after 30 s)"
        )

    def stop(self) -> None:
        """Its thread ends soon."""
        self.done.set()

    def close(self) -> None:
        """Its thread has ended, unless it is within `ended`."""
        self._threads.close(self.CLOSE_S)


AGENTS = {b"dashboard/agent.py": "DashboardAgent", b"runtime_env/agent/main.py": "RuntimeEnvAgent"}


def ray_processes() -> dict[int, str]:
    """The GCS and the raylet that are children of this process, and the agents that are the raylet's: names by id."""
    parents, names = dict[int, int](), dict[int, str]()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as f:
                head, _, tail = f.read().rpartition(b")")
        except OSError:
            continue
        parents[int(name)], names[int(name)] = int(tail.split()[1]), head.partition(b"(")[2].decode(errors="replace")
    me = os.getpid()
    found = {p: names[p] for p, parent in parents.items() if parent == me and names[p] in ("gcs_server", "raylet")}
    for p, parent in parents.items():
        if found.get(parent) == "raylet":
            line = b""
            with suppress(OSError), open(f"/proc/{p}/cmdline", "rb") as f:
                line = f.read()
            for path, agent in AGENTS.items():
                if path in line or agent.encode() in line:
                    found[p] = agent
    return found


def check_surroundings() -> None:
    """Refuse what Ray would not start in, and would not say."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < LEAST_FILES:
        raise Infeasible(
            f"a process may open {files} files here (`ulimit -n`), of which Ray needs more: at least {LEAST_FILES}, "
            "better 8192"
        )
    if sys.flags.optimize > 1:
        raise Infeasible(
            "Python runs without docstrings (PYTHONOPTIMIZE=2, -OO), and Ray does not start without them; use "
            "PYTHONOPTIMIZE=1"
        )
    if os.path.isdir("/dev/shm") and not os.access("/dev/shm", os.W_OK):
        raise Infeasible("/dev/shm cannot be written, where Ray keeps its objects; mount it for writing")


def check_memory(nodes: int) -> None:
    """Refuse more local workers than this machine's free memory can hold."""
    try:
        with open("/proc/meminfo") as f:
            free_mib = next(int(line.split()[1]) for line in f if line.startswith("MemAvailable")) >> 10
    except (OSError, StopIteration, ValueError):
        return
    if nodes * WORKER_MIB > free_mib:
        raise Infeasible(
            f"{nodes} nodes were asked for on this one machine; its {free_mib} MiB of free memory hold at most "
            f"{free_mib // WORKER_MIB} workers of at least {WORKER_MIB} MiB each. "
            "Ask for fewer nodes, or give a Ray cluster with --address"
        )
