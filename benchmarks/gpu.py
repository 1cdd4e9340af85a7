"""CUDA on a GPU, against torch's CUDA in the same run where torch has it.

    python benchmarks/gpu.py [--parts kernels,products,steps,transformer] [--size 1] [--limit 60] [--json FILE]

Each part is a process of its own with a time limit, so that a kernel that hangs or faults costs its part alone. Kernels
in GB/s, products in TFLOP/s, training steps in ms; replayed, on data that lies on the device, medians over `--repeats`
batches of replays. `--size 0` is small enough for an emulated GPU, where the figures mean nothing. No Ray is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad import Tensor, TinyJit, autocast, nn
from manygrad.nn import functional as F
from manygrad.nn.optim import AdamW
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.cuda.driver import gpu_of

REPLAYS = 20  # of one measurement
RNG = np.random.default_rng(0)


def data(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def seconds(run: Callable[[], object], wait: Callable[[], object], repeats: int) -> float:
    """Of one run, the median of `repeats` measurements of several."""
    for _ in range(3):
        run()
    wait()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(REPLAYS):
            run()
        wait()
        found.append((time.perf_counter() - began) / REPLAYS)
    return statistics.median(found)


def ours(f: Callable[..., Tensor], arrays: list[np.ndarray], repeats: int, dtype: str = "float32") -> float:
    given = [Tensor(a, dtype=dtype, device="CUDA").realize() for a in arrays]
    step = TinyJit(lambda: f(*given).realize())
    return seconds(step, get_device("CUDA").synchronize, repeats)


def with_torch() -> Any:
    """torch, where it has a GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = __import__("torch")
    return torch if torch.cuda.is_available() else None


def theirs(f: Callable[..., Any], arrays: list[np.ndarray], repeats: int, dtype: str = "float32") -> float | None:
    if (torch := with_torch()) is None:
        return None
    given = [torch.tensor(a, device="cuda", dtype=getattr(torch, dtype)) for a in arrays]
    return seconds(lambda: f(*given), torch.cuda.synchronize, repeats)


def row(name: str, unit: str, amount: float, mine: float, other: float | None) -> dict[str, Any]:
    """`amount`: of what the unit counts, in one run; 0: the unit is ms."""
    scale = (lambda s: amount / s) if amount else (lambda s: 1e3 * s)
    found: dict[str, Any] = {"name": name, "unit": unit, "ours": scale(mine), "ms": 1e3 * mine}
    if other is not None:
        found |= {"torch": scale(other), "torch/ours time": other / mine}
    return found


def kernels(size: int, repeats: int) -> list[dict[str, Any]]:
    """Bound by memory: bytes that have to be moved, each once, for each second."""
    n, c = ((8, 256), (8192, 4096))[size]
    x, y = data(n, c), data(n, c)
    nbytes = x.nbytes
    torch = with_torch()
    cases: list[tuple[str, Callable[..., Tensor], Callable[..., Any], list[np.ndarray], int]] = [
        ("copy", lambda a: a + 1, lambda a: a + 1, [x], 2),
        ("add, gelu", lambda a, b: F.gelu(a + b), lambda a, b: torch.nn.functional.gelu(a + b), [x, y], 3),
        ("softmax", lambda a: a.softmax(), lambda a: a.softmax(-1), [x], 2),
        ("layer norm", lambda a: F.layer_norm(a, (c,)), lambda a: torch.nn.functional.layer_norm(a, (c,)), [x], 2),
        ("sum", lambda a: a.sum(), lambda a: a.sum(), [x], 1),
        ("sum of rows", lambda a: a.sum(1), lambda a: a.sum(1), [x], 1),
        ("sum of columns", lambda a: a.sum(0), lambda a: a.sum(0), [x], 1),
        ("transpose", lambda a: a.T.contiguous(), lambda a: a.T.contiguous(), [x], 2),
    ]
    found = []
    for name, f, beside, arrays, times in cases:
        other = theirs(beside, arrays, repeats)
        found.append(row(name, "GB/s", times * nbytes / 1e9, ours(f, arrays, repeats), other))
    return found


