"""Training steps of any side, on the batches of `data.py` in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from sides.data import batch

BATCHES = 8  # different ones
Run = Callable[[np.ndarray, np.ndarray], float]


def seconds_of(run: Run, model: str, steps: Iterable[int]) -> list[float]:
    """How long each of these steps takes; making its batch does not count."""
    times = []
    for step in steps:
        data = batch(model, step % BATCHES)
        start = time.perf_counter()
        run(*data)
        times.append(time.perf_counter() - start)
    return times
