"""A rank of one side of `hosts.py`: `rank.py SIDE MODEL FOLDER RANK SIZE ...`, of torch with `THREADS BUCKET_MB ADDRESS
PORT`, of sockets with `NBYTES ADDRESS NEXT PORT`.

It is asked for turns of steps through FOLDER (`asking.py`) and answers with the seconds of each. SIDE is `ours` or,
with parameters that are cut over the ranks, `cut` (launched; the launcher says which rank), `alone` (ours on a rank's
part of the batch, which tells nobody anything), `sockets` (that beside plain sockets: `sockets.py`) or `torch`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path[0] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


from sides.asking import asked, put  # noqa: E402
from sides.data import batch  # noqa: E402
from sides.steps import Run, batches, seconds_of  # noqa: E402


def trainer(side: str, model: str, rank: int, size: int, rest: list[str]) -> tuple[int, Run]:
    """Which rank this is, and its step on a global batch."""
    if side == "torch":
        from sides.torch_side import trainer as of_torch

        threads, bucket_mb, address, port = rest
        more = {"bucket_mb": float(bucket_mb), "address": address}
        return rank, of_torch(model, int(threads), rank=rank, size=size, port=int(port), **more)[0]
    from manygrad import world
    from sides.ours import trainer as of_ours

    run = of_ours(model, cut=side == "cut")[0]
    if side in ("ours", "cut"):
        return world.rank, run
    n = len(batch(model, 0)[0]) // size

    def alone(x: np.ndarray, y: np.ndarray) -> float:
        return run(x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n])

    if side == "sockets":
        from sides.sockets import beside

        nbytes, own, following, port = rest
        return rank, beside(alone, model, int(nbytes), own, following, int(port))
    return rank, alone


def main() -> None:
    side, model, where, *numbers = sys.argv[1:6]
    folder = Path(where)
    rank, run = trainer(side, model, int(numbers[0]), int(numbers[1]), sys.argv[6:])
    turn = step = 0
    while count := asked(folder / f"turn{turn}"):
        # (made first, as making one takes a processor from another rank's step)
        given = list(batches(model, range(step, step + count)))
        times = seconds_of(run, given)
        step += count
        put(folder / f"turn{turn}.{rank}", json.dumps(times))
        turn += 1


if __name__ == "__main__":
    main()
