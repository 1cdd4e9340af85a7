"""The `launcher` command."""

from __future__ import annotations

import difflib
import importlib.util
import os
import runpy
import signal
import sys
import traceback
from types import FrameType

from manygrad.errors import EXIT_TIMEOUT, Infeasible, UsageError

from .command_line import help_text, parse
from .inquiries import QUESTIONS, inquire
from .job import Job

TOOLS = {
    "convert": "manygrad.checkpoint.convert",
    "doctor": "manygrad.launcher.doctor",
    "replay": "manygrad.runtime.engine.replay",
}
WARM_STEPS = 5  # the first as it comes, the second recorded, then replays; one more that reads, say


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (and ends the process itself after a run on workers)."""
    open_standard_streams()
    words = sys.argv[1:] if argv is None else argv
    if len(words) == 2 and words[0] in QUESTIONS and not os.path.exists(words[0]):
        return inquire(*words)
    if words and words[0] in TOOLS and not os.path.exists(words[0]):
        sys.argv = [f"launcher {words[0]}", *words[1:]]
        runpy.run_module(TOOLS[words[0]], run_name="__main__")  # (which ends by SystemExit)
    if len(words) > 1 and words[0] == "warm" and not os.path.exists("warm"):
        warm(int(os.environ.get("LAST_STEP") or WARM_STEPS))
        words = words[1:]
    try:
        job = parse(words, dict(os.environ))
        if job.kind == "help":
            print(help_text(), end="")
            return 0
        check_target(job)
        if not job.nodes:
            return run_here(job)
        return run_on_workers(job)
    except (UsageError, Infeasible) as e:
        print(f"launcher: {e}", file=sys.stderr)
        return e.exit_code


def warm(steps: int) -> None:
    """The run ends after so many steps: what they compiled is in the disk cache."""
    from manygrad.tensor.environment import LAST_STEP

    os.environ["LAST_STEP"] = str(steps)  # (of workers; this process has read it)
    LAST_STEP.common = steps


def open_standard_streams() -> None:
    """A stream that was closed (`2>&-`) goes nowhere: what is opened next would take its number, and be written to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def check_target(job: Job) -> None:
    """The script must exist; if not, say which names are near."""
    target = job.target
    if job.kind == "module":
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(target) is not None
        except (ImportError, ValueError):
            found = False
        sys.path.remove(os.getcwd())
        if not found:
            raise UsageError(f"module {target!r} not found; it must be importable from {os.getcwd()}")
    elif os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise UsageError(f"{target} is a folder without __main__.py; give a script")
    elif not os.path.exists(target):
        folder = os.path.dirname(target) or "."
        names = [n for n in os.listdir(folder) if n.endswith(".py")] if os.path.isdir(folder) else []
        near = difflib.get_close_matches(os.path.basename(target), names, 3, 0.5)
        hint = (
            f"did you mean {', '.join(os.path.join(os.path.dirname(target), n) for n in near)}?"
            if near
            else f"looked in {os.path.abspath(folder)}"
        )
        raise UsageError(f"script {target!r} not found; {hint}")
    elif not os.access(target, os.R_OK):
        raise UsageError(f"script {target!r} cannot be read")


def run_here(job: Job) -> int:
    """A world of one: run the script in this process. Its exceptions and exit codes are Python's own."""
    from manygrad.multi.world import Membership
    from manygrad.runtime.current import current
    from manygrad.tensor.environment import DEVICE

    from .worker import run_script

    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on it is the script's
    world = current().world
    if job.device:  # (DEVICE was read when manygrad was imported)
        os.environ["DEVICE"] = DEVICE.common = world.device_kind = job.device
    world.show(Membership(devices_per_node=job.devices_per_node))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ[name] = value
    if limit_s := job.timeout_s:

        def expired(signum: int, frame: FrameType | None) -> None:
            print(f"launcher: the run took longer than its time-out of {limit_s:g} s", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(EXIT_TIMEOUT)

        signal.signal(signal.SIGALRM, expired)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        run_script(job.kind, job.target, job.args)
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def run_on_workers(job: Job) -> int:
    """Hand the job to the driver, print the report, and end: nothing of ours is running any more."""
    from .driver import run
    from .logs import write

    try:
        outcome = run(job, last=True)
        text, code = outcome.report, outcome.exit_code
    except (UsageError, Infeasible) as e:
        text, code = f"launcher: {e}\n", e.exit_code
    except BaseException:  # a defect of ours: Ray's own exception hook would wait for a Ray that is gone
        text, code = traceback.format_exc(), 1
    write(sys.stdout, "")
    write(sys.stderr, text)
    os._exit(code)  # a Ray of ours is gone already; its client library must not wait for it


if __name__ == "__main__":
    raise SystemExit(main())
