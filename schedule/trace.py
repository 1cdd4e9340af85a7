"""What each pass did: its name, time and change in ops (DEBUG=5), its graph (DEBUG=6), and the spec check (SPEC=1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from manygrad.tensor.environment import DEBUG, SPEC
from manygrad.tensor.uop import UOp
from manygrad.tensor.uop.show import show

_last = time.perf_counter()
observers: list = []  # functions (pass name, graph after it), for docs and tests
timers: list[
    Callable[[str, float, float, dict[str, Any]], None]
] = []  # functions (pass name, start, end, what it did), for profiles


def begin() -> float:
    """A first pass starts now."""
    global _last
    _last = time.perf_counter()
    return _last


def timed(name: str, start: float, **did: Any) -> None:
    """Tells the timers of something that started at `start` and ends now."""
    if timers:
        now = time.perf_counter()
        for tell in timers:
            tell(name, start, now, did)


def traced(name: str, after: Any, before: Any, spec: Callable[[Any, str], None]) -> Any:
    """`after`, a graph or items, checked with `spec` of the pass that made it from `before`."""
    if timers:
        timed(name, _last, **_counted(after))
    if DEBUG >= 5:
        now = time.perf_counter()
        (what, n), (m,) = next(iter(_counted(after).items())), _counted(before).values()
        print(f"pass {name:<16} {(now - _last) * 1e3:8.2f} ms  {m:5d} -> {n:5d} {what}")
    if DEBUG >= 6:
        print(show(after) if isinstance(after, UOp) else "\n".join(f"call {show(item.what)}" for item in after))
    if SPEC:
        spec(after, name)
    if isinstance(after, UOp):
        for observe in observers:
            observe(name, after)
    begin()
    return after


def _counted(made: Any) -> dict[str, int]:
    return {"ops": len(made.toposort())} if isinstance(made, UOp) else {"calls": len(made)}
