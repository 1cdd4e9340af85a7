"""Faults while a checkpoint is written: a process that dies before any system call, full, read-only and vanished
folders. What was committed before can be loaded afterwards, and the next save works."""

from __future__ import annotations

import builtins
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.checkpoint import Checkpointer, CheckpointError

CALLS = [
    *((os, n) for n in ("fsync", "rename", "mkdir", "unlink", "rmdir", "open", "scandir", "listdir", "stat")),
    (builtins, "open"),
]


class Killed(BaseException):
    """The process is dead: from here on no call of it reaches the disk."""


class Faults:
    """Counts the calls that a save makes; from number `at` on they all raise."""

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def wrapped(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.count >= self.at:
                raise Killed
            self.count += 1
            made = f(*args, **kwargs)
            return Written(self, made) if f is builtins_open and "w" in str(args[1:]) else made

        return call


class Written:
    """A file whose writes count, too; the last one before death is torn."""

    def __init__(self, faults: Faults, file: Any):
        self.faults, self.file = faults, file

    def write(self, data: Any) -> int:
        if self.faults.count >= self.faults.at:
            self.file.write(data[: len(data) // 2])
            raise Killed
        self.faults.count += 1
        return int(self.file.write(data))

    def fileno(self) -> int:
        return int(self.file.fileno())

    def __enter__(self) -> Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


builtins_open = builtins.open


@contextmanager
def killed_at(at: int) -> Iterator[Faults]:
    faults = Faults(at)
    saved = [(where, name, getattr(where, name)) for where, name in CALLS]
    try:
        for where, name, f in saved:
            setattr(where, name, faults.wrapped(f))
        yield faults
    finally:
        for where, name, f in saved:
            setattr(where, name, f)


def values(step: int) -> np.ndarray:
    return np.full((5, 3), step, np.float32) + np.arange(3, dtype=np.float32)


def test_death_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Also in the removal of older ones (keep=1), and in a step that is saved again."""
    w = Tensor(values(0)).realize()
    moments, ends = 0, set()
    while True:
        folder = tmp_path / str(moments)
        checkpoints = Checkpointer(folder, {"w": w}, keep=1)
        for step in (1, 2):
            w.assign(values(step)).realize()
            checkpoints.save(step)
        w.assign(values(3)).realize()
        died = False
        with killed_at(moments) as faults:
            try:
                checkpoints.save(2 if moments % 2 else 3)
            except Killed:
                died = True
        w.assign(values(9)).realize()
        found = Checkpointer(folder, {"w": w}, keep=1).resume()
        kept = int(w.numpy()[0, 0])
        assert (found, kept) in {(2, 2), (3, 3), (2, 3)}, f"killed before call {moments}"
        ends.add(kept)
        w.assign(values(4)).realize()
        checkpoints.save(4)
        assert sorted(p.name for p in folder.iterdir()) == ["step-00000004"]
        shutil.rmtree(folder)
        moments += 1
        if not died:
            assert faults.count < moments
            break
    assert moments > 25 and ends == {2, 3}


FULL = """
import os, sys
import numpy as np
from manygrad import Tensor
from manygrad.checkpoint import Checkpointer
folder, = sys.argv[1:]
w = Tensor(np.ones((700, 700), np.float32)).realize()
small = Tensor(np.ones(4, np.float32)).realize()
Checkpointer(folder, {"w": small}).save(1)
checkpoints = Checkpointer(folder, {"w": w}, on_error="warn")
checkpoints.save(2)
print("went on", sorted(os.listdir(folder)))
Checkpointer(folder, {"w": w}).save(2)
"""


def check_full(done: subprocess.CompletedProcess[str], advice: str) -> None:
    assert done.returncode == 1
    assert "went on ['step-00000001']" in done.stdout, done.stdout + done.stderr
    assert "The training goes on without this checkpoint" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "CheckpointError: saving " in last and "step-00000002" in last and advice in last, done.stderr


def test_a_full_disk(tmp_path: Path) -> None:
    script, disk = tmp_path / "full.py", tmp_path / "disk"
    script.write_text(FULL)
    disk.mkdir()
    inside = f"mount -t tmpfs -o size=1m tmpfs {disk} && exec {sys.executable} {script} {disk}"
    probe = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", disk], capture_output=True)
    if probe.returncode:
        pytest.skip("this machine gives no mount namespaces")
    command = ["unshare", "--mount", "sh", "-c", inside]
    check_full(subprocess.run(command, capture_output=True, text=True, timeout=120), "the disk is full")


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited = FULL.replace(
        "Checkpointer(folder", "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))\nCheckpointer(folder", 1
    )
    script.write_text(limit + limited)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "checkpoints"], capture_output=True, text=True, timeout=120
    )
    check_full(done, "ulimit -f")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    w = Tensor(values(0))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="saving .*file.* failed"):
        Checkpointer(tmp_path / "file", {"w": w}).save(1)
    with pytest.raises(CheckpointError, match="/proc/none"):
        Checkpointer("/proc/none", {"w": w}).save(1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_vanishes(asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its parts and its index; an asynchronous save says so at the next call, and the one after that works."""
    checkpoints = Checkpointer(tmp_path / "c", {"w": Tensor(values(1))}, asynchronous=asynchronous)
    whole = os.fsync

    def vanish(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", whole)
        shutil.rmtree(tmp_path / "c")
        raise OSError(2, "No such file or directory")

    checkpoints.save(1)
    checkpoints.finish()
    monkeypatch.setattr(os, "fsync", vanish)
    if asynchronous:
        checkpoints.save(2)
        with pytest.raises(CheckpointError, match="step-00000002.*it is not there"):
            checkpoints.save(3)
    else:
        with pytest.raises(CheckpointError, match="step-00000002.*it is not there"):
            checkpoints.save(2)
    checkpoints.save(4)
    checkpoints.finish()
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step-00000004"]


def test_a_step_goes_on_while_its_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the state at the time of `step`; the next save waits for the last."""
    go, whole = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: go.wait(60) and whole(fd))
    w = Tensor(values(1)).realize()
    checkpoints = Checkpointer(tmp_path, {"w": w}, every=2, asynchronous=True)
    checkpoints.step(1)
    checkpoints.step(2)
    w.assign(values(7)).realize()
    assert not (tmp_path / "step-00000002").exists()
    threading.Timer(0.2, go.set).start()
    checkpoints.step(4)
    assert (tmp_path / "step-00000002").exists()
    checkpoints.finish()
    shutil.rmtree(tmp_path / "step-00000004")
    assert checkpoints.resume() == 2
    np.testing.assert_array_equal(w.numpy(), values(1))


def test_the_process_ends_after_its_last_save(tmp_path: Path) -> None:
    code = f"""
import os, time
from manygrad import Tensor
from manygrad.checkpoint import Checkpointer
whole = os.fsync
os.fsync = lambda fd: (time.sleep(0.3), whole(fd))
Checkpointer({str(tmp_path)!r}, {{"w": Tensor([1.0])}}, asynchronous=True).save(5)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
