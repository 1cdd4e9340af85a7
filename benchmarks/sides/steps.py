"""Training steps of any side, on the batches of `data.py` in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from sides.data import batch

BATCHES = 8  # different ones
Batch = tuple[np.ndarray, np.ndarray]
Run = Callable[[np.ndarray, np.ndarray], float]


def batches(model: str, steps: Iterable[int]) -> Iterator[Batch]:
    return (batch(model, step % BATCHES) for step in steps)


def seconds_of(run: Run, each: Iterable[Batch]) -> list[float]:
    """How long the step on each of these batches takes; making one does not count."""
    times = []
    for data in each:
        start = time.perf_counter()
        run(*data)
        times.append(time.perf_counter() - start)
    return times
