"""Counts of what this process has run so far. Estimates of flops and bytes, not hardware counts.

They stand in memory of their own, so that a native replay adds to them without Python (`native/additions.py`).
"""

from __future__ import annotations

import ctypes
import sys

from manygrad.tensor.environment import LAST_STEP

_INT, _FLOAT = ctypes.c_int64, ctypes.c_double


class Counters(ctypes.Structure):
    """`global_ops` flops, `global_mem` bytes touched by kernels, `mem_used` bytes held by buffers now, `net_bytes` sent
    to other workers, `net_time_s` seconds in which collectives ran, and `net_wait_s` those of them in which nothing was
    computed meanwhile, `time_sum_s` only where kernels are timed (DEBUG=2), `steps` calls of a TinyJit and `updates`
    steps of an optimiser outside of a replay (not reset)."""

    _fields_ = [
        *((name, _INT) for name in ("kernel_count", "mem_used", "net_bytes", "steps", "updates")),
        # (in floats: 64 bits of an integer last a fast processor for three hours)
        *((name, _FLOAT) for name in ("ops", "mem", "net_time_s", "net_wait_s", "time_sum_s")),
    ]
    kernel_count: int
    mem_used: int
    net_bytes: int
    steps: int
    updates: int
    ops: float
    mem: float
    net_time_s: float
    net_wait_s: float
    time_sum_s: float

    @property
    def global_ops(self) -> int:
        return int(self.ops)

    @property
    def global_mem(self) -> int:
        return int(self.mem)

    def reset(self) -> None:
        """All counters but `mem_used`, `steps` and `updates` start again at 0."""
        self.kernel_count = self.net_bytes = 0
        self.ops = self.mem = self.time_sum_s = self.net_time_s = self.net_wait_s = 0.0


GlobalCounters = Counters()


def end_after_last_step() -> None:
    """Ends the program in place of the step after LAST_STEP."""
    if LAST_STEP and steps_taken() >= LAST_STEP.value:
        print(f"manygrad: {steps_taken()} steps are done, the last ones (LAST_STEP)", file=sys.stderr)
        raise SystemExit(0)


def steps_taken() -> int:
    """Number that failure reports give for the step."""
    return max(GlobalCounters.steps, GlobalCounters.updates)
