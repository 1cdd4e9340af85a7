"""The table of a graph: jobs of the team that one native call runs, one after the other (`ir/graph.ll`)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

CLOCKS = {"linux": 1, "darwin": 8}  # CLOCK_MONOTONIC, CLOCK_UPTIME_RAW: the clock of time.perf_counter


def clock() -> int:
    return CLOCKS.get(sys.platform, 1)


class KernelCall(NamedTuple):
    """Addresses of a kernel's function, its array of pointers and that of its variables (0: none); its loop."""

    function: int
    buffers: int
    variables: int
    total: int
    grain: int


def graph_table(jobs: Sequence[KernelCall]) -> Any:
    return (ctypes.c_int64 * (len(KernelCall._fields) * len(jobs) or 1))(*[x for job in jobs for x in job])


def room_for_stamps(jobs: int) -> Any:
    """Memory for the times before each call and after the last."""
    return (ctypes.c_int64 * (2 * jobs + 2))()


def seconds(stamps: Any) -> list[float]:
    """Times that were noted, in seconds of `time.perf_counter`."""
    return [stamps[i] + stamps[i + 1] * 1e-9 for i in range(0, len(stamps), 2)]
