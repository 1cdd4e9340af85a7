"""Runs real jobs, brings faults upon them, and looks whether they keep what docs/reliability.md promises.

    python -m tests.chaos --seed 1 --runs 100        # 100 plans, those of seeds 1 to 100
    python -m tests.chaos --seed 17                  # one of them again

Of every run: it ends well in time, if need be after the same command was given again (the launcher itself was killed,
or told to end); the loss of every step, however often it was done, and the weights at the end have the bits of an
undisturbed run; every attempt that a fault has ended names it as the root cause; and no process, folder or file is
left.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.faults import DRAWN, KINDS, STEPS, Fault, Plan, draw, write

HERE = Path(__file__).resolve().parent
LIMIT_S, LEFT_S = 150.0, 8.0  # of a whole run; what a killed launcher leaves ends by then
COMMANDS = 4  # as often the command is given, at most
ENDS_LAUNCHER = {"launcher": -signal.SIGKILL, "preempt": 128 + signal.SIGTERM}


@dataclass
class Result:
    """What came of a run: `wrong` is what was not as promised. Of each fault that ended an attempt: its act, seconds
    until all of the attempt had ended, and until all ranks ran again."""

    plan: Plan
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0
    times: list[tuple[str, float, float]] = field(default_factory=list)
    output: str = ""


def undisturbed(folder: Path) -> tuple[dict[int, float], str]:
    """Loss of each step and digest of the weights, of one process."""
    plan = folder / "none"
    plan.mkdir()
    write(Plan(1, "", False, ()), plan / "faults")
    command = [sys.executable, "-P", str(HERE / "train.py"), "faults", "checkpoints", "losses"]
    done = subprocess.run(command, cwd=plan, env=environment(""), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in (plan / "losses.0").read_text().splitlines()]
    return dict(lines), (plan / "losses.0.digest").read_text()


WARNED = f"Error: {DRAWN}. The training goes on without this checkpoint"


def environment(mark: str, transport: str = "") -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MANYGRAD_", "RAY_"))}
    paths = [str(HERE.parents[1]), *filter(None, [clean.get("PYTHONPATH")])]
    clean |= {"PYTHONPATH": os.pathsep.join(paths), "COLLECTIVE_TIMEOUT_S": "6", "THREADS": "1"}
    return clean | {"STARTED_IN": mark} | ({"TRANSPORT": transport} if transport else {})


def started_in(mark: str) -> list[str]:
    found = []
    for p in psutil.process_iter():
        try:
            if p.environ().get("STARTED_IN") == mark and p.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {p.pid} {' '.join(p.cmdline())[:120]}")
        except psutil.Error:
            pass
    return found


def job_of(process: subprocess.Popen[str]) -> str:
    """The id of the launcher's job, which its janitor is told; nothing where it has none yet."""
    try:
        for p in psutil.Process(process.pid).children():
            command = p.cmdline()
            if any(x.endswith("janitor.py") for x in command):
                return command[-2]
    except psutil.Error:
        pass
    return ""


def ended(process: subprocess.Popen[str], until: float) -> tuple[str, str]:
    """Waits for the launcher; what it wrote, and the id of its job."""
    job = ""
    while True:
        job = job or job_of(process)
        try:
            return process.communicate(timeout=0.1 if not job else max(0.1, until - time.monotonic()))[0], job
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise


def left(mark: str, jobs: list[str]) -> list[str]:
    files = [f for job in jobs for f in [*glob.glob(f"/tmp/mg-{job}"), *glob.glob(f"/dev/shm/*{job}*")]]
    return started_in(mark) + files


def run(plan: Plan, folder: Path, whole: tuple[dict[int, float], str]) -> Result:
    """Runs a plan in an empty folder."""
    result, began, mark = Result(plan), time.monotonic(), str(folder)
    write(plan, folder / "faults")
    options = ["asynchronous"] if plan.asynchronous else []
    arguments = ["--nodes", str(plan.nodes), "--max-restarts", "6", "--grace", "3"]
    reports: list[dict[str, Any]] = []
    jobs: list[str] = []
    for turn in range(COMMANDS):
        run_dir = folder / f"run{turn}"
        script = [str(folder / "faults"), str(folder / "checkpoints"), str(folder / "losses"), *options]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "manygrad.launcher.cli", str(HERE / "train.py"), *arguments]
            + ["--run-dir", str(run_dir), "--", *script],
            cwd=folder,
            env=environment(mark, plan.transport),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        (folder / "launcher").write_text(str(process.pid))
        try:
            out, job = ended(process, began + LIMIT_S)
            jobs += [job] if job else []
        except subprocess.TimeoutExpired:
            result.wrong.append(f"it did not end within {LIMIT_S:g} s")
            process.send_signal(signal.SIGABRT)
            process.kill()
            out, _ = process.communicate()
        result.output += out
        if (run_dir / "report.json").exists():
            reports.append(json.loads((run_dir / "report.json").read_text()))
        until = time.monotonic() + LEFT_S
        while (there := left(mark, jobs)) and time.monotonic() < until:
            time.sleep(0.2)
        result.wrong += [f"left behind: {x}" for x in there]
        happened = [f for f in plan.faults if (folder / f.mark).exists()]
        expected = {ENDS_LAUNCHER[f.act] for f in happened if f.act in ENDS_LAUNCHER}
        if process.returncode == 0 or result.wrong:
            break
        if process.returncode not in expected:
            result.wrong.append(f"exit code {process.returncode}, expected 0 or {sorted(expected)}")
            break
    else:
        result.wrong.append(f"the command was given {COMMANDS} times")
    result.took_s = time.monotonic() - began
    if not result.wrong:
        result.wrong += numbers(plan, folder, whole) + causes(happened, reports, result.output)
    result.times = [t for report in reports for t in times(happened, folder, report)]
    return result


