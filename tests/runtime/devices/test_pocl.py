"""Each process has a folder of its own in which pocl compiles, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.opencl import needs_opencl

PROGRAM = """
import os, sys
from manygrad import Tensor
print((Tensor([1.0, 2.0], device="OPENCL") + 1).tolist(), os.environ["POCL_CACHE_DIR"], flush=True)
sys.stdin.readline()
"""


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that has computed, and what it said."""
    env = {**os.environ, "POCL_CACHE_DIR": str(folder)}
    p = subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, text=True, stdin=-1, stdout=-1)
    assert p.stdout is not None
    return p, p.stdout.readline().strip()


def end(p: subprocess.Popen[str]) -> None:
    p.communicate("\n", timeout=60)
    assert p.returncode == 0


@needs_opencl
def test_processes_compile_in_folders_of_their_own(tmp_path: Path) -> None:
    first, said = start(tmp_path)
    second, _ = start(tmp_path)
    assert said == f"[2.0, 3.0] {tmp_path}"  # what others are told is what it was
    assert {int(d.name.rpartition("-")[2]) for d in tmp_path.iterdir()} == {first.pid, second.pid}
    end(second)
    assert [int(d.name.rpartition("-")[2]) for d in tmp_path.iterdir()] == [first.pid]
    end(first)
    assert list(tmp_path.iterdir()) == []


@needs_opencl
def test_the_folder_of_a_process_that_was_killed_goes_with_the_next(tmp_path: Path) -> None:
    killed, _ = start(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    assert len(list(tmp_path.iterdir())) == 1
    following, _ = start(tmp_path)
    assert [int(d.name.rpartition("-")[2]) for d in tmp_path.iterdir()] == [following.pid]
    end(following)
