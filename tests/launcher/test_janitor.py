"""What a sweep finds, where processes come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manygrad.launcher import janitor

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


@linux
@pytest.mark.parametrize("shown", [0, 1, 3])
def test_a_process_that_is_being_started_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    """While a process is in the system's `exec`, its environment reads as empty: in 61 of 7,549 looks."""
    job, read, looks = f"sweep{os.getpid()}", janitor._read, [0]
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, janitor.MARK: job})

    def in_exec(path: str) -> bytes:
        if path == f"/proc/{child.pid}/environ":
            looks[0] += 1
            return b"" if looks[0] <= shown else read(path)
        return read(path)

    monkeypatch.setattr(janitor, "_read", in_exec)
    janitor.sweep(job, str(tmp_path / "folder"))
    assert not os.path.exists(f"/proc/{child.pid}") and looks[0] > shown
    child.wait()  # (collected by the sweep)


@linux
def test_a_process_without_environment_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been given none; and it is not ours."""
    child = subprocess.Popen(["sleep", "60"], env={})
    try:
        time.sleep(0.2)
        monkeypatch.setattr(janitor, "STARTING_S", 0.1)
        began = time.monotonic()
        janitor.sweep(f"sweep{os.getpid()}", str(tmp_path / "folder"))
        assert time.monotonic() - began < 1.0 and child.poll() is None
    finally:
        child.kill()
        child.wait()


@linux
def test_a_process_that_is_forked_and_not_yet_executed_is_not_missed(tmp_path: Path) -> None:
    """Until its `exec` it has this process's environment, in which there is no mark; an interrupt may come between."""
    script = f"""
import os, sys, time
from manygrad.launcher import janitor
job = f"sweep{{os.getpid()}}"
child = os.fork()
if not child:
    time.sleep(0.3)
    os.execve("/bin/sleep", ["sleep", "60"], {{janitor.MARK: job}})
janitor.sweep(job, {str(tmp_path / "folder")!r})
print(os.path.exists(f"/proc/{{child}}"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == ("False\n", "")