def times(happened: list[Fault], folder: Path, report: dict[str, Any]) -> list[tuple[str, float, float]]:
    found = []
    for f in happened:
        at = (folder / f.mark).stat().st_mtime + f.delay_s - report["started"]
        for a, b in itertools.pairwise(report["attempts"]):
            if a["epoch"] == f.epoch and a["at_s"] < at < a["at_s"] + a["took_s"] and b["running_s"] is not None:
                found.append((f.act, a["at_s"] + a["took_s"] - at, b["at_s"] + b["running_s"] - at))
    return found


def summary(found: list[tuple[str, float, float]]) -> list[str]:
    """Medians and worst cases, of faults that are known at once and of those that a deadline finds."""
    lines = []
    for name, by_deadline in (("known at once", False), ("found by a deadline", True)):
        these = [t for t in found if (t[0] in ("stuck", "stop")) == by_deadline]
        if these:
            ended, again = sorted(t[1] for t in these), sorted(t[2] for t in these)
            median = len(these) // 2
            lines.append(
                f"{len(these)} faults {name}: the attempt had ended after {ended[median]:.1f} s "
                f"(worst {ended[-1]:.1f}), all ranks ran again after {again[median]:.1f} s (worst {again[-1]:.1f})"
            )
    return lines


def numbers(plan: Plan, folder: Path, whole: tuple[dict[int, float], str]) -> list[str]:
    """What differs from the undisturbed run."""
    wrong = []
    for rank in range(plan.nodes):
        seen = set()
        # (the line that a killed process was writing may be a half)
        for line in (folder / f"losses.{rank}").read_text().splitlines():
            try:
                step, loss = json.loads(line)
            except ValueError:
                continue
            seen.add(step)
            if loss != whole[0][step]:
                wrong.append(f"rank {rank}, step {step}: loss {loss!r}, undisturbed {whole[0][step]!r}")
        if seen != set(range(STEPS)):
            wrong.append(f"rank {rank} has losses of steps {sorted(seen)}")
        if (folder / f"losses.{rank}.digest").read_text() != whole[1]:
            wrong.append(f"rank {rank} ends with other weights")
    return wrong


def causes(happened: list[Fault], reports: list[dict[str, Any]], output: str) -> list[str]:
    """Attempts whose root cause is not the fault that was brought about, and faults that nobody has noticed."""
    found = [(a["epoch"], a["root_cause"]) for r in reports for a in r["attempts"] if a["root_cause"]]
    last = [(a["epoch"], a["root_cause"]) for r in reports for a in r["attempts"]][-1:]
    wrong = []
    for f in happened:
        kinds = KINDS[f.act]
        if not kinds or f.act == "preempt":
            continue
        # (that copies differ is found by all ranks)
        fits = [c for _, c in found if c["kind"] in kinds and (c["rank"] in (f.rank, None) or f.act == "flip")]
        if not fits and (WARNED in output or (f.delay_s and [(f.epoch, None)] == last)):
            continue  # (it hit the thread that saves, where the training does without; or came when all had finished)
        if not fits and not (f.moment == "exit" or f.act == "terminate"):
            wrong.append(f"no attempt names {f}; they name {[c for _, c in found]}")
    expected = {k for f in happened for k in KINDS[f.act]}
    # SIGTERM, where no Checkpointer is there to save, ends a process as it always has
    if any(f.act == "terminate" for f in happened):
        expected.add("signal")
    wrong += [f"a root cause that nobody brought about: {c}" for _, c in found if c["kind"] not in expected]
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first plan")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other run after so long")
    parser.add_argument("--show", action="store_true", help="print the plans, and run none")
    options = parser.parse_args(argv)
    seeds = range(options.seed, options.seed + options.runs)
    if options.show:
        for seed in seeds:
            print(f"{seed}: {draw(seed)}")
        return 0
    failed, found, done, until = [], [], 0, time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="mgchaos-") as name:
        whole = undisturbed(Path(name))
        for seed in itertools.takewhile(lambda _: time.monotonic() < until, seeds):
            done += 1
            folder = Path(name, str(seed))
            folder.mkdir()
            result = run(draw(seed), folder, whole)
            found += result.times
            print(f"{seed}: {'WRONG' if result.wrong else 'right'}, {result.took_s:.1f} s: {result.plan}", flush=True)
            if result.wrong:
                failed.append(seed)
                print(*(f"    {w}" for w in result.wrong), result.output, sep="\n", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    print(*summary(found), sep="\n")
    print(f"{done - len(failed)} of {done} runs right" + (f"; wrong: seeds {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
