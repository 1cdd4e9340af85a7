"""Fuzzers: each file beside this one that has `programs` (a hypothesis strategy) and `check(program)`
(which raises where manygrad is wrong).

    python -m tests.fuzz                        # all of them, ten minutes each
    python -m tests.fuzz views --minutes 120    # one of them, for two hours

The test suite runs `EXAMPLES` programs of each with a fixed seed (`test_fuzz.py`). What fails is shrunk by hypothesis
and printed with the round's seed; `--seed N --minutes 0` runs that round again.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType

from hypothesis import HealthCheck, Phase, given, seed, settings

NOT_FUZZERS = {"__main__", "runner", "test_fuzz", "test_planted"}
ROUND = 200  # programs between two looks at the clock


def names() -> list[str]:
    return sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in NOT_FUZZERS)


def load(name: str) -> ModuleType:
    return importlib.import_module(f"tests.fuzz.{name}")


def run_round(fuzzer: ModuleType, examples: int, round_seed: int, shrink: bool = True) -> int:
    """Checks `examples` random programs; returns how many ran to their end."""
    ran = 0

    @seed(round_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(fuzzer.programs())
    def one(program: object) -> None:
        nonlocal ran
        fuzzer.check(program)
        ran += 1

    one()
    return ran


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random programs against their meaning.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of: {', '.join(names())} (default: all)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long each runs; 0: one round")
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: from the clock)")
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(names())
    if unknown:
        parser.error(f"no fuzzer {sorted(unknown)[0]!r}; there are {', '.join(names())}")
    failed = False
    for name in options.names or names():
        fuzzer, round_seed, ran = load(name), int(time.time()) if options.seed is None else options.seed, 0
        until = time.monotonic() + 60 * options.minutes
        try:
            while True:
                ran += run_round(fuzzer, ROUND, round_seed)
                counts = "".join(f", {n} {what}" for what, n in getattr(fuzzer, "COUNTS", {}).items())
                print(f"{name}: {ran} programs{counts}, round {round_seed}", flush=True)
                round_seed += 1
                if time.monotonic() >= until:
                    break
        except Exception as e:
            failed = True
            print(
                f"{name}: failed after {ran} programs in round {round_seed} (--seed {round_seed} --minutes 0): "
                f"{type(e).__name__}: {e}",
                flush=True,
            )
            import traceback

            traceback.print_exc()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
