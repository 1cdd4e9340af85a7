"""Kernels that memory bounds: elementwise chains, reductions, softmax, norms, losses, embedding, attention, an optimiser's step; ours and torch.

    python benchmarks/memory_bound.py [--elements 20000000] [--repeats 10] [--only norm] [--tokens 1024]

For each: the bytes that must move (every input read once, every output written once), the rate at which ours moves them as a part of the
measured rate of a copy (`of copy`; NumPy's or ours, the faster), and torch's time over ours where torch is installed (eager, and its fused AdamW). All sides are
replayed steps over the same data, in turns, medians.

Attention is causal, 4 x 8 heads of 64 over `--tokens` tokens (which arithmetic bounds as well), with torch's scaled_dot_product_attention. Its memory: in a
process of its own, by how much the largest resident size during three runs is above what it was after the same at 64 tokens; inputs count.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.memory import forget_peak, status

from manygrad import Tensor, TinyJit
from manygrad.tensor.nn.functional import cross_entropy, embedding
from manygrad.tensor.nn.optim import AdamW

Run = Callable[[], object]
COLUMNS = 1024
VOCABULARY, WIDTH = 8192, 256  # of the embedding
HEADS, WIDTH_OF_HEAD = 32, 64  # of the attention, over the whole batch


def programs(torch: Any, n: int, tokens: int) -> dict[str, tuple[float, Run, Run | None]]:
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
        **_images(a),
        "embedding grad": (1 + VOCABULARY * WIDTH / a.size, _embedding(a)),
        "attention": (4 * HEADS * WIDTH_OF_HEAD * tokens / a.size, attention("ours", tokens, False)),
        "attention grad": (8 * HEADS * WIDTH_OF_HEAD * tokens / a.size, attention("ours", tokens, True)),
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
        **_torch_images(torch, a), "embedding grad": _torch_embedding(torch, a),
        "attention": attention("torch", tokens, False), "attention grad": attention("torch", tokens, True),
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


def images(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`a` as pictures of 16 channels, and a gradient of the same shape."""
    x = a.reshape(-1)[: a.size // (16 * 1024) * 16 * 1024].reshape(-1, 16, 32, 32)
    return x, x[::-1].copy()


def _images(a: np.ndarray) -> dict[str, tuple[float, Run]]:
    data, g = images(a)
    x, gradient = Tensor(data, requires_grad=True).realize(), Tensor(g).realize()
    w, b = (Tensor(np.ones(16, np.float32), requires_grad=True).realize() for _ in range(2))
    norm = lambda: x.batch_norm(None, None, w, b, training=True)  # noqa: E731

    def backward() -> Tensor:
        first, *rest = norm().gradient(x, w, b, gradient=gradient)
        return first.realize(*rest)

    return {"batch_norm": (2, TinyJit(lambda: norm().realize())), "batch_norm grad": (3, TinyJit(backward))}


def _torch_images(torch: Any, a: np.ndarray) -> dict[str, Run]:
    x, gradient = map(torch.from_numpy, images(a))
    x.requires_grad_()
    w, b = (torch.ones(16, requires_grad=True) for _ in range(2))
    norm = lambda: torch.nn.functional.batch_norm(x, None, None, w, b, training=True)  # noqa: E731
    return {"batch_norm": norm, "batch_norm grad": lambda: torch.autograd.grad(norm(), (x, w, b), gradient)}


def numbers_of_tokens(a: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, a.size // WIDTH)


def _embedding(a: np.ndarray) -> Run:
    weight = Tensor(np.zeros((VOCABULARY, WIDTH), np.float32), requires_grad=True).realize()
    tokens, gradient = Tensor(numbers_of_tokens(a)).realize(), Tensor(a.reshape(-1, WIDTH)).realize()
    return TinyJit(lambda: embedding(tokens, weight).gradient(weight, gradient=gradient)[0].realize())


def _torch_embedding(torch: Any, a: np.ndarray) -> Run:
    weight = torch.zeros((VOCABULARY, WIDTH), requires_grad=True)
    tokens, gradient = torch.from_numpy(numbers_of_tokens(a)), torch.from_numpy(a.reshape(-1, WIDTH))
    return lambda: torch.autograd.grad(torch.nn.functional.embedding(tokens, weight), weight, gradient)


def attention(side: str, tokens: int, backward: bool) -> Run:
    """Causal attention, or the gradients of query, key and value."""
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal((4, HEADS // 4, tokens, WIDTH_OF_HEAD)).astype(np.float32) for _ in range(4)]
    if side == "ours":
        *mine, gradient = (Tensor(x, requires_grad=i < 3).realize() for i, x in enumerate(arrays))
        forward = lambda: mine[0].scaled_dot_product_attention(*mine[1:], is_causal=True)  # noqa: E731

        def gradients() -> Tensor:
            first, *rest = forward().gradient(*mine, gradient=gradient)
            return first.realize(*rest)

        return TinyJit(gradients if backward else lambda: forward().realize())
    import torch

    *theirs, slope = map(torch.from_numpy, arrays)
    for x in theirs:
        x.requires_grad_(backward)
    attend = lambda: torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True)  # noqa: E731
    return (lambda: torch.autograd.grad(attend(), theirs, slope)) if backward else attend


def grown(side: str, tokens: int, backward: bool) -> int:
    """Bytes by which this process grew."""
    for n in (64, tokens):
        before = status("VmRSS")
        step = attention(side, n, backward)
        forget_peak()
        for _ in range(3):
            step()
    return status("VmHWM") - before


PAUSE_S = 0.04  # idle threads of OpenBLAS spin for 30 ms, those of libgomp for about 1 ms: they would take a core from the next side
AWAKE_S = 0.02  # of runs that do not count, until the system has spread a side's threads over the cores
IN_A_ROW = 5


def samples(runs: list[Run], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[list[float]]:
    """Seconds of `repeats` runs of each. The sides alternate: a pause in which the other side's threads go to sleep, runs that do not
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument("--tokens", type=int, default=1024, help="of the attention")
    parser.add_argument("--grown", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grown:
        side, name = options.grown
        return print(grown(side, options.tokens, name == "attention grad"))
    torch = None
    if importlib.util.find_spec("torch") is not None:
        import torch  # type: ignore[no-redef]
    made = programs(torch, options.elements, options.tokens)
    source, target = np.ones(options.elements, np.float32), np.ones(options.elements, np.float32)
    print(f"{'kernel':>20} {'ms':>9} {'GB/s':>8} {'of copy':>8} {'torch/ours':>11}")
    for name, (nbytes, run, theirs) in made.items():
        if options.only not in name:
            continue
        copies = [lambda: np.copyto(target, source), made["copy"][1]]
        *copied, mine, other = measure([*copies, run, theirs or run], options.repeats)
        best_copy = 2 * source.nbytes / min(copied)
        ratio = f"{other / mine:11.2f}" if theirs is not None else f"{'-':>11}"
        print(f"{name:>20} {mine * 1e3:9.3f} {nbytes / mine / 1e9:8.1f} {nbytes / mine / best_copy:8.2f} {ratio}", flush=True)
    for name in ("attention", "attention grad"):
        if options.only in name:
            sides = ["ours", *(["torch"] if torch is not None else [])]
            command = [sys.executable, os.path.abspath(__file__), "--tokens", str(options.tokens), "--grown"]
            memory = {side: int(subprocess.run([*command, side, name], stdout=subprocess.PIPE, text=True, check=True).stdout) for side in sides}
            print(f"memory of {name}: " + ", ".join(f"{side} {n / 1e6:.0f} MB" for side, n in memory.items()), flush=True)


if __name__ == "__main__":
    main()
