"""Checkpoints that somebody has renamed: the steps that their own indices have count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manygrad.checkpoint import Checkpointer, CheckpointError, load

SCRIPT = """
import json, warnings
from pathlib import Path
from manygrad import Tensor, world
from manygrad.checkpoint import Checkpointer

with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    begun = Checkpointer("checkpoints", {"x": 0}).resume()
Path(f"out.{world.rank}").write_text(json.dumps([begun, [str(w.message) for w in warned]]))
"""


def saved(folder: Path, *steps: int) -> tuple[Checkpointer, dict[str, Any]]:
    """A Checkpointer that has saved these steps."""
    state: dict[str, Any] = {"x": 0}
    c = Checkpointer(folder, state, every=1, keep=None)
    for step in steps:
        state["x"] = step
        c.step(step)
    return c, state


def test_a_run_goes_on_at_the_step_that_was_saved(tmp_path: Path) -> None:
    c, state = saved(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000007")
    with pytest.warns(UserWarning, match=r"step-00000007 was renamed: .* 1 steps.*Rename it to step-00000001"):
        assert c.resume() == 1
    assert state["x"] == 1
    c.step(7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000007", "step-00000007.1"]
    with pytest.warns(UserWarning, match="was renamed"):
        assert c.resume() == 7


@pytest.mark.parametrize("name", ["step-00000001", "step-00000009"])
def test_the_newest_is_chosen_by_what_it_has(name: str, tmp_path: Path) -> None:
    """An older one with the highest number, the newest with the lowest; also for `load`, and where older ones go."""
    c, state = saved(tmp_path, 4, 5, 6)
    number = 4 if name == "step-00000009" else 6
    (tmp_path / f"step-{number:08d}").rename(tmp_path / name)
    with pytest.warns(UserWarning, match="was renamed"):
        assert c.resume() == 6 and state["x"] == 6
    with pytest.warns(UserWarning, match="was renamed"):
        assert load(tmp_path, None)["x"] == 6
    c.keep = 2
    c.step(8)
    kept = {load(p, None)["x"] for p in tmp_path.iterdir()}
    assert kept == {6}  # (twice: what was saved as step 8 had the state of step 6)
    assert len([*tmp_path.iterdir()]) == 2


def test_one_under_a_name_of_no_save_does_not_begin_anew(tmp_path: Path) -> None:
    c, _ = saved(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-000000007")
    with pytest.raises(CheckpointError, match="a checkpoint of step 1 is named step-00000001; rename it"):
        c.resume()
    c.step(2)
    with pytest.warns(UserWarning, match="step-000000007 is not looked at"):
        assert c.resume() == 2


def test_all_ranks_hear_of_it(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints" / "step-00000001").rename(tmp_path / "checkpoints" / "step-00000007")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "script.py", "--nodes", "2"]
    environ = {**os.environ, "THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (first, warned), (second, silent) = (json.loads((tmp_path / f"out.{r}").read_text()) for r in range(2))
    assert first == second == 1 and "was renamed" in warned[0] and not silent
