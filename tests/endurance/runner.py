"""Loops that run for long: nothing of the runtime's own grows with their steps, and they give what they give where each
call is made at once.

    python -m tests.endurance                               # all idioms, 300 steps each
    python -m tests.endurance --steps 10000 power_iteration

An idiom (`training.py`, `values.py`, `sources.py`) is run twice: for its values under FOLLOW=0, then plain, and counted
after one, three and five fifths of its steps. Where something has grown in both parts it goes on for as many steps
again: a cache that fills up does not grow in all of them. `test_endurance.py` has the short form.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from manygrad import Context, GlobalCounters, Tensor
from manygrad.runtime.devices.compile.compiled import Compiled
from manygrad.tensor.deferred.trace import THREAD, begin
from manygrad.tensor.deferred.tree import TraceTree
from manygrad.tensor.storage import LIVE
from manygrad.tensor.uop.uop import UOp
from tests.endurance import metrics, sources, training, values  # noqa: F401  (which register idioms)
from tests.endurance.idiom import IDIOMS, Idiom

SHORT, STEPS = 60, 300  # of the test suite, and of the tool
COMPARED = 20  # steps whose values are compared with those of FOLLOW=0
EACH = 40  # objects that a tensor which the program keeps may consist of
NOISE = {"tensors": 1, "objects": 16, "nodes": 4, "device bytes": 1 << 12, "traced": 4, "kernels": 1}
OFTEN = 0.1  # what is made in each tenth step and stays is a leak, however little it is


@dataclass
class Counts:
    """What there is at one moment of a loop. `traced`: values and tensors from before of this thread's trace."""

    step: int
    flat: dict[str, int]  # what must not grow
    kinds: Counter[str]  # of the objects, by class
    resident: int  # bytes of this process
    took_s: float  # processor time since the start

    @staticmethod
    def now(step: int, kernels: int, took_s: float) -> Counts:
        gc.collect()
        kinds = Counter(type(o).__name__ for o in gc.get_objects())
        trace = THREAD.trace
        flat = {
            "tensors": len(LIVE),
            "objects": sum(kinds.values()),
            "nodes": kinds[UOp.__name__],
            "device bytes": GlobalCounters.mem_used,
            "traced": len(trace.values) + len(trace.external.tensors) + len(trace.put_off),
            "kernels": kernels,
        }
        with open("/proc/self/statm") as f:
            resident = int(f.read().split()[1]) * 4096
        return Counts(step, flat, kinds, resident, took_s)


@contextmanager
def counted_kernels() -> Iterator[list[str]]:
    """The names of kernels that are made inside."""
    made: list[str] = []
    finish = Compiled.finish

    def counted(self: Any, prepared: Any, ast: UOp) -> Any:
        made.append(prepared.name)
        return finish(self, prepared, ast)

    Compiled.finish = counted  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Compiled.finish = finish  # type: ignore[method-assign]


def run(idiom: Idiom, steps: int, how: AbstractContextManager[Any], counted: bool) -> tuple[list[Any], list[Counts]]:
    """(what the loop showed in its first steps, counts if they are wanted)"""
    Tensor.manual_seed(0)
    Tensor.training = None
    begin(TraceTree())
    shown: list[Any] = []
    found: list[Counts] = []
    marks = (steps // 5, 3 * steps // 5, steps, 2 * steps) if counted else (steps,)
    took_s = 0.0
    with counted_kernels() as kernels, how, closing(idiom.loop()) as loop:  # type: ignore[type-var]
        for i in range(1, marks[-1] + 1):
            since = time.process_time()
            value = next(loop)
            took_s += time.process_time() - since
            if i <= COMPARED:
                shown.append(value)
            if counted and i in marks:
                found.append(Counts.now(i, len(kernels), took_s))
            if i >= steps and i in marks and not (counted and grown(idiom, *found)):
                break
    begin(TraceTree())
    return shown, found


def grown(idiom: Idiom, *counts: Counts) -> list[str]:
    """What has grown from each of these to the next, in words, but for what the program keeps."""
    told = []
    for what, noise in NOISE.items():
        for a, b in pairwise(counts):
            steps = b.step - a.step
            kept = idiom.keeps * steps * {"tensors": 1, "device bytes": 4096}.get(what, EACH)
            if b.flat[what] - a.flat[what] - kept <= max(noise, steps * OFTEN):
                break
        else:
            told.append(f"{what} " + " -> ".join(str(c.flat[what]) for c in counts))
    if told:
        most = (counts[-1].kinds - counts[-2].kinds).most_common(8)
        steps = counts[-1].step - counts[-2].step
        told.append("(" + ", ".join(f"{n} {kind}" for kind, n in most) + f" more in the last {steps} steps)")
    return told


def same(a: Any, b: Any, rounds: bool) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, rounds) for x, y in zip(a, b))
    if isinstance(a, (float, np.ndarray, np.floating)):
        return np.allclose(a, b, 1e-5, 1e-6) if rounds else np.array_equal(a, b, equal_nan=True)
    return bool(a == b)


def check(idiom: Idiom, steps: int) -> tuple[list[str], list[Counts]]:
    """(what is wrong with an idiom, counts of its steps)"""
    wanted, _ = run(idiom, min(COMPARED, steps), Context(FOLLOW=0), counted=False)
    got, counts = run(idiom, steps, nullcontext(), counted=True)
    wrong = grown(idiom, *counts)
    for i, (a, b) in enumerate(zip(got, wanted)):
        if not same(a, b, idiom.rounds):
            wrong.append(f"step {i} gives {a!r} and under FOLLOW=0 {b!r}")
            break
    return wrong, counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description="Loops in which nothing may grow.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of: {', '.join(IDIOMS)} (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each loop (default {STEPS})")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(IDIOMS):
        parser.error(f"no idiom {sorted(unknown)[0]!r}")
    failed = 0
    print(f"{'idiom':40}" + "".join(f"{what:>18}" for what in (*NOISE, "MB", "ms a step")))
    for name in options.names or IDIOMS:
        try:
            wrong, (first, *_, last) = check(IDIOMS[name], options.steps)
        except Exception:
            failed += 1
            print(f"{name}: failed")
            traceback.print_exc()
            continue
        columns = [f"{n} {last.flat[what] - n:+}" for what, n in first.flat.items()]
        late_ms = 1e3 * (last.took_s - first.took_s) / (last.step - first.step)
        columns += [
            f"{(last.resident - first.resident) / 1e6:+.1f}",
            f"{1e3 * first.took_s / first.step:.2f} {late_ms:.2f}",
        ]
        print(f"{name:40}" + "".join(f"{x:>18}" for x in columns), flush=True)
        for line in wrong:
            print(f"    {line}", flush=True)
        failed += bool(wrong)
    print(f"{failed} of {len(options.names or IDIOMS)} failed")
    return int(failed > 0)