def products(size: int, repeats: int) -> list[dict[str, Any]]:
    found = []
    sizes = (((64, 64, 64), (65, 63, 40)), ((1024,) * 3, (4096,) * 3, (8192, 3072, 768), (1000, 1336, 520)))[size]
    layouts: dict[str, Callable[..., Any]] = {  # T: that factor lies transposed
        "NN": lambda a, b: a @ b,
        "NT": lambda a, b: a @ b.T,
        "TN": lambda a, b: a.T @ b,
    }
    for dtype in ("float32", "bfloat16"):
        for m, n, k in sizes:
            for layout, f in layouts.items() if dtype == "bfloat16" else (("NN", layouts["NN"]),):
                shapes = ((k, m) if layout == "TN" else (m, k), (n, k) if layout == "NT" else (k, n))
                arrays = [data(*s) for s in shapes]
                mine, other = ours(f, arrays, repeats, dtype), theirs(f, arrays, repeats, dtype)
                found.append(row(f"{dtype} {m}x{n}x{k} {layout}", "TFLOP/s", 2e-12 * m * n * k, mine, other))
    return found


def attention(size: int, repeats: int) -> list[dict[str, Any]]:
    """Causal, in bfloat16: products done, 4 or 14 flops for each pair of a query and a key it may see, and dim of a
    head."""
    batch, heads, length, width = ((1, 2, 32, 16), (8, 12, 1024, 64))[size]
    arrays = [data(batch, heads, length, width) for _ in range(4)]
    torch = with_torch()

    def gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True).gradient(q, k, v, gradient=g)
        return found[0].realize(*found[1:])

    def theirs_too(q: Any, k: Any, v: Any, g: Any) -> Any:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), g)

    cases: list[tuple[str, float, Callable[..., Tensor], Callable[..., Any], list[np.ndarray]]] = [
        (
            "forward",
            4,
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            arrays[:3],
        ),
        ("forward and backward", 14, gradients, theirs_too, arrays),
    ]
    pairs = batch * heads * length * length / 2 * width
    return [
        row(
            f"attention {batch}x{heads}x{length}x{width} {name}",
            "TFLOP/s",
            1e-12 * flops * pairs,
            ours(f, given, repeats, "bfloat16"),
            theirs(beside, given, repeats, "bfloat16"),
        )
        for name, flops, f, beside, given in cases
    ]


