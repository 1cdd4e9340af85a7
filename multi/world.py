"""Who this worker is: rank, size and the global device names.

`manygrad.world` is that of the process's own Runtime (`runtime/runtime.py`). A plain process is a world of one; the
launcher replaces the fields by `world.join(...)` before the user's script starts. Global device names carry the node:
`CPU:0@2` is CPU 0 of node 2; without `@` a name means this node's own device.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from manygrad.tensor.engine import engine


class Link(NamedTuple):
    """The slowest connection between workers; all workers have the same figures."""

    route: str  # "shm" or "zmq"
    bytes_per_s: float = 0.0  # each way, as measured over zmq
    latency_s: float = 0.0  # of a short message, likewise
    group: int = 1  # so many neighbours in rank order reach each other over shared memory, and the others over zmq
    piece_nbytes: int = 0  # collectives are cut in messages of so many bytes; 0: they are not


class World:
    """`rank` of `size` workers, each with `devices_per_node` devices of kind `device_kind`.

    `devices` are the global names in rank order, the tuple to `shard` over; `local_devices` are this worker's own.
    `link`: the slowest one between two workers, where there are several.
    """

    def __init__(self) -> None:
        self.rank, self.size, self.local_rank, self.local_size = 0, 1, 0, 1
        self.devices_per_node = 1
        self.device_kind = os.environ.get("DEVICE", "CPU").split(":")[0].upper()
        self.job, self.epoch = "local", 0
        self.link: Link | None = None

    def join(
        self, *, rank: int, size: int, local_rank: int, local_size: int, devices_per_node: int, job: str, epoch: int
    ) -> None:
        """Become worker `rank` of `size`; called once by the launcher's worker."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is outside 0..{size - 1}")
        if devices_per_node < 1:
            raise ValueError(f"devices_per_node must be at least 1, got {devices_per_node}")
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self.devices_per_node, self.job, self.epoch = devices_per_node, job, epoch

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


def own() -> World:
    """The one of this process, as its engine has it."""
    found = engine().world()
    assert isinstance(found, World)
    return found
