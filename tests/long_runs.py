"""Runs of real length, before any release: a promise that a job lasts counts when a job has lasted.

    python -m tests.long_runs                          # ten minutes with four workers, two minutes a quiet spell
    python -m tests.long_runs --minutes 2 --quiet 20   # a shorter one

Four workers train and compare with the numbers of one process. In turn a rank sleeps, computes in Python, and computes
in native code that holds the interpreter, each for the quiet spell; the launcher is suspended for half its deadline; in
the middle Ray's GCS and raylet are killed. The run must end with exit code 0, the right sum, and nothing left behind.
The tests of CI have the same on a faster clock (`tests/launcher/test_lasting.py`).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SCRIPT = """
import math, re, sys, time
import numpy as np
from manygrad import Tensor, TinyJit, world

minutes, quiet_s = float(sys.argv[1]), float(sys.argv[2])
w = Tensor(np.arange(64, dtype=np.float32)).shard(world.devices).contiguous().realize()

@TinyJit
def step(x):
    return (x * w).sum(0)

def some_steps(n):
    for _ in range(n):
        x = Tensor(np.ones((8, 64), np.float32)).shard(world.devices, axis=0)
        assert (step(x).numpy() == 8 * np.arange(64)).all()

def sleep(s):
    time.sleep(s)

def compute(s):
    end = time.monotonic() + s
    while time.monotonic() < end:
        sum(range(10000))

def match(n):
    return re.match("(a+)+$", "a" * n + "b")

# one call for about so long, doubling with n, in which no other thread of the process runs: not the heartbeat's, either
def hold(s):
    n, took = 18, 0.0
    while took < 0.2:
        n, start = n + 1, time.perf_counter()
        match(n)
        took = time.perf_counter() - start
    match(n + round(math.log2(s / took)))

began, spell = time.monotonic(), 0
some_steps(20)
print("training", flush=True)
while True:
    over = time.monotonic() - began > 60 * minutes and spell >= 3
    over = Tensor(np.full((len(world.devices),), float(over), np.float32)).shard(world.devices, axis=0).max().item()
    if over:
        break
    if world.rank == spell % world.size and spell < 3:
        print("quiet:", (sleep, compute, hold)[spell].__name__, flush=True)
        (sleep, compute, hold)[spell](quiet_s)
    spell += 1
    some_steps(200)
print("done", flush=True)
"""


def children(pid: int) -> list[tuple[int, str]]:
    """Ids and names of a process's children."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                head, _, tail = Path(f"/proc/{name}/stat").read_text().rpartition(")")
            except OSError:
                continue
            if int(tail.split()[1]) == pid:
                found.append((int(name), head.partition("(")[2]))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long_runs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the run is at least")
    parser.add_argument("--quiet", type=float, default=120.0, metavar="SECONDS", help="each quiet spell")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--transport", default="", help="TRANSPORT of the run")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="mglong-") as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        run_dir = Path(folder, "run")
        command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "train.py", "--nodes", str(options.nodes)]
        began = time.monotonic()
        run = subprocess.Popen(
            [*command, "--run-dir", str(run_dir), "--log-ranks", "all", "--", str(options.minutes), str(options.quiet)],
            cwd=folder,
            env=os.environ | ({"TRANSPORT": options.transport} if options.transport else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

        def disturb() -> None:
            log = run_dir / "rank0.log"
            while not (log.exists() and "training" in log.read_text()):
                time.sleep(0.5)
                if run.poll() is not None:
                    return
            time.sleep(5)
            print("the launcher is suspended for 30 s", flush=True)
            os.kill(run.pid, signal.SIGSTOP)
            time.sleep(30)
            os.kill(run.pid, signal.SIGCONT)
            time.sleep(options.quiet / 2)
            for pid, name in children(run.pid):
                if name in ("gcs_server", "raylet"):
                    print(f"{name} is killed", flush=True)
                    os.kill(pid, signal.SIGKILL)

        threading.Thread(target=disturb, daemon=True).start()
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            print(f"{time.monotonic() - began:7.1f} s  {line}", end="", flush=True)
        code, took = run.wait(), time.monotonic() - began
        done = sum("done" in line for line in lines)
        good = code == 0 and done >= 1 and took >= 60 * options.minutes
        print(f"exit code {code} after {took:.0f} s: {'it lasted' if good else 'FAILED'}")
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
