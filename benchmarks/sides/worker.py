"""The process of one side: `worker.py SIDE MODEL THREADS`.
It prints a line of JSON when it is ready and one for every line that it reads.

`steps N LIMIT`: seconds of N training steps, fewer if they take LIMIT seconds together, and the last loss.
`memory N LIMIT`: by how many bytes the largest resident size during N steps is above what it was when the side's
modules were imported, before there was a model: parameters, the optimiser's state, what a step holds, and what its
compiler left.
"""

import json
import math
import os
import sys
import time

sys.path[0] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")

from sides.data import batch  # noqa: E402
from sides.memory import forget_peak, status  # noqa: E402


def main() -> None:
    side, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def answer(**facts: object) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    began = time.perf_counter()
    if side == "ours":
        from sides import ours as chosen
    elif side == "tinygrad":
        from sides import tinygrad_side as chosen  # type: ignore[no-redef]
    else:
        from sides import torch_side as chosen  # type: ignore[no-redef]
    imported = time.perf_counter() - began
    before = status("VmRSS")
    run, count = (
        chosen.trainer(model) if side in ("ours", "tinygrad") else chosen.trainer(model, threads, side == "compile")
    )
    answer(import_s=imported, parameters=count)
    step = 0

    def steps(n: int, limit_s: float) -> tuple[list[float], float]:
        nonlocal step
        times: list[float] = []
        loss = float("nan")
        while len(times) < n and sum(times) < limit_s:
            data = batch(model, step % 8)
            start = time.perf_counter()
            loss = run(*data)
            times.append(time.perf_counter() - start)
            step += 1
        return times, loss

    for line in sys.stdin:
        what, n, limit_s = line.split()
        if what == "memory":
            forget_peak()
            steps(int(n), float(limit_s))
            answer(memory=status("VmHWM") - before)
        else:
            times, loss = steps(int(n), float(limit_s))
            assert math.isfinite(loss), loss
            answer(seconds=times, loss=loss)


if __name__ == "__main__":
    main()
