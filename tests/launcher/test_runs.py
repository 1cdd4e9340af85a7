"""Real runs of the command: what users see, exit codes, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from manygrad.launcher import worker

Launcher = Callable[..., Any]
Left = Callable[[str], list[str]]
LOOP = """
import os, sys, time
from manygrad.runtime.current import current
rank = int(os.environ["RANK"])
print("started", rank, flush=True)
{body}
for i in range(600):
    time.sleep(0.1)
"""


def test_in_this_process_without_ray(launcher: Launcher) -> None:
    run = launcher(
        """
        import sys
        from manygrad import world
        assert __name__ == "__main__" and "ray" not in sys.modules
        print(world.devices, sys.argv)
        sys.exit(5)
    """,
        "--devices-per-node",
        "3",
        "--lr",
        "1",
    ).wait()
    assert run.code == 5 and run.out == "('CPU:0', 'CPU:1', 'CPU:2') ['train.py', '--lr', '1']\n"


@pytest.mark.parametrize("nodes", [(), ("--nodes", "2")], ids=["here", "2 nodes"])
def test_the_kind_of_device_is_that_of_the_world_and_of_new_tensors(launcher: Launcher, nodes: tuple[str, ...]) -> None:
    """PYTHON, whose kernels are slow but need nothing."""
    run = launcher(
        """
        import os
        from manygrad import Tensor, world
        x = Tensor([1.0, 2.0, 3.0])
        total = Tensor([1.0, 2.0]).shard(world.devices, axis=0).sum()
        print(x.device, len(world.devices), world.devices[0][:8], os.environ["DEVICE"], total.item())
    """,
        "--device",
        "python",
        *nodes,
        real_endpoint=True,
        DEVICE="CPU",
    ).wait()
    n = 2 if nodes else 1
    assert run.code == 0, run.err
    assert run.out == f"{'0:0: ' if nodes else ''}PYTHON:0 {n} PYTHON:0 PYTHON {3.0}\n"


def test_success(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(
        """
        import os, sys
        from manygrad import world
        assert __name__ == "__main__" and "ray" not in sys.modules and sys.stdin.read() == ""
        e = os.environ
        assert (e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (e["LOCAL_RANK"], e["GROUP_RANK"]) == (e["RANK"], e["RANK"])
        assert int(e["MASTER_PORT"]) > 0 and int(e["THREADS"]) >= 1
        assert e["OMP_NUM_THREADS"] == e["THREADS"] and e["MINE"] == "yes"
        print("rank", e["RANK"], world.rank, world.devices, sys.argv[1:])
        print("same for all", file=sys.stderr)
    """,
        "--nodes",
        "3",
        "--devices-per-node",
        "2",
        "--",
        "--nodes",
        "9",
        real_endpoint=True,
        MINE="yes",
    ).wait()
    assert run.code == 0, run.err
    assert run.out == f"0:0: rank 0 0 {tuple(f'CPU:{i}@{r}' for r in range(3) for i in range(2))} ['--nodes', '9']\n"
    assert (
        "[ranks 0-2] same for all" in run.err
        and "3 workers share this machine" in run.err
        and str(run.run_dir) in run.err
    )
    assert [r["exit_code"] for r in run.report["ranks"]] == [0, 0, 0]
    assert (
        0
        < run.report["startup_s"]["ray"]
        <= run.report["startup_s"]["join"]
        <= run.report["startup_s"]["run"]
        <= run.report["duration_s"]
    )
    assert "rank 2 2" in (run.run_dir / "rank2.log").read_text()
    assert left_behind(run.report["job"]) == []


@pytest.mark.parametrize(
    "body, code, words",
    [
        (
            "if rank == 1: raise ValueError('bad batch')",
            1,
            ["rank 1 failed: ValueError: bad batch", "raise ValueError('bad batch')", "train.py:6"],
        ),
        ("if rank == 1: sys.exit(7)", 7, ["rank 1 failed: sys.exit(7)", "exit code 7"]),
        (
            "current().communication.hooks.make_plan(rank, f'all-reduce ({rank},) at train.py:6', '')()",
            1,
            [
                "PlanMismatch: the ranks run different programs: plan 1 differs",
                "rank 0: all-reduce (0,) at train.py:6",
                "rank 1: all-reduce (1,) at train.py:6",
            ],
        ),
    ],
)
def test_a_rank_fails(launcher: Launcher, left_behind: Left, body: str, code: int, words: list[str]) -> None:
    run = launcher(LOOP.format(body=body), "--nodes", "2").wait()
    assert run.code == code
    for w in [*words, "Consequences:", ": stopped", "Last events of rank ", "Next: ", f"exit code {code}"]:
        assert w in run.err, (w, run.err)
    for r in run.report["ranks"]:
        assert any("Started: connecting -> running" in line for line in r["story"]), r["story"]
    rank0 = (run.run_dir / "rank0.log").read_text()
    assert ("PlanMismatch" if "plan" in body else "LaunchAborted: rank 1 failed") in rank0
    assert left_behind(run.report["job"]) == []


THREADS = {
    "at its end": """
threads = current().threads
def work():
    raise ValueError("nobody waited")
threads.start("manygrad-test", work).join()
sys.exit()
""",
    "of the channel": """
if rank == 1:
    channel = current().communication.hooks.make_plan.args[0]
    channel._progress = lambda: [].index(0)
""",
}


@pytest.mark.parametrize("where", THREADS)
def test_an_error_in_a_thread_of_the_worker_is_told(launcher: Launcher, left_behind: Left, where: str) -> None:
    """With the thread's name and its traceback; that of the control channel goes to the rank's log, there is no other
    way."""
    run = launcher(LOOP.format(body=THREADS[where]), "--nodes", "2").wait()
    if where == "at its end":
        words = ["failed: ValueError: nobody waited", "manygrad-test", "in work", 'raise ValueError("nobody waited")']
    else:
        words = ["rank 1 failed: ", "LaunchAborted: the control channel broke: ValueError", "manygrad-control"]
    for w in words:
        assert w in run.err, (w, run.err)
    assert run.code == 1 and "Traceback" in run.err and run.took_s < 40
    assert left_behind(run.report["job"]) == []


@pytest.mark.parametrize(
    "error, title",
    [
        ("ValueError()", "rank 1 failed: ValueError\n"),
        ("Mute(SystemExit)", "rank 1 failed: Mute: (its __str__ raises SystemExit)\n"),
    ],
)
def test_a_failure_without_words(launcher: Launcher, left_behind: Left, error: str, title: str) -> None:
    """An exception with no text, or whose text cannot be had, is named with its rank and line like any other."""
    body = f"""
class Mute(Exception):
    def __str__(self):
        raise self.args[0](0)
if rank == 1:
    raise {error}
"""
    run = launcher(LOOP.format(body=body), "--nodes", "2").wait()
    assert run.code == 1 and title in run.err and "at train.py:11 in <module>" in run.err, run.err
    assert f"raise {error}" in run.err and run.err.count("Traceback") == 1 and "rank 0: stopped" in run.err, run.err
    cause = run.report["root_cause"]
    assert (cause["rank"], cause["kind"]) == (1, "exception") and "train.py:11" in cause["where"]
    assert left_behind(run.report["job"]) == []


@pytest.mark.parametrize("error", [ValueError, TypeError, SystemExit, KeyboardInterrupt])
def test_the_text_of_a_failure_that_has_none(error: type[BaseException]) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise error(0)

    assert worker.message_of(RuntimeError("")) == ""
    assert worker.message_of(Mute()) == f"(its __str__ raises {error.__name__})"
    assert "Mute: " in worker.text_of(Mute(), None)


def test_a_rank_is_killed(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(
        LOOP.format(body="import subprocess; subprocess.Popen(['sleep', '1000'])"), "--nodes", "3", real_endpoint=True
    )
    for r in range(3):
        run.wait_for_log(r, "started")
    victim = next(
        p
        for p in psutil.Process(run.process.pid).children(recursive=True)
        if "manygrad.launcher.worker" in p.cmdline() and p.environ()["RANK"] == "1"
    )
    began = time.monotonic()
    victim.kill()
    run.wait()
    assert time.monotonic() - began < 5
    assert run.code == 128 + 9
    assert (
        "rank 1 failed: killed by SIGKILL" in run.err
        and "ranks 0, 2: stopped: LaunchAborted" in run.err
        and f"pid {victim.pid}" in run.err
    )
    assert left_behind(run.report["job"]) == []


def test_what_a_rank_detaches_ends_with_it(launcher: Launcher, left_behind: Left) -> None:
    """A daemon: an orphan in a session of its own, with nothing of the run in its environment.
    And dead ones do not stay as zombies."""
    run = launcher(
        """
        import os, subprocess, sys, time
        supervisor = os.getppid()
        for body in ("time.sleep(1000)", "0"):
            start = f"import os, time; os.fork() or (os.setsid(), {body})"
            subprocess.run([sys.executable, "-c", start], env={}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        children = f"/proc/{supervisor}/task/{supervisor}/children"
        while len(open(children).read().split()) != 2:
            time.sleep(0.01)
        print("children", open(children).read().split(), os.getpid(), flush=True)
        """,
        "--nodes",
        "2",
        "--log-ranks",
        "all",
    ).wait()
    assert run.code == 0, run.err
    found = {
        int(p)
        for r in range(2)
        for p in (run.run_dir / f"rank{r}.log").read_text().split("[")[1].split("]")[0].replace("'", "").split(", ")
    }
    assert len(found) == 4 and not [p for p in found if psutil.pid_exists(p)], found
    assert left_behind(run.report["job"]) == []


def test_ctrl_c(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(
        LOOP.format(body="if rank == 0: signal = __import__('signal'); signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
        "--nodes",
        "2",
    )
    run.wait_for_log(1, "started")
    began = time.monotonic()
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: Ray's processes get it too
    run.wait()
    assert run.code == 130 and time.monotonic() - began < 5
    assert "interrupted by Ctrl-C" in run.err and "ranks 0-1: stopped: LaunchInterrupted" in run.err
    assert left_behind(run.report["job"]) == []


@pytest.mark.parametrize("code", [0, 130])
def test_ctrl_c_reaches_a_script_that_handles_it(launcher: Launcher, left_behind: Left, code: int) -> None:
    """The script of one rank ends both when it is done, or by the exception that it raises."""
    act = "asked.append(signum)" if code == 0 else "raise KeyboardInterrupt"
    run = launcher(
        f"""
        import os, signal, time
        import numpy as np
        from manygrad import Tensor, broadcast_, world
        asked = []
        def take(signum, frame):
            {act}
        if world.rank == 0:
            signal.signal(signal.SIGINT, take)
            time.sleep(1)  # (the launcher hears of it)
        over = False
        print("started", flush=True)
        while not over:
            told = Tensor(np.array([len(asked)], np.int32)).clone()
            broadcast_(told)
            over = bool(told.item())
        print("ended", asked, flush=True)
        """,
        "--nodes",
        "2",
        real_endpoint=True,
    )
    run.wait_for_log(1, "started")
    run.wait_for_log(0, "started")
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait()
    assert run.code == code, run.err
    assert "SIGINT goes to rank 0, whose script ends by itself" in run.err
    assert ("interrupted by Ctrl-C" in run.err) == (code == 130)
    if code == 0:
        assert [(run.run_dir / f"rank{r}.log").read_text().count("ended") for r in range(2)] == [1, 1]
    assert left_behind(run.report["job"]) == []


def test_ctrl_c_while_starting(launcher: Launcher, left_behind: Left) -> None:
    run = launcher("", "--nodes", "2")
    until = time.monotonic() + 20
    jobs: list[str] = []
    while not jobs:  # the environment is empty for an instant within exec
        servers = [p for p in psutil.Process(run.process.pid).children() if "gcs_server" in p.name()]
        jobs = [job for p in servers if (job := p.environ().get("MANYGRAD_JOB"))]
        assert time.monotonic() < until
        time.sleep(0.02)
    job = jobs[0]
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait()
    assert run.code == 130 and "SIGINT before the workers had started" in run.err, run.err
    assert left_behind(job) == []


def test_the_driver_is_killed(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(
        LOOP.format(body="print('job', os.environ['MANYGRAD_JOB'], 'end', flush=True)"),
        "--nodes",
        "2",
        real_endpoint=True,
    )
    for r in range(2):
        run.wait_for_log(r, "end")
    job = (run.run_dir / "rank0.log").read_text().split()[-2]
    assert left_behind(job)
    os.kill(run.process.pid, signal.SIGKILL)
    until = time.monotonic() + 5
    while left_behind(job):
        assert time.monotonic() < until, left_behind(job)
        time.sleep(0.05)


def test_a_stuck_worker_and_a_time_out(launcher: Launcher, left_behind: Left) -> None:
    body = (
        "import signal, ctypes\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nctypes.CDLL(None).sleep(60)"
    )
    run = launcher(
        LOOP.format(body=body), "--nodes", "2", "--timeout", "5", "--grace", "1"
    ).wait()  # (the start is within the time)
    assert run.code == 124 and "took longer than its time-out of 5 s" in run.err and "train.py:8" in run.err
    assert run.report["duration_s"] - run.report["startup_s"]["ray"] < 12 and left_behind(run.report["job"]) == []


def test_bad_input(launcher: Launcher) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        run = launcher("", "--nodes", "2", "--port", str(s.getsockname()[1])).wait()
        assert run.code == 2 and "already in use" in run.err
    run = launcher("", "--nodes", "9999").wait()
    assert run.code == 69 and "9999 nodes were asked for" in run.err
    run = launcher("", "--nodes", "2", "--address", "127.0.0.1:1").wait()
    assert run.code == 2 and "nothing answers there" in run.err
