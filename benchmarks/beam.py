"""What BEAM finds: kernels under the heuristic's optimisations and under those of a search, in one run.

    python benchmarks/beam.py [NAMES] [--beam 2] [--limit 30] [--repeats 50]

Prints, for each: best microseconds of both sides (a replayed step each, repeats interleaved), their ratio, how long the
search took (0: its winner was on disk), and whether both gave the same bits.
`--limit`: seconds of searching for one kernel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from manygrad import Tensor, TinyJit
from manygrad.runtime.devices.tune import tune
from manygrad.tensor.environment import Context

RNG = np.random.default_rng(0)


def data(*shape: int) -> Tensor:
    return Tensor(RNG.standard_normal(shape).astype(np.float32)).realize()


def programs() -> dict[str, Callable[[], Tensor]]:
    a, b, tall, flat = data(512, 512), data(512, 512), data(2000, 64), data(64, 2000)
    odd, odd2 = data(333, 257), data(257, 190)
    image, weight = data(16, 32, 28, 28), data(32, 32, 3, 3)
    wide, cube = data(256, 4096), data(32, 64, 96)
    return {
        "matmul 512": lambda: a @ b,
        "a @ b.T 512": lambda: a @ b.T,
        "odd matmul": lambda: odd @ odd2,
        "outer product": lambda: tall @ flat,
        "inner product": lambda: flat @ tall,
        "conv 3x3": lambda: image.conv2d(weight, padding=1),
        "max pool": lambda: image.max_pool2d(2),
        "softmax": lambda: wide.softmax(1),
        "sum dim 0": lambda: wide.sum(0),
        "permute": lambda: cube.permute(2, 0, 1).contiguous(),
    }


def prepared(program: Callable[[], Tensor], beam: int) -> tuple[Callable[[], Tensor], float]:
    """A captured step, and the seconds until it was."""
    began = time.perf_counter()
    step = TinyJit(lambda: program().realize())
    with Context(BEAM=beam):
        for _ in range(3):
            step()
    return step, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--beam", type=int, default=2)
    parser.add_argument("--limit", type=float, default=tune.SEARCH_LIMIT_S)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    tune.SEARCH_LIMIT_S = args.limit
    print(f"{'':16}{'heuristic us':>14}{'BEAM us':>12}{'ratio':>8}{'search s':>10}  same bits")
    ratios = []
    for name, program in programs().items():
        if args.names and name not in args.names:
            continue
        plain, _ = prepared(program, 0)
        found, search_s = prepared(program, args.beam)
        same = np.array_equal(plain().numpy(), found().numpy())
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.repeats):
            for side, step in enumerate((plain, found)):
                began = time.perf_counter()
                step()
                times[side].append(time.perf_counter() - began)
        before, after = (min(t) * 1e6 for t in times)
        ratios.append(before / after)
        print(
            f"{name:16}{before:14.1f}{after:12.1f}{before / after:8.2f}{search_s:10.1f}  {'yes' if same else 'NO'}",
            flush=True,
        )
    print(f"geometric mean of the ratios: {statistics.geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
