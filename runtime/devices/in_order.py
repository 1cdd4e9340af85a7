"""The plainest queue: kernels are called one after the other, from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.runtime.devices.base import Call, Queue


class CallsInOrder:
    """A Graph of any kind of kernel."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = [(kernel, list(handles), numbers) for kernel, handles, numbers in calls]

    def __call__(self, timed: bool = False) -> list[float] | None:
        stamps = [time.perf_counter()]
        for kernel, handles, numbers in self.calls:
            kernel(handles, numbers.values, wait=timed)
            stamps.append(time.perf_counter())
        return stamps if timed else None

    def wake(self) -> None:
        pass

    def native_call(self) -> None:
        return None

    def mover(self, handle: Any) -> Callable[[Any], None] | None:
        return None


IN_ORDER = Queue(CallsInOrder)
