"""From nothing to the first training step: ours, torch.compile and tinygrad, each in fresh processes.

    python benchmarks/start_up.py [--model gpt] [--sides ours,compile,tinygrad] [--limit 300] [--repeats 1]

For each side, seconds: `import` of the side's modules; `cold`: the first step with empty caches, everything is
compiled; `second`: the step after it (which captures, where a side does that); `warm`: the first step of the next
process, which finds the disk caches of the one before; `step`: the fastest of a few later ones. Building the model's
parameters is in none of them. torch.compile writes C++ and needs g++, tinygrad C and clang. With several repeats the
fastest of each counts, the caches emptied before each. A dash: not installed, does not run, or took longer than
`--limit`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from sides.process import Side, installed

COLUMNS = ("import", "cold", "second", "warm", "step")


def caches(folder: str) -> dict[str, str]:
    """Every side's caches in `folder`."""
    return {
        "CACHE_DIR": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, "inductor"),
        "XDG_CACHE_HOME": folder,
        "CACHEDB": os.path.join(folder, "tinygrad.db"),
    }


def starts(side: str, model: str, limit_s: float, folder: str) -> dict[str, float] | None:
    """The columns' seconds: one process that finds nothing, and one after it."""
    found: dict[str, float] = {}
    for first in ("cold", "warm"):
        process = Side(
            side, model, len(os.sched_getaffinity(0)), limit_s, {**caches(folder), "OMP_WAIT_POLICY": "PASSIVE"}
        )
        try:
            answers = [process.ask(f"steps {n} {limit}") for n, limit in ((1, limit_s), (1, limit_s), (5, 5.0))]
            if process.ready is None or None in answers:
                return None
            one, two, later = (a["seconds"] for a in answers if a is not None)
            found.update({first: one[0], "import": process.ready["import_s"], "step": min(later)})
            if first == "cold":
                found["second"] = two[0]
        finally:
            process.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", help="of train_step.py; tinygrad has gpt, mlp and mlp1")
    parser.add_argument("--sides", default="ours,compile,tinygrad")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a step")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    print(f"{args.model:<10}" + "".join(f"{c + ' s':>11}" for c in COLUMNS))
    for side in args.sides.split(","):
        runs = []
        for _ in range(args.repeats if installed(side) else 0):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(starts(side, args.model, args.limit, folder))
        done = [r for r in runs if r is not None]
        print(
            f"{side:<10}" + "".join(f"{min(r[c] for r in done):11.3f}" if done else f"{'-':>11}" for c in COLUMNS),
            flush=True,
        )


if __name__ == "__main__":
    main()
