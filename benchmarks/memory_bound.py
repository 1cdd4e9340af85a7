"""Kernels that memory bounds: elementwise chains, reductions, softmax, norms, losses, an optimiser's step; ours and torch in one run.

    python benchmarks/memory_bound.py [--elements 20000000] [--repeats 9]

For each: the bytes that must move (every input read once, every output written once), the rate at which ours moves them as a part of the
measured rate of a copy (`of copy`; NumPy's or ours, the faster), and torch's time over ours where torch is installed (eager, and its fused AdamW). All sides are
replayed steps over the same data, repeats interleaved, medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit
from manygrad.tensor.nn.functional import cross_entropy
from manygrad.tensor.nn.optim import AdamW

Run = Callable[[], object]
COLUMNS = 1024


def programs(torch: Any, n: int) -> dict[str, tuple[float, Run, Run | None]]:
    """name -> (bytes that must move, ours, torch's)."""
    rows = max(n // COLUMNS, 4)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, COLUMNS)).astype(np.float32) for _ in range(2))
    labels = rng.integers(0, COLUMNS, rows)
    x, y, w, t = Tensor(a).realize(), Tensor(b).realize(), Tensor(np.ones(COLUMNS, np.float32)).realize(), Tensor(labels).realize()
    size = float(a.nbytes)

    def jitted(f: Callable[..., Tensor], *args: Tensor) -> Run:
        step = TinyJit(lambda: f(*args).realize())
        return step

    ours: dict[str, tuple[float, Run]] = {
        "copy": (2, jitted(lambda x: x + 0.5, x)),
        "chain": (3, jitted(lambda x, y: ((x * 2 + y).relu() - y * y) * 0.5, x, y)),
        "sum": (1, jitted(lambda x: x.sum(), x)),
        "sum dim 0": (1, jitted(lambda x: x.sum(0), x)),
        "sum dim 1": (1, jitted(lambda x: x.sum(1), x)),
        "max dim 1": (1, jitted(lambda x: x.amax(1), x)),
        "transpose": (2, jitted(lambda x: x.T.contiguous(), x)),
        "softmax": (2, jitted(lambda x: x.softmax(1), x)),
        "layer_norm": (2, jitted(lambda x: x.layer_norm(COLUMNS, w, w), x)),
        "rms_norm": (2, jitted(lambda x: x.rms_norm(COLUMNS, w), x)),
        "cross_entropy": (1, jitted(lambda x: cross_entropy(x, t), x)),
        "softmax grad": (3, _gradient(lambda x: (x.softmax(1) * y).sum(), a)),
        "layer_norm grad": (3, _gradient(lambda x: (x.layer_norm(COLUMNS, w, w) * y).sum(), a)),
        "cross_entropy grad": (2, _gradient(lambda x: cross_entropy(x, t), a)),
        "adamw": (7, _adamw(a)),
    }
    if torch is None:
        return {name: (factor * size, run, None) for name, (factor, run) in ours.items()}
    F = torch.nn.functional
    px, py, pw, pt = (torch.from_numpy(v) for v in (a, b, np.ones(COLUMNS, np.float32), labels))
    theirs: dict[str, Run] = {
        "copy": lambda: px + 0.5, "chain": lambda: ((px * 2 + py).relu() - py * py) * 0.5, "sum": lambda: px.sum(), "sum dim 0": lambda: px.sum(0),
        "sum dim 1": lambda: px.sum(1), "max dim 1": lambda: px.amax(1), "transpose": lambda: px.T.contiguous(), "softmax": lambda: px.softmax(1),
        "layer_norm": lambda: F.layer_norm(px, (COLUMNS,), pw, pw), "rms_norm": lambda: F.rms_norm(px, (COLUMNS,), pw),
        "cross_entropy": lambda: F.cross_entropy(px, pt), "softmax grad": _torch_gradient(torch, lambda x: (x.softmax(1) * py).sum(), a),
        "layer_norm grad": _torch_gradient(torch, lambda x: (F.layer_norm(x, (COLUMNS,), pw, pw) * py).sum(), a),
        "cross_entropy grad": _torch_gradient(torch, lambda x: F.cross_entropy(x, pt), a), "adamw": _torch_adamw(torch, a),
    }  # fmt: skip
    return {name: (factor * size, run, theirs[name]) for name, (factor, run) in ours.items()}


def _gradient(loss: Callable[[Tensor], Tensor], a: np.ndarray) -> Run:
    x = Tensor(a, requires_grad=True).realize()
    return TinyJit(lambda: loss(x).gradient(x)[0].realize())


def _torch_gradient(torch: Any, loss: Callable[[Any], Any], a: np.ndarray) -> Run:
    x = torch.tensor(a, requires_grad=True)
    return lambda: torch.autograd.grad(loss(x), x)


def _adamw(a: np.ndarray) -> Run:
    p, g = Tensor(a, requires_grad=True).realize(), Tensor(a * 0.1).realize()
    optimizer = AdamW([p], lr=1e-3)

    def step() -> None:
        p.grad = g
        optimizer.step()

    def traced() -> Tensor:
        with Tensor.train():
            step()
        return p

    return TinyJit(traced)


def _torch_adamw(torch: Any, a: np.ndarray) -> Run:
    p = torch.tensor(a, requires_grad=True)
    p.grad = torch.tensor(a * 0.1)
    return torch.optim.AdamW([p], lr=1e-3, fused=True).step


PAUSE_S = 0.04  # idle threads of OpenBLAS spin for 30 ms, those of libgomp for about 1 ms: they would take a core from the next side
IN_A_ROW = 3


def samples(runs: list[Run], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[list[float]]:
    """Seconds of `repeats` runs of each. The sides alternate: a pause in which the other side's threads go to sleep, a run that does not
    count, then a few in a row.
    """
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        for _ in range(2):
            run()
    while len(times[-1]) < repeats:
        for run, into in zip(runs, times):
            if len(runs) > 1:
                time.sleep(PAUSE_S)
            run()
            for _ in range(min(IN_A_ROW, repeats - len(into))):
                began = clock()
                run()
                into.append(clock() - began)
    return times


def measure(runs: list[Run], repeats: int) -> list[float]:
    """The median of each."""
    return [statistics.median(t) for t in samples(runs, repeats)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch = None
    if importlib.util.find_spec("torch") is not None:
        import torch  # type: ignore[no-redef]
    made = programs(torch, options.elements)
    source, target = np.ones(options.elements, np.float32), np.ones(options.elements, np.float32)
    print(f"{'kernel':>20} {'ms':>9} {'GB/s':>8} {'of copy':>8} {'torch/ours':>11}")
    for name, (nbytes, run, theirs) in made.items():
        copies = [lambda: np.copyto(target, source), made["copy"][1]]
        *copied, mine, other = measure([*copies, run, theirs or run], options.repeats)
        best_copy = 2 * source.nbytes / min(copied)
        ratio = f"{other / mine:11.2f}" if theirs is not None else f"{'-':>11}"
        print(f"{name:>20} {mine * 1e3:9.3f} {nbytes / mine / 1e9:8.1f} {nbytes / mine / best_copy:8.2f} {ratio}", flush=True)


if __name__ == "__main__":
    main()
