"""Kernels that memory bounds: elementwise chains, reductions, softmax, norms, losses, embedding, an optimiser's step;
ours and torch.

    python benchmarks/memory_bound.py [--elements 20000000] [--repeats 10] [--only norm]

For each: the bytes that must move (every input read once, every output written once), the rate at which ours moves them
as a part of the measured rate of a copy of all elements (`of copy`; NumPy's or ours, the faster), and of a copy that
moves as many bytes as the kernel (`of same`: where the last cache holds a part of the data, more data move at a lower
rate); and torch's time over ours where torch is installed (eager, and its fused AdamW). All sides are replayed steps
over the same data, in turns, medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.turns import Run, measure

from manygrad import Tensor, TinyJit
from manygrad.nn.functional import cross_entropy, embedding
from manygrad.nn.optim import AdamW

COLUMNS = 1024
VOCABULARY, WIDTH = 8192, 256  # of the embedding


def programs(torch: Any, n: int) -> dict[str, tuple[float, Run, Run | None]]:
    """name -> (bytes that must move, ours, torch's)."""
    rows = max(n // COLUMNS, 4)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, COLUMNS)).astype(np.float32) for _ in range(2))
    labels = rng.integers(0, COLUMNS, rows)
    x, y, w, t = (
        Tensor(a).realize(),
        Tensor(b).realize(),
        Tensor(np.ones(COLUMNS, np.float32)).realize(),
        Tensor(labels).realize(),
    )
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
    }
    if torch is None:
        return {name: (factor * size, run, None) for name, (factor, run) in ours.items()}
    F = torch.nn.functional
    px, py, pw, pt = (torch.from_numpy(v) for v in (a, b, np.ones(COLUMNS, np.float32), labels))
    theirs: dict[str, Run] = {
        "copy": lambda: px + 0.5, "chain": lambda: ((px * 2 + py).relu() - py * py) * 0.5, "sum": lambda: px.sum(),
        "sum dim 0": lambda: px.sum(0),
        "sum dim 1": lambda: px.sum(1), "max dim 1": lambda: px.amax(1), "transpose": lambda: px.T.contiguous(),
        "softmax": lambda: px.softmax(1),
        "layer_norm": lambda: F.layer_norm(px, (COLUMNS,), pw, pw), "rms_norm": lambda: F.rms_norm(px, (COLUMNS,), pw),
        "cross_entropy": lambda: F.cross_entropy(px, pt),
        "softmax grad": _torch_gradient(torch, lambda x: (x.softmax(1) * py).sum(), a),
        "layer_norm grad": _torch_gradient(torch, lambda x: (F.layer_norm(x, (COLUMNS,), pw, pw) * py).sum(), a),
        "cross_entropy grad": _torch_gradient(torch, lambda x: F.cross_entropy(x, pt), a),
        "adamw": _torch_adamw(torch, a),
        **_torch_images(torch, a), "embedding grad": _torch_embedding(torch, a),
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


def copies_of(nbytes: float) -> list[Run]:
    """A copy that moves so many bytes, half of them read and half written: NumPy's, and ours,
    which goes past the caches."""
    n = max(int(nbytes) // 8, 1)
    source, target = np.ones(n, np.float32), np.ones(n, np.float32)
    x = Tensor(source).realize()
    return [lambda: np.copyto(target, source), TinyJit(lambda: (x + 0.5).realize())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="part of a kernel's name")
    options = parser.parse_args()
    torch = None
    if importlib.util.find_spec("torch") is not None:
        import torch  # type: ignore[no-redef]
    made = programs(torch, options.elements)
    print(f"{'kernel':>20} {'ms':>9} {'GB/s':>8} {'of copy':>8} {'of same':>8} {'torch/ours':>11}")
    for name, (nbytes, run, theirs) in made.items():
        if options.only not in name:
            continue
        copies, same = copies_of(8 * options.elements), copies_of(nbytes)
        *copied, mine, other = measure([*copies, *same, run, theirs or run], options.repeats)
        rate = nbytes / mine
        of_copy, of_same = rate * min(copied[:2]) / (8 * options.elements), rate * min(copied[2:]) / nbytes
        ratio = f"{other / mine:11.2f}" if theirs is not None else f"{'-':>11}"
        print(f"{name:>20} {mine * 1e3:9.3f} {rate / 1e9:8.1f} {of_copy:8.2f} {of_same:8.2f} {ratio}", flush=True)


if __name__ == "__main__":
    main()