def rows_of_tables(size: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of an embedding, looked up, and its gradient, in which each is added where it comes from."""
    rows, columns, count = ((50, 16, 64), (50257, 768, 8192))[size]
    numbers, g, torch = RNG.integers(0, rows, count), data(count, columns), with_torch()
    at = Tensor(numbers, device="CUDA").realize()
    there = None if torch is None else torch.tensor(numbers, device="cuda")
    nbytes = 4 * count * columns
    return [
        row(
            f"{count} rows of {rows}x{columns}",
            "GB/s",
            2 * nbytes / 1e9,
            ours(lambda table: table[at], [data(rows, columns)], repeats),
            theirs(lambda table: table[there], [data(rows, columns)], repeats),
        ),
        row(
            f"their gradient, {rows}x{columns}",
            "GB/s",
            (4 * rows * columns + 3 * nbytes) / 1e9,
            ours(lambda g: Tensor.zeros(rows, columns, device="CUDA").index_add(0, at, g), [g], repeats),
            theirs(lambda g: torch.zeros(rows, columns, device="cuda").index_add(0, there, g), [g], repeats),
        ),
    ]


def steps(size: int, repeats: int) -> list[dict[str, Any]]:
    """A captured training step of an MLP 784-1024-1024-10, 512 samples."""
    wide, rows = ((32, 16), (1024, 512))[size]
    x, y = data(rows, 784), RNG.integers(0, 10, rows)

    def mine() -> float:
        model = nn.Sequential(
            nn.Linear(784, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 10)
        ).to("CUDA")
        optimizer = AdamW(model.parameters(), lr=1e-3)
        a, b = Tensor(x, device="CUDA").realize(), Tensor(y, device="CUDA").realize()

        @TinyJit
        def step() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            return loss.realize()

        with Tensor.train():
            return seconds(step, get_device("CUDA").synchronize, repeats)

    def other() -> float | None:
        if (torch := with_torch()) is None:
            return None
        own = torch.nn
        model = own.Sequential(
            own.Linear(784, wide), own.ReLU(), own.Linear(wide, wide), own.ReLU(), own.Linear(wide, 10)
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        a, b = torch.tensor(x, device="cuda"), torch.tensor(y, device="cuda")

        def step() -> None:
            optimizer.zero_grad()
            own.functional.cross_entropy(model(a), b).backward()
            optimizer.step()

        return seconds(step, torch.cuda.synchronize, repeats)

    return [row(f"MLP 784-{wide}-{wide}-10, {rows} samples", "ms", 0, mine(), other())]


def transformer(size: int, repeats: int) -> list[dict[str, Any]]:
    """A captured training step of transformer layers, as wide as GPT-2's, under autocast in bfloat16."""
    layers, wide, heads, batch, length = ((1, 32, 2, 2, 16), (4, 768, 12, 8, 1024))[size]
    x = data(batch, length, wide)

    def built(own: Any) -> Any:
        options = {"activation": "gelu", "batch_first": True, "norm_first": True, "dropout": 0.0}
        return own.Sequential(*(own.TransformerEncoderLayer(wide, heads, 4 * wide, **options) for _ in range(layers)))

    def mine() -> float:
        model, a = built(nn).to("CUDA"), Tensor(x, device="CUDA").realize()
        optimizer = AdamW(model.parameters(), lr=1e-4)

        @TinyJit
        def step() -> Tensor:
            optimizer.zero_grad()
            with autocast():
                loss = model(a).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.realize()

        with Tensor.train():
            return seconds(step, get_device("CUDA").synchronize, repeats)

    def other() -> float | None:
        if (torch := with_torch()) is None:
            return None
        model, a = built(torch.nn).cuda(), torch.tensor(x, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(a).float().square().mean()
            loss.backward()
            optimizer.step()

        return seconds(step, torch.cuda.synchronize, repeats)

    name = f"{layers} transformer layers of {wide}, {batch}x{length} tokens, bfloat16"
    return [row(name, "ms", 0, mine(), other())]


PARTS = {
    "kernels": kernels,
    "products": products,
    "attention": attention,
    "tables": rows_of_tables,
    "steps": steps,
    "transformer": transformer,
}


def run_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """A part in a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--only", part, "--size", str(args.size)]
    command += ["--repeats", str(args.repeats)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        return {"part": part, "error": f"took longer than {args.limit} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"part": part, "error": f"exit code {done.returncode}: {done.stderr[-2000:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--size", type=int, choices=(0, 1), default=1, help="0: for an emulated GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60, help="seconds for each part")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        gpu = gpu_of(0)
        rows = PARTS[args.only](args.size, args.repeats)
        print(json.dumps({"part": args.only, "gpu": gpu.name, "driver": gpu.driver_version, "rows": rows}))
        return
    found = []
    for part in args.parts.split(","):
        found.append(one := run_part(part, args))
        print(f"{part}: {one.get('gpu', '')}{one.get('error', '')}")
        for r in one.get("rows", []):
            beside = f"   torch {r['torch']:10.3f}   torch/ours time {r['torch/ours time']:.2f}" if "torch" in r else ""
            print(f"  {r['name']:44}{r['ours']:10.3f} {r['unit']}{beside}", flush=True)
        if args.json:  # (after each part: a limit may end this)
            with open(args.json, "w") as f:
                json.dump(found, f, indent=1)
    sys.exit(any("error" in one for one in found))


if __name__ == "__main__":
    main()
