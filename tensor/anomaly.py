"""`detect_anomaly`: a block of a program in which each kernel's results are looked at."""

from __future__ import annotations

from manygrad.tensor.environment import Context

NAN, INFINITY = 1, 2  # DETECT_ANOMALY: the first, or both


class detect_anomaly(Context):
    """AnomalyError names the first kernel inside that makes NaN, or infinity from finite numbers: the op and what it
    was applied to, and the user's line. Also a decorator.

    Infinity is left alone where a kernel has it as a constant (a mask) or reads it. `check_nan` False looks at nothing,
    as torch.autograd.detect_anomaly. Calls are made one by one: a TinyJit calls its function, and no call is put off.
    What is computed after the block is not looked at, so read the loss inside. Cost: some times that of the step, as
    each kernel's arguments are copied before it runs.
    """

    def __init__(self, check_nan: bool = True, check_infinity: bool = True):
        self.check_nan, self.check_infinity = check_nan, check_infinity
        level = (INFINITY if check_infinity else NAN) if check_nan else 0
        super().__init__(DETECT_ANOMALY=level, JIT=0, FOLLOW=0)

    def _recreate_cm(self) -> detect_anomaly:
        return detect_anomaly(self.check_nan, self.check_infinity)


__all__ = ["detect_anomaly"]
