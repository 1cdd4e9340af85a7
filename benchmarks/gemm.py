"""Matrix products: ours against NumPy, and torch where installed, all in one run.

    python benchmarks/gemm.py [--sizes 256,512,1024] [--repeats 15] [--cpu-time]

Prints GFLOPS of each side and our ratio to the best of the others, for the layouts NN, NT and TN (T: that operand is
stored transposed), and one product with bias, relu and residual. Repeats of all sides are interleaved and the best of
each is taken. `--cpu-time`: one thread a side, timed by the thread's own processor time (for a machine that is busy
with other things).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable

if "--cpu-time" in sys.argv:  # before NumPy is loaded
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", THREADS="1")

import numpy as np

from manygrad.runtime.devices import get_device
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

Run = Callable[[], object]
Shape = tuple[int, int, int]


def kernel_ast(m: int, n: int, k: int, layout: str, epilogue: bool) -> UOp:
    """c[m, n] = sum over k of a * b, with `epilogue` relu(c + bias[n]) + residual[m, n]; as the scheduler writes it."""
    const = lambda v: UOp.const(dtypes.index, v)  # noqa: E731
    loop = lambda size, id, kind: UOp(Ops.RANGE, dtypes.index, (const(size),), (id, kind))  # noqa: E731
    row, column, inner = loop(m, 0, "loop"), loop(n, 1, "loop"), loop(k, 2, "reduce")

    def at(slot: int, i: UOp, stride: int, j: UOp) -> UOp:
        offset = i.alu(Ops.MUL, const(stride)).alu(Ops.ADD, j)
        return UOp(Ops.INDEX, dtypes.float32, (UOp(Ops.PARAM, dtypes.float32, (), slot), offset))

    load = lambda index: UOp(Ops.LOAD, dtypes.float32, (index,))  # noqa: E731
    a = load(at(1, row, k, inner) if layout[0] == "N" else at(1, inner, m, row))
    b = load(at(2, inner, n, column) if layout[1] == "N" else at(2, column, k, inner))
    value = UOp(Ops.REDUCE, dtypes.float32, (a.alu(Ops.MUL, b), inner), Ops.ADD)
    if epilogue:
        biased = value.alu(Ops.ADD, load(at(3, const(0), 0, column)))
        value = biased.alu(Ops.MAX, UOp.const(dtypes.float32, 0.0)).alu(Ops.ADD, load(at(4, row, n, column)))
    return UOp(Ops.SINK, dtypes.void, (UOp(Ops.STORE, dtypes.void, (at(0, row, n, column), value, row, column)),))


def ours(arrays: list[np.ndarray], shape: Shape, layout: str, epilogue: bool) -> tuple[Run, np.ndarray]:
    device = get_device("CPU")
    m, n, k = shape
    handles = [device.alloc(4 * m * n)] + [device.alloc(x.nbytes) for x in arrays]
    for handle, x in zip(handles[1:], arrays):
        device.copyin(handle, memoryview(x))
    kernel = device.compile(kernel_ast(m, n, k, layout, epilogue))
    out = device.as_numpy(handles[0], 4 * m * n)
    assert out is not None
    return lambda: kernel(handles), out.view(np.float32).reshape(m, n)


def numpy_side(arrays: list[np.ndarray], shape: Shape, layout: str, epilogue: bool) -> tuple[Run, np.ndarray]:
    a, b = (x if t == "N" else x.T for x, t in zip(arrays, layout))
    out = np.zeros(shape[:2], np.float32)

    def run() -> None:
        np.matmul(a, b, out=out)
        if epilogue:
            np.add(out, arrays[2], out=out)
            np.maximum(out, 0, out=out)
            np.add(out, arrays[3], out=out)

    return run, out


def torch_side(arrays: list[np.ndarray], shape: Shape, layout: str, epilogue: bool) -> tuple[Run, np.ndarray]:
    import torch

    tensors = [torch.from_numpy(x) for x in arrays]
    a, b = (x if t == "N" else x.T for x, t in zip(tensors, layout))
    out = torch.zeros(shape[:2])

    def run() -> None:
        torch.matmul(a, b, out=out)
        if epilogue:
            out.add_(tensors[2]).relu_().add_(tensors[3])

    return run, out.numpy()


def measure(runs: dict[str, Run], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """The best time of each, the repeats interleaved."""
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            began = clock()
            run()
            best[name] = min(best[name], clock() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="256,512,1000,1023,1024,2048", help="of square products, comma-separated")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu_time else time.perf_counter
    sides = {"manygrad": ours, "numpy": numpy_side}
    if importlib.util.find_spec("torch") is not None:
        sides["torch"] = torch_side
    generator = np.random.default_rng(0)
    cases = [((n, n, n), layout, False) for n in map(int, options.sizes.split(",")) for layout in ("NN", "NT", "TN")]
    cases += [((512, 3072, 768), "NN", True), ((512, 3072, 768), "NT", True)]
    print(f"{'m x n x k':>18} {'layout':>8}" + "".join(f"{s:>10}" for s in sides) + f"{'ratio':>8}   (GFLOPS)")
    for shape, layout, epilogue in cases:
        m, n, k = shape
        stored = [(m, k) if layout[0] == "N" else (k, m), (k, n) if layout[1] == "N" else (n, k), (n,), (m, n)]
        arrays = [generator.standard_normal(s).astype(np.float32) for s in stored[: 4 if epilogue else 2]]
        made = {name: side(arrays, shape, layout, epilogue) for name, side in sides.items()}
        best = measure({name: run for name, (run, _) in made.items()}, options.repeats, clock)
        np.testing.assert_allclose(made["manygrad"][1], made["numpy"][1], rtol=1e-3, atol=1e-5 * k)
        rate = {name: 2e-9 * m * n * k / t for name, t in best.items()}
        ratio = rate["manygrad"] / max(r for name, r in rate.items() if name != "manygrad")
        label = layout + ("+brr" if epilogue else "")
        print(
            f"{'x'.join(map(str, shape)):>18} {label:>8}"
            + "".join(f"{r:10.1f}" for r in rate.values())
            + f"{ratio:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
