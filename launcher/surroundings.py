"""What a host must have before Ray is started there."""

from __future__ import annotations

import os
import resource
import sys

from manygrad.errors import Infeasible

WORKER_MIB = 192  # memory that the smallest worker and its agent need
LEAST_FILES = 256  # that a process of Ray has open, and some more


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
