"""Runs that last: on a clock that runs 30 times as fast, so that minutes of silence, and deadlines of a minute,
pass in seconds.

The same in real time: `python -m tests.long_runs`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from manygrad.launcher.guard import AGENTS
from manygrad.launcher.janitor import marked_processes

Launcher = Callable[..., Any]
Left = Callable[[str], list[str]]
RATE = "30"  # (the time-out of the start is given as half an hour)


def processes(run: Any) -> tuple[str, dict[str, list[psutil.Process]]]:
    """The job of a run, and its processes by what they are."""
    found: dict[str, list[psutil.Process]] = {}
    job = ""
    for p in psutil.Process(run.process.pid).children(recursive=True):
        try:
            text, env = " ".join(p.cmdline()), p.environ()
        except psutil.Error:
            continue
        job = job or env.get("MANYGRAD_JOB", "")
        kinds = {
            "launcher.worker": "worker",
            "launcher.supervisor": "supervisor",
            "gcs_server": "gcs",
            "raylet/raylet": "raylet",
        }
        kind = next((name for mark, name in kinds.items() if mark in text), "other")
        found.setdefault(kind, []).append(p)
    found.get("worker", []).sort(key=lambda p: int(p.environ()["RANK"]))
    return job, found


WAIT = """
import os, time
rank = int(os.environ["RANK"])
print("started", rank, flush=True)
end = time.monotonic() + 12
while time.monotonic() < end:
    {body}
