"""Matrix products: ours against NumPy, and torch where installed, all in one run.

    python benchmarks/gemm.py [--sizes 256,512,1024] [--kinds square,rows,batched,epilogue,types] [--repeats 20]
                              [--cpu-time]

Prints GFLOPS of each side and our ratio to the best of the others:

- `square`: the layouts NN, NT and TN (T: that operand is stored transposed);
- `rows`: few rows by large weights, as inference has them (`x @ w.T`; w has 16 x the largest of `--sizes` rows, 128 MiB
  and more if that is not given);
- `batched`: many small products at once, as attention has them;
- `epilogue`: a layer of a transformer with what follows it: bias, relu and residual;
  bias and gelu (exact, and by tanh);
- `types`: bfloat16 and float16 as users write them (`a @ b`) and converted to float32 first (`via f32`), both giving
  the stored type; int8 into int32. Where torch can do it in several ways, or NumPy cannot do it, the best of torch's
  ways counts.

The sides alternate and the best of each is taken; ours is the captured kernels, torch runs with one thread and with
all. A way that is six times slower than the fastest the first time runs no more. `--cpu-time`: one thread a side, timed
by the thread's own processor time (for a machine that is busy with other things).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

if {
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
} & os.environ.keys():  # NumPy is to choose its kernels for this processor, whatever is set here
    os.environ.update(OPENBLAS_CORETYPE="", OPENBLAS_L2_SIZE="")
if "--cpu-time" in sys.argv:  # before NumPy is loaded
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", THREADS="1")

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.turns import Run, samples

from manygrad import Tensor, TinyJit
from manygrad.runtime.executors.items import run_items

HOPELESS = 6.0  # times the fastest way's first run
STORED = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i8": "int8"}


class Case(NamedTuple):
    """`batch` products c[m, n] = sum over k of a * b, then the epilogue."""

    shape: tuple[int, int, int]
    layout: str = "NN"
    batch: int = 1
    epilogue: str = ""
    stored: str = "f32"
    via_f32: bool = False

    @property
    def size(self) -> str:
        return (f"{self.batch}x" if self.batch > 1 else "") + "x".join(map(str, self.shape))

    @property
    def label(self) -> str:
        return (
            self.layout
            + self.epilogue
            + ("" if self.stored == "f32" else f" {self.stored}")
            + (" via f32" if self.via_f32 else "")
        )

    def flops(self) -> float:
        return 2.0 * self.batch * float(np.prod(self.shape))

    def arrays(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Both operands as they are stored, then the bias (n,) and the residual (m, n)."""
        m, n, k = self.shape
        shapes = [
            (m, k) if self.layout[0] == "N" else (k, m),
            (k, n) if self.layout[1] == "N" else (n, k),
            (n,),
            (m, n),
        ]
        shapes[:2] = [(self.batch, *s) if self.batch > 1 else s for s in shapes[:2]]
        if self.stored == "i8":
            return [rng.integers(-128, 128, s).astype(np.float32) for s in shapes]
        return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def cases(kinds: list[str], sizes: list[int]) -> Iterator[Case]:
    if "square" in kinds:
        yield from (Case((n, n, n), layout) for n in sizes for layout in ("NN", "NT", "TN"))
    if "rows" in kinds:
        weights = (16 * max(sizes), max(sizes)), (32 * max(sizes), max(sizes) // 4)
        yield from (Case((m, *w), "NT") for w in weights for m in (2, 4, 8, 16, 24, 32, 64))
    if "batched" in kinds:
        yield from (
            Case(s, layout, b)
            for b, s in ((64, (128, 128, 64)), (64, (128, 64, 128)), (16, (256, 256, 256)))
            for layout in ("NN", "NT")
        )
    if "epilogue" in kinds:
        yield from (
            Case((512, 3072, 768), layout, epilogue=e) for e in ("+brr", "+gelu", "+tanh") for layout in ("NN", "NT")
        )
    if "types" in kinds:
        for n in sorted({n for n in sizes if n in (512, 1024)} or {min(sizes)}):
            yield from (
                Case((n, n, n), layout, stored=t, via_f32=f)
                for t in ("bf16", "f16")
                for f in (False, True)
                for layout in ("NN", "NT")
            )
            yield from (Case((n, n, n), layout, stored="i8") for layout in ("NN", "NT"))
            yield from (Case(s, "TN", stored="bf16") for s in ((n, n, n), (n, n, 8 * n)))


def ours(case: Case, arrays: list[np.ndarray]) -> tuple[Run, Run]:
    """The captured kernels, and the result of their last run as float32."""
    a, b = (Tensor(x).cast(STORED[case.stored]).realize() for x in arrays[:2])
    bias, residual = (Tensor(x).realize() for x in arrays[2:])

    def product() -> Tensor:
        x, y = (v if t == "N" else v.transpose(-1, -2) for v, t in zip((a, b), case.layout))
        if case.stored == "i8":
            return x.int() @ y.int()
        if case.via_f32:
            return (x.float() @ y.float()).cast(STORED[case.stored])
        if case.epilogue == "+brr":
            return (x @ y + bias).relu() + residual
        return (x @ y + bias).gelu("none" if case.epilogue == "+gelu" else "tanh") if case.epilogue else x @ y

    step = TinyJit(lambda: product().realize())
    step()
    result = step()
    return lambda: run_items(step.captured.items, {}), lambda: result.float().numpy()


def numpy_side(case: Case, arrays: list[np.ndarray]) -> Run | None:
    if case.stored != "f32" or case.epilogue not in ("", "+brr"):
        return None
    a, b = (x if t == "N" else x.swapaxes(-1, -2) for x, t in zip(arrays, case.layout))
    out = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)

    def run() -> np.ndarray:
        np.matmul(a, b, out=out)
        if case.epilogue:
            np.add(out, arrays[2], out=out)
            np.maximum(out, 0, out=out)
            np.add(out, arrays[3], out=out)
        return out

    return run


