"""Random endings of runs: what a script leaves to its end, and to others, comes right or is a named error.

    python -m tests.end_to_end.endings --runs 200 --seed 0
    python -m tests.end_to_end.endings --plan '{"workers": 2, "acts": [["thread", "gather", 0.1]], "end": ["", 0]}'

A run has 1, 2 or 4 workers; tensors are read, computed, saved, replayed and summed over all ranks in the script, in
threads that outlive it, exit handlers, destructors, daemon threads and forked children, with kernels that are there
or (`cold`) are yet to be made; it ends as it does, by `sys.exit`, an exception, or a signal. Acts of the rank itself
are right, on all ranks; those of children, destructors and what lives longer than a rank are right or say why not; no
signal ends anybody unasked; no process and no file of the run is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from manygrad.launcher.janitor import marked_processes

SCRIPT = Path(__file__).with_name("ending_script.py")
LIMIT_S = 90
OWN = ("read", "compute", "make", "replay", "save")  # of a rank alone
ALL = ("sum of all", "gather", "replay of all")
PLACES = ("script", "exit handler", "thread")  # of a rank, which has time for them
CHILDREN = ("child", "child of exit handler", "process")
DESTRUCTORS = ("destructor", "cycle")  # Python says when, on each rank at another time
BEYOND = ("daemon", "interpreter's end")  # nobody waits for these
NAMED = ("NoRank", "LostValue: the value is the parent's")
# a daemon thread that communicates while its rank does, or ends: the ranks cannot know whether it will, and when
DAEMONS = ("a daemon thread", "run different programs", "finished the script", "does not fit")


def drawn(random: random.Random) -> dict[str, Any]:
    acts = []
    for _ in range(random.randint(1, 6)):
        place = random.choice([*PLACES, *PLACES, *PLACES, *CHILDREN, *DESTRUCTORS, *BEYOND])
        what = random.choice(OWN if place in DESTRUCTORS else [*OWN, *ALL])
        if place == "child":
            choice: Any = random.choice(["exit", "raise", "_exit"])
        else:
            choice = round(random.choice([0.0, 0.3 * random.random()]), 2)
        acts.append((place, what, choice))
    workers = random.choice([1, 2, 2, 2, 4])
    end = random.choice(["", "", "", "exit", "exit", "raise", "code", "kill"])
    plan = {"workers": workers, "acts": acts, "end": (end, random.randrange(workers))}
    return {**plan, "cold": random.random() < 0.25}


def carried_out(plan: dict[str, Any], folder: Path) -> list[str]:
    """What is wrong about a run of `plan`."""
    workers, end = plan["workers"], plan["end"][0]
    run_dir, shared = folder / "run", set(os.listdir("/dev/shm"))
    cache = {"CACHE_DIR": str(folder / "cache")} if plan.get("cold") else {}
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli"]
    command += ["--nodes", str(workers), "--run-dir", str(run_dir)] if workers > 1 else []
    process = subprocess.Popen(
        [*command, str(SCRIPT), "--", json.dumps(plan)],
        cwd=folder,
        env=os.environ | {"COLLECTIVE_TIMEOUT_S": "30", "PYTHONFAULTHANDLER": "1"} | cache,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return [f"it hangs:\n{out}{err}"]
    code = process.returncode
    logs = [(run_dir / f"rank{r}.log").read_text() for r in range(workers)] if workers > 1 else [out + err]
    wrong = [f"of rank {r}, {said}" for r, log in enumerate(logs) for said in _acts(plan, log, workers)]
    wrong += _ending(plan, code, err)
    everything = "\n".join([*logs, err])
    planned = "SIGKILL" if end == "kill" else ""
    for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL"):
        if name in everything and name != planned:
            wrong.append(f"somebody was ended by {name}")
    if "Fatal Python error" in everything:
        wrong.append("Python ended by a fatal error")
    if workers > 1:
        job = json.loads((run_dir / "report.json").read_text())["job"]
        wrong += _left(job, shared)
    return wrong and [*wrong, f"exit code {code}", *logs, err]


def _acts(plan: dict[str, Any], log: str, workers: int) -> list[str]:
    found = {int(n): said for n, said in re.findall(r"^act (\d+) (.*)$", log, re.M)}
    fails = plan["end"][0] in ("raise", "code", "kill")
    races = workers > 1 and _daemons(plan)
    wrong = []
    for number, (place, what, choice) in enumerate(plan["acts"]):
        said = found.get(number)
        name = f"act {number}, {what!r} in {place!r}: {said}"
        if said is not None and said.startswith("wrong"):
            wrong.append(name)
        elif place in PLACES and said != "right":
            is_named = races and what in ALL and said is not None and any(text in said for text in DAEMONS)
            if not is_named and (not fails or place == "script"):
                wrong.append(name)
        elif place in CHILDREN and not fails:
            is_right = said == "right" and (workers == 1 or what == "make")
            if not is_right and not (said is not None and workers > 1 and any(e in said for e in NAMED)):
                wrong.append(name)
            ended = re.search(rf"child {number} ended with (-?\d+)", log)
            if ended is None or int(ended[1]) != (1 if (place, choice) == ("child", "raise") else 0):
                wrong.append(f"child {number} ended with {ended and ended[1]}")
    return wrong


def _daemons(plan: dict[str, Any]) -> bool:
    """Whether a daemon thread communicates."""
    return any(place == "daemon" and what in ALL for place, what, _ in plan["acts"])


def _ending(plan: dict[str, Any], code: int, err: str) -> list[str]:
    (end, who), workers = plan["end"], plan["workers"]
    expected = {"raise": 1, "code": 3, "kill": 137 if workers > 1 else -signal.SIGKILL}.get(end, 0)
    if code == expected and (not expected or workers == 1 or f"rank {who} failed" in err):
        return []
    if _daemons(plan) and code == 1 and any(text in err for text in DAEMONS):
        return []
    return [f"it ended with {code}, not {expected}"]


def _left(job: str, shared: set[str]) -> list[str]:
    folder, until = f"/tmp/mg-{job}", time.monotonic() + 3
    while True:
        left = [f"process {p} is left" for p in marked_processes(job, folder)]
        left += [f"{folder} is left"] if os.path.exists(folder) else []
        left += [f"/dev/shm/{name} is left" for name in os.listdir("/dev/shm") if job in name and name not in shared]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", help="one, as JSON")
    args = parser.parse_args()
    failed = 0
    for n in range(1 if args.plan else args.runs):
        plan = json.loads(args.plan) if args.plan else drawn(random.Random(f"{args.seed}.{n}"))
        with tempfile.TemporaryDirectory(prefix="mg-endings-") as folder:
            wrong = carried_out(plan, Path(folder))
        if wrong:
            failed += 1
            print(f"run {n}: --plan {json.dumps(plan)!r}\n" + "\n".join(wrong), flush=True)
        elif n % 10 == 9:
            print(f"{n + 1} runs, {failed} of them wrong", flush=True)
    print(f"{failed} of {1 if args.plan else args.runs} endings are wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
