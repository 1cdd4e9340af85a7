"""Places for ranks: what a node needs of a Ray cluster, whether that is there, and where each rank has come to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manygrad.errors import Infeasible

from .job import Job


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


def needs(job: Job) -> dict[str, int]:
    """Ray's resources that each node takes."""
    return {"CPU": 1, **({"GPU": job.devices_per_node} if job.device == "CUDA" else {})}


def has(node: dict[str, Any], kind: str) -> int:
    """How many of a resource a host of the cluster has in all."""
    return int(node["Resources"].get(kind, 0))


def check_fits(job: Job, hosts: list[dict[str, Any]]) -> None:
    """Refuse what can never be placed, and say what is there. Raises `Infeasible`."""

    def there(kind: str) -> tuple[int, str]:
        each = [f"{h['NodeManagerHostname']} ({has(h, kind)} {kind}s)" for h in hosts]
        return sum(has(h, kind) for h in hosts), ", ".join(each)

    cpus, shown = there("CPU")
    if cpus < job.nodes:
        raise Infeasible(
            f"{job.nodes} nodes were asked for, each needs one CPU; "
            f"the Ray cluster has {len(hosts)} host{'s' * (len(hosts) != 1)} with {cpus} CPUs in all: {shown}. "
            f"Ask for at most {cpus} nodes, or add hosts with `ray start --address=...`"
        )
    each, (gpus, shown) = needs(job).get("GPU", 0), there("GPU")
    if job.nodes * each > gpus:
        raise Infeasible(
            f"--device CUDA: {job.nodes} nodes with {each} GPUs each need {job.nodes * each}; the Ray "
            f"cluster has {gpus}: {shown}. Ask for fewer, or start hosts with `ray start --num-gpus=...`"
        )