def torch_sides(torch: Any, case: Case, arrays: list[np.ndarray]) -> list[Run]:
    """Its ways to do it."""
    stored = [torch.from_numpy(x).to(getattr(torch, STORED[case.stored])) for x in arrays[:2]]
    a, b = (x if t == "N" else x.transpose(-1, -2) for x, t in zip(stored, case.layout))
    bias, residual = map(torch.from_numpy, arrays[2:])
    if case.stored == "i8":
        return [lambda: torch._int_mm(a, b), lambda: a.int() @ b.int()]
    if case.stored != "f32":
        return [lambda: a @ b, lambda: (a.float() @ b.float()).to(a.dtype)]
    if not case.epilogue:
        out = torch.empty((*a.shape[:-1], b.shape[-1]))
        return [lambda: torch.matmul(a, b, out=out)]
    if case.epilogue == "+brr":
        return [
            lambda: torch.addmm(bias, a, b).relu_().add_(residual),
            lambda: (a @ b).add_(bias).relu_().add_(residual),
        ]
    gelu, how = torch.nn.functional.gelu, "none" if case.epilogue == "+gelu" else "tanh"
    return [lambda: gelu(torch.addmm(bias, a, b), approximate=how), lambda: gelu((a @ b).add_(bias), approximate=how)]


def on_threads(torch: Any, count: int, run: Run) -> Run:
    def limited() -> Any:
        torch.set_num_threads(count)
        return run()

    return limited


def measure(sides: dict[str, list[Run]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """The best time of each side over its ways."""
    ways = [(name, run) for name, side in sides.items() for run in side]
    first = [min(samples([run], 1, clock)[0]) for _, run in ways]
    kept = [way for way, t in zip(ways, first) if t < HOPELESS * max(min(first), 1e-3) or len(sides[way[0]]) == 1]
    best = {name: min(t for (n, _), t in zip(ways, first) if n == name) for name in sides}
    for (name, _), times in zip(kept, samples([run for _, run in kept], repeats, clock)):
        best[name] = min(best[name], *times)
    return best


def expected(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    """By NumPy in float64, from the operands as stored."""
    a, b = (Tensor(x).cast(STORED[case.stored]).double().numpy() for x in arrays[:2])
    out = (a if case.layout[0] == "N" else a.swapaxes(-1, -2)) @ (b if case.layout[1] == "N" else b.swapaxes(-1, -2))
    if case.epilogue == "+brr":
        return np.maximum(out + arrays[2], 0) + arrays[3]
    if case.epilogue:  # both gelus, to within the tolerance
        x = out + arrays[2]
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="256,512,1000,1023,1024,2048", help="of square products, comma-separated")
    parser.add_argument(
        "--kinds", default="square,rows,batched,epilogue,types", help="of the products, comma-separated"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu_time else time.perf_counter
    torch = None
    if importlib.util.find_spec("torch") is not None:
        import torch  # type: ignore[no-redef]
    names = ["manygrad", "numpy", *(["torch"] if torch is not None else [])]
    threads = sorted({1, 1 if torch is None or options.cpu_time else torch.get_num_threads()})
    rng = np.random.default_rng(0)
    print(f"{'m x n x k':>18} {'layout':>16}" + "".join(f"{s:>10}" for s in names) + f"{'ratio':>8}   (GFLOPS)")
    for case in cases(options.kinds.split(","), list(map(int, options.sizes.split(",")))):
        arrays = case.arrays(rng)
        run, result = ours(case, arrays)
        sides = {"manygrad": [run]}
        if (by_numpy := numpy_side(case, arrays)) is not None:
            sides["numpy"] = [by_numpy]
        if torch is not None:
            sides["torch"] = [on_threads(torch, n, way) for way in torch_sides(torch, case, arrays) for n in threads]
        best = measure(sides, options.repeats, clock)
        reference = expected(case, arrays)
        rough = {"bf16": 2e-2, "f16": 2e-3}.get(case.stored, 1e-3)
        np.testing.assert_allclose(
            result(),
            reference,
            rtol=rough,
            atol=rough * float(np.abs(reference).max()) if rough > 1e-3 else 1e-5 * case.shape[2],
        )
        rate = {name: 1e-9 * case.flops() / t for name, t in best.items()}
        others = [r for name, r in rate.items() if name != "manygrad"]
        print(
            f"{case.size:>18} {case.label:>16}"
            + "".join(f"{rate[name]:10.1f}" if name in rate else f"{'-':>10}" for name in names)
            + (f"{rate['manygrad'] / max(others):8.2f}" if others else f"{'-':>8}"),
            flush=True,
        )


if __name__ == "__main__":
    main()
