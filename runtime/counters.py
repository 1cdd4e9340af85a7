"""GlobalCounters: what this process has run so far. Estimates of flops and bytes, not hardware counts."""

from __future__ import annotations


class GlobalCounters:
    """`global_ops` flops, `global_mem` bytes touched by kernels, `mem_used` bytes held by buffers now, `net_bytes` sent
    to other workers, `net_time_s` seconds in which collectives ran, and `net_wait_s` those of them in which nothing was
    computed meanwhile, `time_sum_s` only where kernels are timed (DEBUG=2), `steps` calls of a TinyJit and `updates`
    steps of an optimiser outside of a replay (not reset)."""

    kernel_count = 0
    global_ops = 0
    global_mem = 0
    mem_used = 0
    net_bytes = 0
    net_time_s = 0.0
    net_wait_s = 0.0
    time_sum_s = 0.0
    steps = 0
    updates = 0

    @staticmethod
    def reset() -> None:
        """All counters but `mem_used` start again at 0."""
        c = GlobalCounters
        c.kernel_count = c.global_ops = c.global_mem = c.net_bytes = 0
        c.time_sum_s = c.net_time_s = c.net_wait_s = 0.0


def steps_taken() -> int:
    """What failure reports call the step."""
    return max(GlobalCounters.steps, GlobalCounters.updates)
