"""`detect_anomaly`: a block of a program in which each kernel's results are looked at."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from manygrad.tensor.environment import Context, overridden

NAN, INFINITY = 1, 2  # DETECT_ANOMALY: the first, or both
# what `set_detect_anomaly` found of the knobs that it sets; None: it has set nothing
_found: ContextVar[dict[str, Any] | None] = ContextVar("before set_detect_anomaly", default=None)


def _knobs(check_nan: bool, check_infinity: bool) -> dict[str, int]:
    return {"DETECT_ANOMALY": (INFINITY if check_infinity else NAN) if check_nan else 0, "JIT": 0, "FOLLOW": 0}


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
        super().__init__(**_knobs(check_nan, check_infinity))

    def _recreate_cm(self) -> detect_anomaly:
        return detect_anomaly(self.check_nan, self.check_infinity)


class set_detect_anomaly:
    """`detect_anomaly` from here on (`mode` True), or no longer, in this thread; after a `with` as it was before, as
    torch.autograd.set_detect_anomaly."""

    def __init__(self, mode: bool, check_nan: bool = True, check_infinity: bool = True):
        self.before = overridden.get(), _found.get()
        knobs = _knobs(check_nan, check_infinity)
        now, found = dict(overridden.get() or {}), _found.get()
        if found is None:
            found = {k: now[k] for k in knobs if k in now}
        rest = {k: v for k, v in now.items() if k not in knobs}
        overridden.set({**rest, **(knobs if mode else found)} or None)
        _found.set(found if mode else None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        values, found = self.before
        overridden.set(values)
        _found.set(found)


__all__ = ["detect_anomaly", "set_detect_anomaly"]
