"""One process that enters epochs, one after another: `python epoch_worker.py FOLDER STEPS`, a test's other half.

STEPS is a list of (epoch, rank, size) as JSON. Cards are exchanged through files in FOLDER. What it found is written
there as JSON when all is done.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit, function, world
from manygrad.collectives.transport import Endpoint
from manygrad.errors import LostValue, NoRank
from manygrad.multi.world import Membership
from manygrad.runtime.current import current
from manygrad.runtime.devices import get_device
from manygrad.runtime.exchange.communication import Hooks

DEADLINE_S = 60.0
HOOKS = Hooks(lambda *plan: lambda: None, lambda *values: None)
ROWS, COUNT = 2, 5000  # of a worker's shard


def write(path: Path, value: Any) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(value))
    part.rename(path)


def meet(folder: Path, name: str, rank: int, size: int, value: Any) -> list[Any]:
    """What all say under a name, in rank order."""
    write(folder / f"{name}.{rank}.json", value)
    until, paths = time.monotonic() + DEADLINE_S, [folder / f"{name}.{r}.json" for r in range(size)]
    while not all(p.exists() for p in paths):
        if time.monotonic() > until:
            raise TimeoutError(f"rank {rank} waited {DEADLINE_S:g} s for {[p.name for p in paths if not p.exists()]}")
        time.sleep(0.005)
    return [json.loads(p.read_text()) for p in paths]


def enter(folder: Path, member: Membership) -> Endpoint:
    endpoint = Endpoint(member.rank, member.size, member.job, member.epoch, arena_bytes=1 << 27)
    endpoint.connect(meet(folder, f"cards{member.epoch}", member.rank, member.size, endpoint.card()), DEADLINE_S)
    current().enter(member, endpoint, HOOKS)
    return endpoint


def rows() -> np.ndarray[Any, Any]:
    return np.random.default_rng(world.size).standard_normal((ROWS * world.size, COUNT)).astype(np.float32)


def kernels() -> int:
    """Loaded in this process."""
    return len(get_device("CPU").kernels.kernels)


def held() -> dict[str, int]:
    """Threads of ours, descriptors, and mappings of shared memory of this process."""
    return {
        "threads": len([t for t in threading.enumerate() if t.name.startswith("manygrad-")]),
        "fds": len(os.listdir("/proc/self/fd")),
        "arenas": Path("/proc/self/maps").read_text().count("memfd:manygrad-arena"),
    }


def error_of(use: Any) -> str:
    try:
        use()
    except (LostValue, NoRank) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def main(folder: Path, steps: list[tuple[int, int, int]]) -> dict[str, Any]:
    own = Tensor(np.arange(8, dtype=np.float32)).realize()
    step = TinyJit(lambda x: (x * 2 + 1).sum(0).realize())
    traced = function(lambda x: (x * 2).sum(0))
    (own * 3 + 1).numpy()
    Tensor.randn(2).numpy()  # (the generator's state is a tensor, which is kept)
    before, out, old = held(), [], list[Tensor]()
    for epoch, rank, size in steps:
        endpoint = weakref.ref(enter(folder, Membership(rank, size, rank, size, job="test", epoch=epoch)))
        started = kernels()
        errors = [error_of(t.numpy) for t in old]
        x = Tensor(rows()).shard(world.devices, 0).realize()
        lazy, replicated = x * 2, x.sum(0)
        sums = replicated.numpy()
        jitted = [step(x).numpy().tobytes() == (x * 2 + 1).sum(0).numpy().tobytes() for _ in range(4)]
        is_traced = np.allclose(traced(x).numpy(), 2 * sums, atol=1e-4)
        drawn = Tensor.randn(ROWS * size, 4).realize().shard(world.devices, 0).sum(0).numpy().tolist()
        in_arena = (own + own).realize()
        local = (own * 3 + 1).numpy().tolist()
        shown = [world.rank, world.size, world.epoch, world.membership.rank]
        meet(folder, f"done{epoch}", rank, size, True)
        left = [current().leave(), current().leave()]
        old = [x, lazy, replicated, lazy.sum().to("CPU")]
        errors += [error_of(t.numpy) for t in old]
        refused = error_of(lambda: Tensor(rows()).shard(world.devices, 0).sum(0).numpy())
        kept, between = in_arena.numpy().tolist(), held()
        del in_arena, x, lazy, replicated
        gc.collect()
        out.append(
            {
                "sums": sums.tobytes().hex(),
                "right": bool(np.allclose(sums, rows().sum(0), atol=1e-4)),
                "jitted": [*jitted, is_traced],
                "drawn": drawn,
                "new kernels": kernels() - started,
                "local": local,
                "shown": shown,
                "left": left,
                "errors": errors,
                "refused": refused,
                "kept": kept,
                "arenas held by a tensor": between["arenas"],
                "held": held(),
                "endpoint lives": endpoint() is not None,
            }
        )
    return {"before": before, "epochs": out}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write(place / f"result.{sys.argv[3]}.json", main(place, json.loads(sys.argv[2])))
