"""`check_replicas`: whether all ranks hold the same bits where they hold copies.

A bit that memory or a chip has turned over, a seed that one rank forgot, a kernel that is wrong on one host: ranks go
on with numbers of their own, and nothing else says so.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from manygrad.checkpoint.memory import is_shared
from manygrad.checkpoint.tree import flatten
from manygrad.errors import ReplicasDiffer
from manygrad.runtime.agreement.agreement import digest, values_may_differ
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.storage import storage
from manygrad.tensor.engine import engine
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops


def check_replicas(state: Any, step: int | None = None) -> None:
    """Raises `ReplicasDiffer` on every rank unless all copies of each tensor of `state` have the same bits; every rank
    must call it.

    `state`: what `checkpoint.save` takes. A tensor on a worker's own device, and an array, is taken to be the same on
    all workers, but where a DiLoCo is in the state, whose workers go ways of their own between outer steps: then only
    what lies on devices of all of them is compared. What is cut over devices has no copies, and is not looked at. The
    error names the first tensor that differs, and who has other bits than most. No launcher is asked. Cost: a pass over
    the copies in memory, and a gather of 8 bytes a device; once they differ, of 8 bytes a tensor and device.
    """
    names, own = [], []
    for name, t, parts in _copies(state):
        found = {device: _hash(part) for device, part in parts.items()}
        if current().world.size == 1 and len(set(found.values())) > 1:
            _raise(step, name, t, _odd(list(found), list(found.values())), 0)
        names.append((name, t))
        own.append(_hash(*found.values()) if len(set(found.values())) > 1 else next(iter(found.values())))
    if current().world.size == 1:
        return
    whole = _hash(*(np.int64(x) for x in own))
    if len(set(_gathered([whole])[:, 0].tolist())) == 1:
        return
    table = _gathered(own)
    differing = [i for i in range(len(names)) if len(set(table[:, i].tolist())) > 1]
    ranks = [f"rank {r}" for r in range(len(table))]
    name, t = names[differing[0]]
    _raise(step, name, t, _odd(ranks, table[:, differing[0]].tolist()), len(differing) - 1)


def _raise(step: int | None, name: str, t: Tensor | np.ndarray, who: str, more: int) -> None:
    at = "" if step is None else f"after step {step}: "
    rest = f", and so do those of {more} more tensors" if more else ""
    kind = t.dtype.name if isinstance(t, Tensor) else str(t.dtype)
    raise ReplicasDiffer(
        f"{at}the copies of {name!r} ({kind} {tuple(t.shape)}) differ: {who}{rest}. A rank drew numbers of its own "
        "(seed all alike), or its memory or chip is at fault: go back to a checkpoint, and leave that host out"
    )


def _odd(who: Sequence[str], digests: Sequence[int]) -> str:
    """Those whose digest is not that of most."""
    (most, count), *_ = Counter(digests).most_common()
    if 2 * count <= len(digests):
        return f"{' and '.join(who)} have other bits each" if len(set(digests)) == len(digests) else (
            f"no bits are those of most of {', '.join(who)}"
        )  # fmt: skip
    odd = [w for w, d in zip(who, digests) if d != most]
    return f"{', '.join(odd)} {'has' if len(odd) == 1 else 'have'} other bits than the {count} others"


def _copies(state: Any) -> list[tuple[str, Tensor | np.ndarray, dict[str, Buffer | np.ndarray]]]:
    """(name, tensor, this worker's copies of it by device) of all that every worker has a copy of."""
    world = current().world
    flat = flatten(state)
    tensors = {name: t for name, t in flat.tensors.items() if not flat.differs_by_rank or is_shared(t)}
    held = {}
    for name, t in tensors.items():
        if isinstance(t, np.ndarray) or not t.numel() or not _is_copied(t):
            continue
        held[name] = t if t.uop.op is Ops.BUFFER else t.detach().clone()
    lazy = [t for name, t in held.items() if t is not tensors[name]]
    if lazy:
        lazy[0].realize(*lazy[1:])
    out: list[tuple[str, Tensor | np.ndarray, dict[str, Buffer | np.ndarray]]] = []
    for name, t in tensors.items():
        if isinstance(t, np.ndarray):
            out.append((name, t, {world.local_devices[0]: t}))
        elif name in held:
            found, devices = storage(held[name].uop), t.device
            parts = [found] if isinstance(found, Buffer) else found
            on = (devices,) if isinstance(devices, str) else devices
            out.append((name, t, {d: b for d, b in zip(on, parts) if b is not None}))
    return out


def _is_copied(t: Tensor) -> bool:
    """Whether every worker has all of a tensor."""
    world = current().world
    if isinstance(t.device, str):
        return "@" not in t.device
    ranks = {world.rank_of(d) for d in t.device}
    return engine().sharding_axis(t.uop) is None and len(ranks) == world.size


def _hash(*parts: Buffer | np.ndarray | np.int64 | int) -> int:
    whole = hashlib.blake2b(digest_size=8)
    for p in parts:
        whole.update(digest(p).encode() if isinstance(p, Buffer) else np.ascontiguousarray(p).tobytes())
    return int.from_bytes(whole.digest(), "little", signed=True)


def _gathered(own: list[int]) -> np.ndarray:
    """(ranks, len(own)): what each rank has given; every rank must call it."""
    world = current().world
    with values_may_differ():
        rows = Tensor(np.tile(np.array(own, np.int64), (len(world.devices), 1)))
        return rows.shard(world.devices, axis=0).numpy()[:: world.devices_per_node]
