"""`launcher status`, `stacks` and `stop` of a run that goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manygrad.launcher import inquiries
from manygrad.launcher.inquiries import _stopped

Launcher = Callable[..., Any]
Left = Callable[[str], list[str]]
WAITS = """
import threading, time
from manygrad import world

def waits_for_data():
    print("here", flush=True)
    while True:
        time.sleep(0.1)

def beside():
    threading.Event().wait()

threading.Thread(target=beside, name="beside", daemon=True).start()
waits_for_data()
"""


def ask(question: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", question, str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=run_dir.parent)


def test_status_stacks_and_stop(launcher: Launcher, left_behind: Left) -> None:
    run = launcher(WAITS, "--nodes", "2")
    for rank in range(2):
        run.wait_for_log(rank, "here")
    found = ask("status", run.run_dir)
    assert found.returncode == 0 and "attempt 1, for " in found.stdout, found
    assert "rank 0 on " in found.stdout and ": running" in found.stdout
    found = ask("stacks", run.run_dir)
    for words in ("rank 0:\n  thread MainThread:\n", "rank 1:\n", "in waits_for_data", "thread beside:", "in beside"):
        assert words in found.stdout, found
    pid = int(found.stdout and next(w for w in ask("status", run.run_dir).stdout.split("pid ")[2].split(":")))
    os.kill(pid, signal.SIGSTOP)  # rank 1, whose stack nobody can read now
    found = ask("stacks", run.run_dir)
    assert "in waits_for_data" in found.stdout and "rank 1:\n  " in found.stdout.replace("\r", ""), found
    assert "SIGSTOP" in found.stdout or "no answer within" in found.stdout
    job = json.loads((run.run_dir / "running.json").read_text())
    with socket.socket(socket.AF_UNIX) as stranger:  # nonsense is no answer, and harms nothing
        stranger.connect(job["socket"])
        stranger.sendall(b"\x80\x04 no JSON\n")
        assert stranger.recv(100) == b""
    assert ask("stop", run.run_dir).returncode == 0
    run.wait()
    assert run.code == 143 and not (run.run_dir / "running.json").exists(), run.err
    found = ask("status", run.run_dir)
    assert found.returncode == 2 and "has ended, with exit code 143" in found.stderr
    assert left_behind(job["job"]) == []


def stopped(process: subprocess.Popen[bytes], address: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """`_stopped` of a run whose launcher is `process`; (exit code, what it says)."""
    code = _stopped({"pid": process.pid, "socket": address, "stop_s": 0.3}, "runs/x")
    return code, capsys.readouterr().err


def test_stop_has_a_deadline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that answers but goes on is told a second time; one that is suspended is named."""
    monkeypatch.setattr(inquiries, "STOP_S", 3.0)
    address = str(tmp_path / "s")
    told: list[Any] = []
    monkeypatch.setattr(
        inquiries, "_asked", lambda where, question: (told.append(question), process.kill(), process.wait())
    )
    Path(address).touch()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    code, said = stopped(process, address, capsys)
    assert code == 0 and told == ["stop"] and "told again" in said
    monkeypatch.undo()
    monkeypatch.setattr(inquiries, "STOP_S", 0.3)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    try:
        code, said = stopped(process, address, capsys)
    finally:
        process.kill()
        process.wait()
    assert code == 124 and f"kill -KILL {process.pid}" in said and "runs/x does not end" in said


def test_a_suspended_launcher_is_not_waited_for(launcher: Launcher, left_behind: Left, tmp_path: Path) -> None:
    run = launcher(WAITS, "--nodes", "1")
    run.wait_for_log(0, "here")
    job = json.loads((run.run_dir / "running.json").read_text())
    assert 20 < job["stop_s"] < 60
    os.kill(job["pid"], signal.SIGSTOP)
    found = ask("stop", run.run_dir)
    assert found.returncode == 124 and f"does not answer within 8 s; is process {job['pid']} suspended" in found.stderr
    os.kill(job["pid"], signal.SIGCONT)  # (it finds the question)
    run.wait()
    assert run.code == 143 and left_behind(job["job"]) == []


@pytest.mark.parametrize("name, words", [("nowhere", "there is no run directory"), ("", "no run answers in ")])
def test_where_no_run_is(tmp_path: Path, name: str, words: str) -> None:
    found = ask("stacks", tmp_path / name)
    assert found.returncode == 2 and words in found.stderr


def test_a_script_of_that_name_is_run(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("import sys; print('a script', sys.argv)")
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "status", "x"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert found.stdout == "a script ['status', 'x']\n", found
