"""Sides that take turns in one process, so that neither runs beside the other one's threads."""

import statistics
import time
from collections.abc import Callable

Run = Callable[[], object]

# idle threads of OpenBLAS spin for 30 ms, those of libgomp for about 1 ms: they would take a core from the next side
PAUSE_S = 0.04
AWAKE_S = 0.02  # of runs that do not count, until the system has spread a side's threads over the cores
IN_A_ROW = 5


def samples(runs: list[Run], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[list[float]]:
    """Seconds of `repeats` runs of each. The sides alternate: a pause in which the other side's threads go to sleep,
    runs that do not count, then a few in a row.
    """
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        for _ in range(2):
            run()
    while len(times[-1]) < repeats:
        for run, into in zip(runs, times):
            if len(runs) > 1:
                time.sleep(PAUSE_S)
                awake = time.perf_counter() + AWAKE_S
                while time.perf_counter() < awake:
                    run()
            for _ in range(min(IN_A_ROW, repeats - len(into))):
                began = clock()
                run()
                into.append(clock() - began)
    return times


def measure(runs: list[Run], repeats: int) -> list[float]:
    """The median of each."""
    return [statistics.median(t) for t in samples(runs, repeats)]
