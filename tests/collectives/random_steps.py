"""Random steps over real links: several sums of random sizes over all workers beside random computing, captured and
replayed, while now and then a rank is slow. All values are small integers, so that sums are exact.

    TRANSPORT=zmq python -m tests.collectives.random_steps --minutes 5 --nodes 3
    python -m tests.collectives.random_steps --minutes 5 --nodes 4 --pairs

`--pairs`: two and two share memory, between them there is ZeroMQ.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial

import ml_dtypes
import numpy as np

from manygrad import Tensor, TinyJit, values_may_differ, world
from manygrad.launcher.api import launch
from manygrad.launcher.job import REAL_ENDPOINT

PAIRS = "tests.collectives.apart:Pairs"
SIZES = (1, 7, 64, 1000, 16 << 10, 100_003, 1 << 18, 1 << 20, 3 << 20)


def round_of(seed: int) -> int:
    """One random step, captured and replayed; how many sums it has. Alike on all ranks, but for who is slow."""
    rng, mine = random.Random(seed), random.Random(f"{seed} {world.rank}")
    n, devices = world.size, world.devices
    sizes = [rng.choice(SIZES) for _ in range(rng.randrange(1, 6))]
    work, twice = [rng.choice((0, 0, 64, 256)) for _ in sizes], [rng.random() < 0.3 for _ in sizes]
    finish = [rng.choice((None, None, "half", "bfloat16", "bool")) for _ in sizes]  # what is computed of the last sum
    values = np.random.default_rng(seed)
    base = [values.integers(-8, 8, (n, size)).astype(np.float32) for size in sizes]
    given = [Tensor(b).shard(devices, axis=0).realize() for b in base]
    square = {w: Tensor(np.eye(w, dtype=np.float32)).shard(devices).contiguous().realize() for w in set(work) if w}

    def step(k: Tensor, *xs: Tensor) -> list[Tensor]:
        out = []
        for x, w, again, last in zip(xs, work, twice, finish):
            if w:
                a = square[w]
                for _ in range(4):
                    a = a @ square[w]
                x = x + (a.sum() - w)  # (0: the sum waits for it)
            total = (x * k).sum(0)
            total = (total * x).sum(0) if again else total
            out.append(total if last is None else total * 0.5 if last == "half" else total.clip(-256, 256).cast(last))
        return out

    jit = TinyJit(step)
    for i in range(5):
        if mine.random() < 0.1:
            time.sleep(mine.random() * 0.1)
        factor = rng.choice((1, 2, 3))
        found = jit(Tensor([float(factor)]).shard(devices), *given)
        for y, b, again, last in zip(found, base, twice, finish):
            want = (b * factor).sum(0)
            want = (want * b).sum(0) if again else want
            if last is not None:
                want = (
                    want / 2
                    if last == "half"
                    else want != 0
                    if last == "bool"
                    else np.clip(want, -256, 256).astype(ml_dtypes.bfloat16)
                )
            assert np.array_equal(y.numpy(), want), f"seed {seed}, call {i}, sizes {sizes}"
    return len(sizes)


def steps(rounds: int, seconds: float, seed: int) -> int:
    """Random steps until one of both has passed; how many sums there were."""
    begin, count = time.monotonic(), 0
    for r in range(rounds):
        with values_may_differ():  # (each rank has its own clock)
            there_is_time = Tensor(np.full((world.size,), time.monotonic() - begin < seconds, np.float32))
            if not there_is_time.shard(world.devices, axis=0).min().item():
                break
        count += round_of(seed + r)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--pairs", action="store_true")
    args = parser.parse_args()
    endpoint = PAIRS if args.pairs else REAL_ENDPOINT
    found = launch(partial(steps, 1 << 30, 60 * args.minutes, args.seed), nodes=args.nodes, endpoint=endpoint)
    print(f"{found[0]} sums on {args.nodes} workers, all right (seed {args.seed})")


if __name__ == "__main__":
    main()
