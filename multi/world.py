"""Who this worker is: rank, size and the global device names.

`manygrad.world` is that of the process's own Runtime (`runtime/runtime.py`), one object for the whole life of the
process, which shows the Membership of the epoch it is in. A plain process is a world of one; the launcher has it enter
epoch 0 before the user's script starts. Global device names carry the node: `CPU:0@2` is CPU 0 of node 2; without `@` a
name means this node's own device.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from manygrad.tensor.engine import engine


class Link(NamedTuple):
    """The slowest connection between workers; all workers have the same figures."""

    route: str  # "shm" or "zmq"
    bytes_per_s: float = 0.0  # each way, as measured over zmq
    latency_s: float = 0.0  # of a short message, likewise
    group: int = 1  # so many neighbours in rank order reach each other over shared memory, and the others over zmq
    piece_nbytes: int = 0  # collectives are cut in messages of so many bytes; 0: they are not


@dataclass(frozen=True)
class Membership:
    """What one worker is in one epoch of a job: `rank` of `size` workers, `local_rank` of the `local_size` on its host.
    Raises `ValueError` for what no worker can be."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    devices_per_node: int = 1
    job: str = "local"
    epoch: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is outside 0..{self.size - 1}")
        if self.devices_per_node < 1:
            raise ValueError(f"devices_per_node must be at least 1, got {self.devices_per_node}")

    def __str__(self) -> str:
        return f"epoch {self.epoch} of job {self.job!r}, as rank {self.rank} of {self.size}"


class World:
    """`rank` of `size` workers, each with `devices_per_node` devices of kind `device_kind`.

    `devices` are the global names in rank order, the tuple to `shard` over; `local_devices` are this worker's own.
    `link`: the slowest one between two workers, where there are several. What a Membership says is an attribute here,
    too.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    devices_per_node: int
    job: str
    epoch: int

    def __init__(self, membership: Membership | None = None, device_kind: str | None = None) -> None:
        self.device_kind = device_kind or os.environ.get("DEVICE", "CPU").split(":")[0].upper()
        self.show(membership or Membership())

    def show(self, membership: Membership, link: Link | None = None) -> None:
        """From now on this is the world of another epoch."""
        self.membership, self.link = membership, link
        vars(self).update(vars(membership))

    def node_devices(self, rank: int) -> tuple[str, ...]:
        names = tuple(f"{self.device_kind}:{i}" for i in range(self.devices_per_node))
        return names if self.size == 1 else tuple(f"{n}@{rank}" for n in names)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(d for r in range(self.size) for d in self.node_devices(r))

    @property
    def local_devices(self) -> tuple[str, ...]:
        return self.node_devices(self.rank)

    def group(self, count: int) -> tuple[str, ...]:
        """The devices of this worker's group, of `count` groups of neighbouring workers: to shard over where each group
        has a replica of a model and values of its own, which the others do not build. Raises `ValueError` where the
        groups would not be of one size."""
        if not isinstance(count, int):
            raise TypeError(f"group takes how many groups there are, not who is in one: group(2), not {count!r}")
        if count < 1 or self.size % count:
            raise ValueError(f"{self.size} workers do not make {count} groups of one size")
        members = self.size // count
        first = self.rank - self.rank % members
        return tuple(d for r in range(first, first + members) for d in self.node_devices(r))

    def is_local(self, device: str) -> bool:
        """Whether `device` (local or global name) belongs to this worker."""
        return self.rank_of(device) == self.rank

    def rank_of(self, device: str) -> int:
        return rank_of(device, self.rank)

    def __reduce__(self) -> Any:
        """`manygrad.world` in a function sent to workers (`manygrad.launch`) is the worker's own there,
        not a copy of this one."""
        return (own, ()) if self is own() else super().__reduce__()

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, size={self.size}, "
            f"devices={self.devices if self.size <= 4 else f'{len(self.devices)} devices'})"
        )


def rank_of(device: str, own: int) -> int:
    """Rank of the worker that owns `device`, as the worker `own` names it."""
    _, _, node = device.partition("@")
    return int(node) if node else own


_OF_A_RANK = re.compile(r"(?!DISK:).*@\d+")


def is_of_a_rank(device: str | tuple[str, ...] | None) -> bool:
    """Whether a worker is named by its rank: such a name means another one in another epoch."""
    names = (device,) if isinstance(device, str) else device or ()
    return any(_OF_A_RANK.fullmatch(d) for d in names)


def own() -> World:
    """The one of this process, as its engine has it."""
    found = engine().world()
    assert isinstance(found, World)
    return found