print("done", rank)
"""


def test_silence_suspension_and_the_death_of_ray_end_no_run(launcher: Launcher, left_behind: Left) -> None:
    """Six minutes without a word of anybody's but heartbeats; the launcher is suspended for 30 of its 60 s; Ray dies;
    the run's folder goes."""
    run = launcher(
        WAIT.format(body="time.sleep(0.1)"), "--nodes", "2", "--start-timeout", "1800", MANYGRAD_CLOCK_RATE=RATE
    )
    for r in range(2):
        run.wait_for_log(r, "started")
    job, found = processes(run)
    for p in found["gcs"] + found["raylet"]:
        p.kill()
    shutil.rmtree(run.run_dir)
    os.kill(run.process.pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(run.process.pid, signal.SIGCONT)
    run.wait()
    assert run.code == 0, run.err
    assert "done 0" in run.out and "warning: the logs or the report could not be kept" in run.err
    assert left_behind(job) == []


END = """
import atexit, os, threading, time
def linger():
    time.sleep({seconds})
    print("lingered", flush=True)
print("started", flush=True)
if os.environ["RANK"] == "1":
    {start}
"""


@pytest.mark.parametrize("start", ["threading.Thread(target=linger).start()", "atexit.register(linger)"])
def test_what_a_script_leaves_to_its_end_is_waited_for(launcher: Launcher, left_behind: Left, start: str) -> None:
    """A thread that is no daemon, a handler of `atexit`: two minutes, in which the rank is not silent."""
    script = END.format(seconds=4, start=start)
    run = launcher(
        script, "--nodes", "2", "--log-ranks", "all", "--start-timeout", "1800", MANYGRAD_CLOCK_RATE=RATE
    ).wait()
    assert run.code == 0 and "1:1: lingered" in run.out, (run.code, run.out, run.err)
    assert left_behind(run.report["job"]) == []


@pytest.mark.parametrize(
    "who, words",
    [
        ("worker", ["rank 1 failed: no sign of life for 60 s (its process is stopped (SIGSTOP))", "train.py:7"]),
        ("supervisor", ["rank 1 failed: no sign of life of its supervisor", "HEARTBEAT_TIMEOUT_S"]),
    ],
)
def test_a_stopped_process_is_named(launcher: Launcher, left_behind: Left, who: str, words: list[str]) -> None:
    run = launcher(
        WAIT.format(body="time.sleep(0.1)"), "--nodes", "2", "--start-timeout", "1800", MANYGRAD_CLOCK_RATE=RATE
    )
    for r in range(2):
        run.wait_for_log(r, "started")
    time.sleep(0.3)
    job, found = processes(run)
    worker = found["worker"][1]
    victim = worker if who == "worker" else next(p for p in found["supervisor"] if p.pid == worker.ppid())
    os.kill(victim.pid, signal.SIGSTOP)
    run.wait()
    assert run.code == 1, run.err
    for w in words:
        assert w in run.err, (w, run.err)
    assert left_behind(job) == []


def test_the_supervisor_is_killed(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(WAIT.format(body="time.sleep(0.1)"), "--nodes", "2")
    for r in range(2):
        run.wait_for_log(r, "started")
    job, found = processes(run)
    victim = found["worker"][1].ppid()
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    run.wait()
    assert time.monotonic() - began < 6 and run.code == 1
    assert f"rank 1 failed: its supervisor is gone: process {victim} ended" in run.err, run.err
    assert left_behind(job) == []


LATE = """
import sys, time
import numpy as np
from manygrad import Tensor, TinyJit, world

w = Tensor(np.arange(64, dtype=np.float32)).shard(world.devices).contiguous().realize()

@TinyJit
def step(x):
    return (x * w).sum(0)

for i in range(6):
    if i == 5 and world.rank == 1:
        while True:
            {body}
    step(Tensor(np.ones((8, 64), np.float32)).shard(world.devices, axis=0)).numpy()
"""


@pytest.mark.parametrize("transport, body", [("shm", "time.sleep(0.01)"), ("zmq", "i = i + 1 - 1")])
def test_the_rank_that_does_not_come_is_the_headline(
    launcher: Launcher, left_behind: Left, transport: str, body: str
) -> None:
    run = launcher(
        LATE.format(body=body), "--nodes", "3", real_endpoint=True, COLLECTIVE_TIMEOUT_S="3", TRANSPORT=transport
    ).wait()
    assert run.code == 1
    assert "rank 1 failed: it did not come to collective" in run.err and (
        "train.py:15" in run.err or "train.py:16" in run.err
    ), run.err
    assert "waited until its deadline" in run.err and "COLLECTIVE_TIMEOUT_S" in run.err
    assert run.report["root_cause"]["rank"] == 1 and run.report["root_cause"]["kind"] == "late"
    assert left_behind(run.report["job"]) == []


def test_texts_that_are_none(launcher: Launcher, left_behind: Left) -> None:
    """An exception text with lone surrogates, and a run directory whose name is no UTF-8."""
    script = (
        "import os\nif os.environ['RANK'] == '1': raise ValueError('bad \\udcff name')\nimport time; time.sleep(30)"
    )
    odd = os.fsdecode(b"odd-\xff")
    run = launcher(script, "--nodes", "2", "--run-dir", odd).wait()
    assert run.code == 1 and "rank 1 failed: ValueError: bad \\udcff name" in run.err, run.err
    assert "Traceback (most recent call last):" in run.err and run.err.count("Traceback") == 1
    assert "odd-\\udcff" in run.err
    logs = run.run_dir.parent / odd
    assert "bad \\udcff name" in (logs / "rank1.log").read_text()


@pytest.mark.parametrize("after_s", [0.1, 0.2, 0.4, 0.8, 1.6])
def test_ctrl_c_at_the_very_start(launcher: Launcher, after_s: float) -> None:
    run = launcher("", "--nodes", "2")
    time.sleep(after_s)
    assert run.still_there()
    os.killpg(run.process.pid, signal.SIGINT)
    run.wait()
    if run.err == "" and run.code == -signal.SIGINT:
        pytest.skip(f"Python itself had not started after {after_s} s")
    assert run.code == 130 and "Traceback" not in run.err, (run.code, run.err)
    assert "SIGINT before the workers had started" in run.err
    assert not run.run_dir.exists()
    assert run.still_there() == []


@pytest.mark.parametrize("victim", ["gcs_server", "raylet", "DashboardAgent", "RuntimeEnvAgent"])
def test_ray_dies_at_the_start(launcher: Launcher, left_behind: Left, victim: str) -> None:
    run = launcher("", "--nodes", "2")
    until, job, found = time.monotonic() + 50, "", {v: k for k, v in AGENTS.items()}.get(victim, b"").decode()
    while not job:
        assert time.monotonic() < until and run.process.poll() is None
        for p in psutil.Process(run.process.pid).children(recursive=True):
            try:
                if p.name() == victim or (found and found in " ".join(p.cmdline())):
                    job = p.environ().get("MANYGRAD_JOB", "")  # empty for an instant within exec
                    if job:
                        time.sleep(0.3 if found else 0)  # (so long the guard may take to see a child of the raylet)
                        p.kill()
                        break
            except psutil.Error:
                pass  # it has ended, or not begun
        time.sleep(0.01)
    began = time.monotonic()
    run.wait()
    assert time.monotonic() - began < 8
    named = [f"Ray's {v}" for v in (victim, "raylet") if v == victim or found]  # (a raylet ends with its agents)
    assert run.code == 69 and any(n in run.err for n in named), run.err
    assert "ended while the run was starting" in run.err, run.err
    assert "Traceback" not in run.err and left_behind(job) == []


@pytest.mark.parametrize(
    "limit, words",
    [
        ("ulimit -n 100", "a process may open 100 files here (`ulimit -n`)"),
        ("export PYTHONOPTIMIZE=2", "Ray does not start without them; use PYTHONOPTIMIZE=1"),
        ("ulimit -v 8000000", "the address space is limited to 8192000000 bytes (`ulimit -v`)"),
    ],
)
def test_surroundings_in_which_nothing_starts_are_named(limit: str, words: str, tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text("")
    line = f"{limit}; exec {sys.executable} -P -m manygrad.launcher.cli train.py --nodes 2"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 69) and words in done.stderr, (done.returncode, done.stderr)


def test_a_standard_stream_that_is_closed(tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text("print('the end')")
    line = f"exec {sys.executable} -P -m manygrad.launcher.cli train.py --nodes 2 2>&- <&-"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and "the end" in done.stdout, done


def test_a_full_disk(launcher: Launcher, tmp_path: Any) -> None:
    """The run's folder is on a file system of one page."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of one page needs root and mount")
    try:
        script = "print('x' * 100000, flush=True)\nprint('the end')"
        run = launcher(script, "--nodes", "2", "--run-dir", str(folder / "run")).wait()
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert run.code == 0 and "the end" in run.out, (run.code, run.err)
    assert run.err.count("launcher: warning: ") == 1 and "No space left" in run.err and "Traceback" not in run.err


def listening(pids: set[int]) -> dict[str, int]:
    """`address:port` (as `ss` writes them) of the TCP sockets on which these processes listen."""
    found = {}
    for c in psutil.net_connections("inet"):
        if c.pid in pids and c.status == psutil.CONN_LISTEN:
            found[f"{c.laddr.ip}:{c.laddr.port}"] = c.pid
    return found


def test_what_others_on_this_machine_see(launcher: Launcher) -> None:
    """Every socket listens on loopback only, and every file outside the run directory
    lies in a folder that is ours alone."""
    run = launcher(WAIT.format(body="time.sleep(0.1)"), "--nodes", "2", real_endpoint=True, TRANSPORT="zmq")
    for r in range(2):
        run.wait_for_log(r, "started")
    job, _ = processes(run)
    folder = f"/tmp/mg-{job}"
    assert os.stat(folder).st_mode & 0o777 == 0o700 and os.stat(f"{folder}/token").st_mode & 0o777 == 0o600
    pids = {run.process.pid, *marked_processes(job, folder)}
    sockets = listening(pids)
    texts = [" ".join(psutil.Process(p).cmdline()) for p in pids if psutil.pid_exists(p)]
    # (they would slow the start, and nobody needs them)
    assert not [t for t in texts if "monitor.py" in t or "dashboard.py" in t], texts
    assert len(sockets) > 4, sockets
    assert all(a.startswith(("127.0.0.1:", "::ffff:127.0.0.1:")) for a in sockets), sockets
    files = {f.path for p in pids if psutil.pid_exists(p) for f in psutil.Process(p).open_files()}
    ours = [f for f in files if f.startswith("/tmp/") and not f.startswith((folder, str(run.run_dir.parent)))]
    assert not [f for f in ours if job in f], ours
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait().code == 143


def test_a_stranger_is_not_heard() -> None:
    """A process that knows the job, its address and the ranks' names, and has no key of theirs."""
    code = """
import sys, zmq
s = zmq.Context().socket(zmq.DEALER)
s.identity = b"worker-1"
s.linger = 0
s.connect(sys.argv[1])
s.send_multipart([bytes(20), b'{"type": "failed"}'])
print(s.poll(700))
"""
    from manygrad.launcher.control import ControlServer

    server = ControlServer(2)
    stranger = subprocess.Popen([sys.executable, "-c", code, server.address], stdout=subprocess.PIPE, text=True)
    events = []
    while stranger.poll() is None:
        events += server.receive(0.05)
    assert stranger.communicate()[0] == "0\n" and events == [] and server.conversations == {}
    server.close()
