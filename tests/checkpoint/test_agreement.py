"""Ranks agree over the folder: here they are threads, each with its part."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from manygrad.checkpoint import CheckpointError
from manygrad.checkpoint.layout import TensorPart
from manygrad.checkpoint.reader import CheckpointReader, committed
from manygrad.checkpoint.writer import Attempt, Snapshot

SIZE = 3
WHOLE = np.arange(SIZE * 2 * 4, dtype=np.float32).reshape(SIZE * 2, 4)


def snapshot(rank: int, rows: int = 2 * SIZE) -> Snapshot:
    """Each rank has two rows."""
    parts = [TensorPart(((2 * r, 2 * r + 2), (0, 4)), r) for r in range(SIZE)]
    return Snapshot(rank, 7, {"tensor": "w"}, {"w": ("F32", (rows, 4), parts, [WHOLE[2 * rank : 2 * rank + 2].copy()])})


def attempt(folder: Path, rank: int, number: int = 0, timeout_s: float = 30.0) -> Attempt:
    return Attempt(str(folder), rank, SIZE, "job", number, 2, timeout_s)


def outcome(a: Attempt, s: Snapshot, after_s: float = 0.0) -> str:
    """The path, or the error's text."""
    time.sleep(after_s)
    try:
        return a.write(s)
    except CheckpointError as e:
        return str(e)


@pytest.mark.parametrize("late", range(SIZE))
def test_all_ranks_get_the_same_checkpoint(late: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(SIZE) as pool:
        delays = [0.2 if rank == late else 0.0 for rank in range(SIZE)]
        found = list(pool.map(outcome, [attempt(tmp_path, r) for r in range(SIZE)], map(snapshot, range(SIZE)), delays))
    assert set(found) == {str(tmp_path / "step-00000007")}
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]
    np.testing.assert_array_equal(CheckpointReader(found[0]).read("w", ((1, 5), (0, 4))), WHOLE[1:5])


@pytest.mark.parametrize("broken", range(SIZE))
@pytest.mark.parametrize("after_s", [0.0, 0.3])
def test_a_rank_that_fails_is_named_by_the_others(broken: int, after_s: float, tmp_path: Path) -> None:
    """Also by those that begin after it has failed; then the next attempt clears up."""
    bad = snapshot(broken)
    bad.tensors["w"][3][0] = np.zeros((2, 4), object)  # cannot be written as bytes
    with ThreadPoolExecutor(SIZE) as pool:
        shots = [bad if r == broken else snapshot(r) for r in range(SIZE)]
        delays = [0.0 if r == broken else after_s for r in range(SIZE)]
        futures = [pool.submit(outcome, attempt(tmp_path, r), shots[r], delays[r]) for r in range(SIZE)]
        with pytest.raises((TypeError, ValueError)):
            futures[broken].result(20)
        for r in range(SIZE):
            if r != broken:
                assert f"rank {broken} could not write" in futures[r].result(20)
    assert committed(str(tmp_path)) == []
    with ThreadPoolExecutor(SIZE) as pool:
        again = [attempt(tmp_path, r, 1) for r in range(SIZE)]
        assert len(set(pool.map(outcome, again, map(snapshot, range(SIZE))))) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    with ThreadPoolExecutor(SIZE) as pool:
        two = [attempt(tmp_path, r, timeout_s=0.5) for r in range(2)]
        found = list(pool.map(outcome, two, map(snapshot, range(2))))
    for text in found:
        assert "nothing was written for 0.5 s, while rank 2 was waited for" in text and "one folder that all" in text
    assert committed(str(tmp_path)) == []


def test_ranks_with_other_states_make_no_checkpoint(tmp_path: Path) -> None:
    with ThreadPoolExecutor(SIZE) as pool:
        shots = [snapshot(r, 6 if r else 8) for r in range(SIZE)]
        found = list(pool.map(outcome, [attempt(tmp_path, r) for r in range(SIZE)], shots))
    assert "every rank must save the same state" in found[0]
    assert all("rank 0 could not write" in text for text in found[1:])
    assert committed(str(tmp_path)) == []


def test_what_a_dead_run_has_left_is_cleared(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "step-00000009.other.4.tmp" / "x")
    os.makedirs(tmp_path / "step-00000009.job.3.tmp")
    Attempt(str(tmp_path), 0, 1, "job", 4, None, 1.0).write(Snapshot(0, 1, {"value": 1}, {}))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
