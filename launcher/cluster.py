"""Ray, as far as the launcher needs it: start or attach, count what fits, place one agent a node, go away.

A Ray that we start belongs to one run: its own token (a private file), its own short temporary folder, loopback only,
and at the end its processes are killed by their ids and the folder is removed. A Ray that we attach to is left as it is.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from . import agent as agent_module
from .errors import Infeasible, UsageError
from .janitor import MARK
from .job import Job

WORKER_MIB = 192  # memory that the smallest worker and its agent need
_QUIET = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "false",
}


@dataclass
class Place:
    """Where a rank runs."""

    host: str
    ip: str
    cores: int
    local_rank: int
    local_size: int


@dataclass
class Cluster:
    """Use as: `start()`, `place()`, `run(rank, spec, payload)`, `lost()`, `stop()`."""

    job: Job
    folder: str
    started_ray: bool = False
    was_initialized: bool = False
    places: list[Place] = field(default_factory=list)
    _agents: list[Any] = field(default_factory=list)
    _refs: dict[Any, int] = field(default_factory=dict)
    _group: Any = None
    _saved: dict[str, str | None] = field(default_factory=dict)

    # ---- start

    def start(self) -> None:
        """Have a Ray to work with. Raises `UsageError` if there is none at the address, `Infeasible` if the nodes do not fit."""
        loaded = sys.modules.get("ray")
        self.was_initialized = bool(loaded is not None and loaded.is_initialized())
        if self.was_initialized:
            import ray
        elif self.job.address and self.job.address != "local":
            ray = self._attach()
        else:
            check_memory(self.job.nodes)
            ray = self._start_local()
        if not self.started_ray:
            self._check_fits(ray)

    def _start_local(self) -> Any:
        token = os.path.join(self.folder, "token")
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(secrets.token_hex(32))
        self._set_env(
            {**_QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token, MARK: self.job.id},
            drop=("RAY_AUTH_TOKEN", "RAY_ADDRESS"),
        )
        fresh = "ray" not in sys.modules
        import ray

        if not fresh:
            _reread_settings()
        self.started_ray = True
        ray.init(
            address="local",
            num_cpus=self.job.nodes,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            object_store_memory=80 << 20,
            _temp_dir=self.folder,
            _node_ip_address="127.0.0.1",
        )
        return ray

    def _attach(self) -> Any:
        address = self.job.address
        if address.startswith("ray://"):
            raise UsageError(
                f"--address {address}: Ray Client addresses are not supported; run the launcher on a node of the cluster with --address auto, "
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
            raise UsageError(
                f"--address {address}: cannot attach to a Ray cluster: {str(e).strip().splitlines()[0]}"
            ) from e
        return ray

    def _check_fits(self, ray: Any) -> None:
        """Refuse what can never be placed, and say what is there."""
        nodes = [n for n in ray.nodes() if n["Alive"]]
        fits = sum(int(n["Resources"].get("CPU", 0)) for n in nodes)
        if fits < self.job.nodes:
            there = ", ".join(f"{n['NodeManagerHostname']} ({n['Resources'].get('CPU', 0):g} CPUs)" for n in nodes)
            raise Infeasible(
                f"{self.job.nodes} nodes were asked for, each needs one CPU; the Ray cluster has {len(nodes)} host{'s' * (len(nodes) != 1)} "
                f"with {fits} CPUs in all: {there}. Ask for at most {fits} nodes, or add hosts with `ray start --address=...`"
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
                    f"the Ray cluster is busy: {n} nodes need {n} free CPUs on {'as many hosts' if len(hosts) >= n else 'its hosts'}, {free:g} are free now. "
                    "`ray status` shows who uses them; try again later or ask for fewer nodes"
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
                f"the node agents did not start: {str(e).strip().splitlines()[-1]}; manygrad and pyzmq must be installed on every host"
            ) from e
        ips = {x["NodeID"]: x["NodeManagerAddress"] for x in ray.nodes()}
        me = ray.util.get_node_ip_address()
        here = all(ips.get(f["node_id"]) == me for f in found)
        seen: dict[str, int] = {}
        for f in found:
            local_rank = seen[f["host"]] = seen.get(f["host"], -1) + 1
            self.places.append(Place(f["host"], "127.0.0.1" if here else ips[f["node_id"]], f["cores"], local_rank, 0))
        for p in self.places:
            p.local_size = seen[p.host] + 1

    @property
    def driver_ip(self) -> str:
        """The address under which the workers reach the driver."""
        if all(p.ip == "127.0.0.1" for p in self.places):
            return "127.0.0.1"
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, rank: int, spec: dict[str, Any], payload: bytes) -> None:
        self._refs[self._agents[rank].run.remote(spec, payload)] = rank

    def lost(self) -> list[tuple[int, str]]:
        """Agents that died since the last call: (rank, reason)."""
        import ray

        out = []
        ready, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0) if self._refs else ([], [])
        for ref in ready:
            try:
                ray.get(ref, timeout=1)
            except Exception as e:
                text = (str(e).strip().splitlines() or [""])[-1]
                out.append(
                    (self._refs.pop(ref), f"{type(e).__name__}: {text.partition(' Worker exit detail')[0][:300]}")
                )
        return out

    def results(self, timeout_s: float = 60.0) -> list[bytes]:
        """What the agents' `run` returned, by rank; for a run that succeeded."""
        import ray

        by_rank = {r: ref for ref, r in self._refs.items()}
        return [bytes(x) for x in ray.get([by_rank[r] for r in range(self.job.nodes)], timeout=timeout_s)]

    # ---- stop

    def stop(self, fast: bool) -> None:
        """Take our agents away. Of a Ray that we started nothing is left; `fast` (the process ends next) leaves that to the sweep."""
        ray = sys.modules.get("ray")
        try:
            if ray is None or not ray.is_initialized():
                return
            agents, self._agents, self._refs = self._agents, [], {}
            if self.started_ray:
                if not fast:
                    del agents
                    ray.shutdown()
                return
            while agents:
                ray.kill(agents.pop(), no_restart=True)
            if self._group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self._group)
                self._group = None
            if not self.was_initialized:
                ray.shutdown()
        finally:
            self._restore_env(fast)

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


def _reread_settings() -> None:
    """Ray reads its environment variables once, when it is loaded; have it do so again."""
    import ray._raylet as raylet

    config, tokens = getattr(raylet, "Config", None), getattr(raylet, "AuthenticationTokenLoader", None)
    if config is not None and tokens is not None:
        config.initialize("")
        tokens.instance().reset_cache()


def check_memory(nodes: int) -> None:
    """Refuse more local workers than this machine's free memory can hold."""
    try:
        with open("/proc/meminfo") as f:
            free_mib = next(int(line.split()[1]) for line in f if line.startswith("MemAvailable")) >> 10
    except (OSError, StopIteration, ValueError):
        return
    if nodes * WORKER_MIB > free_mib:
        raise Infeasible(
            f"{nodes} nodes were asked for on this one machine; its {free_mib} MiB of free memory hold at most {free_mib // WORKER_MIB} workers "
            f"of at least {WORKER_MIB} MiB each. Ask for fewer nodes, or give a Ray cluster with --address"
        )
