"""A save of two ranks, of which one is killed (SIGKILL) before any call that reaches the file system, in all of that
save: writing parts, agreeing, committing, removing what is older."""

from __future__ import annotations

import builtins
import itertools
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad.checkpoint import CheckpointError
from manygrad.checkpoint.layout import TensorPart
from manygrad.checkpoint.reader import CheckpointReader, committed
from manygrad.checkpoint.writer import Attempt, Snapshot

SIZE, KEEP = 2, 1
# of `os`, those that take a path or a descriptor of a file
CALLS = ("open", "close", "fsync", "rename", "mkdir", "makedirs", "unlink", "rmdir", "scandir", "listdir", "stat")


def whole(step: int) -> np.ndarray:
    return np.arange(6, dtype=np.float32).reshape(SIZE, 3) + 10 * step


def snapshot(rank: int, step: int) -> Snapshot:
    """Each rank has a row."""
    parts = [TensorPart(((r, r + 1), (0, 3)), r) for r in range(SIZE)]
    return Snapshot(
        rank, step, {"tensor": "w"}, {"w": ("F32", (SIZE, 3), parts, [whole(step)[rank : rank + 1].copy()])}
    )


class Killer:
    """Counts the calls, and kills this process in the place of number `at`; a write is torn."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, itertools.count()

    def is_time(self) -> bool:
        return next(self.count) == self.at

    def around(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_time():
                os.kill(os.getpid(), signal.SIGKILL)
            made = f(*args, **kwargs)
            return TornFile(self, made) if f is OPEN and "w" in str(args[1:]) else made

        return call

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self.around(getattr(os, name)))
        builtins.open = self.around(OPEN)  # type: ignore[assignment]


OPEN = builtins.open


class TornFile:
    def __init__(self, killer: Killer, file: Any) -> None:
        self.killer, self.file = killer, file

    def write(self, data: Any) -> int:
        if self.killer.is_time():
            self.file.write(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return int(self.file.write(data))

    def fileno(self) -> int:
        return int(self.file.fileno())

    def __enter__(self) -> TornFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def save(folder: Path, step: int, number: int, job: str, killed: tuple[int, int] = (-1, -1)) -> list[int]:
    """Has both ranks save, each in a process of its own, of which rank `killed[0]` dies in call `killed[1]`. Returns
    how they have ended: 0 well, 1 by a CheckpointError, or minus the signal."""
    pids = []
    for rank in range(SIZE):
        if not (pid := os.fork()):
            code = 2
            try:
                # (as in a run of which the launcher has told that a rank has failed)
                a = replace(
                    Attempt(str(folder), rank, SIZE, job, number, KEEP, 20.0), has_failed=lambda: killed[0] >= 0
                )
                if rank == killed[0]:
                    Killer(killed[1]).install()
                a.write(snapshot(rank, step))
                code = 0
            except CheckpointError:
                code = 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.mark.parametrize("victim", range(SIZE))
def test_death_of_a_rank_at_any_call_leaves_a_whole_checkpoint(victim: int, tmp_path: Path) -> None:
    """Before it or after it, and the next run saves as if nothing had been."""
    found = set()
    for call in itertools.count():
        folder = tmp_path / str(call)
        assert save(folder, 1, 0, "first") == [0, 0]
        codes = save(folder, 2, 1, "first", (victim, call))
        newest = committed(str(folder))[0]
        np.testing.assert_array_equal(
            CheckpointReader(newest.path).read("w", ((0, SIZE), (0, 3))), whole(newest.step), f"killed in call {call}"
        )
        found.add(newest.step)
        assert codes[victim] in (0, -signal.SIGKILL) and codes[1 - victim] in (0, 1), codes
        if 0 in codes:
            assert newest.step == 2, "who was told that it is saved can rely on it"
        assert save(folder, 3, 0, "second") == [0, 0]
        assert sorted(p.name for p in folder.iterdir()) == ["step-00000003"]
        if codes[victim] == 0:
            break
    assert call > 10 and found == {1, 2}
