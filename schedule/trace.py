"""What each pass did: its name, time and change in ops (DEBUG=5), its graph (DEBUG=6), and the spec check (SPEC=1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from manygrad.tensor.environment import DEBUG, SPEC
from manygrad.tensor.uop import UOp
from manygrad.tensor.uop.show import show
from manygrad.tensor.uop.spec import verify

_last = time.perf_counter()
observers: list = []  # functions (pass name, graph after it), for docs and tests
timers: list[Callable[[str, float, float, dict[str, Any]], None]] = []  # functions (pass name, start, end, what it did), for profiles


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


def traced(name: str, after: UOp, before: UOp) -> UOp:
    """`after`, checked against the spec of the pass that made it."""
    if timers:
        timed(name, _last, ops=len(after.toposort()))
    if DEBUG >= 5:
        now = time.perf_counter()
        print(f"pass {name:<16} {(now - _last) * 1e3:8.2f} ms  {len(before.toposort()):5d} -> {len(after.toposort()):5d} ops")
    if DEBUG >= 6:
        print(show(after))
    if SPEC:
        verify(after, name)
    for observe in observers:
        observe(name, after)
    begin()
    return after
