"""The same kernels on CPU and on OPENCL, in turns: on pocl both use the same cores.

    python benchmarks/opencl.py [--size 1024] [--elements 4000000] [--repeats 10]

A product of two square matrices, and elementwise work, reductions and rows over two arrays; replayed steps over data
that lies on the device, medians in milliseconds; and OPENCL's speed as a part of CPU's. Without an OpenCL driver it
says what to install.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.turns import Run, measure

from manygrad import Tensor, TinyJit
from manygrad.runtime.devices import get_device

COLUMNS = 1000


def programs(device: str, size: int, elements: int) -> dict[str, Run]:
    rng = np.random.default_rng(0)
    square = [rng.standard_normal((size, size)).astype(np.float32) for _ in range(2)]
    rows = [rng.standard_normal((max(elements // COLUMNS, 1), COLUMNS)).astype(np.float32) for _ in range(2)]
    a, b, x, y = (Tensor(v).to(device).realize() for v in (*square, *rows))
    every: dict[str, Callable[[], Tensor]] = {
        f"product {size}": lambda: a @ b,
        "add": lambda: x + y,
        "chain": lambda: ((x * 2 + y).relu() - y * y) * 0.5,
        "exp": lambda: x.exp(),
        "sum dim 1": lambda: x.sum(1),
        "softmax": lambda: x.softmax(1),
    }

    def replayed(f: Callable[[], Tensor]) -> Run:
        step = TinyJit(lambda: f().realize())

        def run() -> None:
            step()
            get_device(device).synchronize()

        return run

    return {name: replayed(f) for name, f in every.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the matrices")
    parser.add_argument("--elements", type=int, default=4_000_000, help="of each array")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    try:
        get_device("OPENCL")
    except RuntimeError as error:
        print(error)
        return
    sides = [programs(device, args.size, args.elements) for device in ("CPU", "OPENCL")]
    print(f"{'':>14} {'CPU ms':>9} {'OPENCL ms':>10} {'OPENCL/CPU':>11}")
    for name in sides[0]:
        cpu, opencl = measure([side[name] for side in sides], args.repeats)
        print(f"{name:>14} {cpu * 1e3:9.3f} {opencl * 1e3:10.3f} {cpu / opencl:11.2f}")


if __name__ == "__main__":
    main()
