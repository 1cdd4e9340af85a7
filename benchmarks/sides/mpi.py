"""The all-reduce of Open MPI, through mpi4py: `mpirun` starts the processes, over shared memory of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

LIMIT_S = 900


def there() -> bool:
    return importlib.util.find_spec("mpi4py") is not None and shutil.which("mpirun") is not None


def measured(sizes: list[int], most: int, timed: Callable[..., Any], repeats_for: Callable[..., Any]) -> list[Any]:
    """On each process: the times of all ranks, per rank and size."""
    import numpy as np
    from mpi4py import MPI

    world, out = MPI.COMM_WORLD, []
    for nbytes in sizes:
        x = np.zeros(nbytes // 4, np.float32)
        y = np.empty_like(x)
        first = timed(lambda: world.Allreduce(x, y), world.Barrier, 3)  # noqa: B023
        repeats = repeats_for(world.allreduce(max(first), MPI.MAX), most)
        out.append(timed(lambda: world.Allreduce(x, y), world.Barrier, repeats))  # noqa: B023
    return list(world.allgather(out))


def run(benchmark: str, sizes: list[int], most: int, size: int) -> list[list[list[float]]]:
    """Per rank, per size, the times. Where each process has a core of its own it keeps it, which is fastest."""
    enough = size <= (os.cpu_count() or 1)
    command = ["mpirun", "-n", str(size), *(["--bind-to", "core"] if enough else ["--oversubscribe"])]
    command += [sys.executable, benchmark, "--side", "mpi", json.dumps([sizes, most]), "0"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env={**os.environ, **root}, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"mpirun ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    ranks: list[list[list[float]]] = json.loads(done.stdout)
    return ranks
