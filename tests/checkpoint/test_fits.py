"""What a checkpoint is loaded into: a state that it fits, or an error that names the place; and folders that others
write to at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.checkpoint import Checkpointer, load, save


def stored(*values: float) -> Tensor:
    return Tensor([float(v) for v in values]).clone().realize()


def resumed(folder: Path, saved: Any, into: Any) -> Any:
    Checkpointer(str(folder), {"a": saved}, every=1).step(1)
    state = {"a": into}
    assert Checkpointer(str(folder), state, every=1).resume() == 1
    return state["a"]


@pytest.mark.parametrize(
    "saved, into, words",
    [
        ([stored(1), stored(2)], [stored(1)], "a is a list of 1, in the checkpoint it is a list of 2"),
        ([stored(1)], [stored(1), stored(2)], "a list of 1"),
        ((stored(1), stored(2)), (stored(1),), "a tuple of 2"),
        ([stored(1)], {"b": stored(1)}, "a is a dict"),
        ({"b": stored(1)}, [stored(1)], "it is a dict"),
        (np.zeros(2), np.zeros(3), r"shape \(3,\)"),
        (None, stored(1), "a is a Tensor, in the checkpoint it is None"),
        (3, stored(1), "in the checkpoint it is 3"),
        ([nn.Linear(2, 2)] * 3, [nn.Linear(2, 2)] * 2, "another model"),
        ([[stored(1)]], [[stored(1), stored(2)]], "a.0 is a list of 2"),
        (stored(1, 2), stored(1), r"shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_an_error(saved: Any, into: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        resumed(tmp_path, saved, into)


def test_arrays_and_tensors_stand_for_each_other(tmp_path: Path) -> None:
    array = np.zeros(2, np.float32)
    assert resumed(tmp_path / "a", stored(1, 2), array) is array and array.tolist() == [1, 2]
    assert resumed(tmp_path / "b", np.array([1.0, 2.0], np.float32), stored(0, 0)).tolist() == [1, 2]


def test_histories_are_loaded_in_place_whatever_their_length(tmp_path: Path) -> None:
    for n, into in enumerate(([], [7], [1, 2, 3, 4])):
        assert resumed(tmp_path / str(n), [1, 2, 3], into) is into and into == [1, 2, 3]
    best: dict[str, int] = {}
    assert resumed(tmp_path / "d", {"best": 1}, best) is best and best == {"best": 1}


def test_a_save_of_an_earlier_step_stays(tmp_path: Path) -> None:
    state, folder = {"x": 0}, str(tmp_path)
    for step in (50, 51):
        state["x"] = step
        save(folder, state, step, keep=2)
    path = save(folder, {"x": 40}, 40, keep=2)
    assert load(path, None)["x"] == 40


def test_steps_are_whole_numbers_numpys_too(tmp_path: Path) -> None:
    c = Checkpointer(str(tmp_path), {"x": 1}, every=2)
    for step in np.arange(1, 5):
        c.step(step)
    assert c.resume() == 4
    for odd in (True, -1, 1.0, "1"):
        with pytest.raises(ValueError, match="whole number"):
            c.save(odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["step-000000009", "step-00000001.01", "step-00000009.9999999"])
def test_copies_under_other_names_are_no_checkpoints(name: str, tmp_path: Path) -> None:
    state = {"x": 1}
    c = Checkpointer(str(tmp_path), state, every=1)
    c.step(1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert c.resume() == 1


WRITER = """
import sys, time
from manygrad import Tensor
from manygrad.checkpoint import load, save
w, end, i = Tensor.zeros(100).contiguous().realize(), time.monotonic() + 4, 0
while time.monotonic() < end:
    i += 1
    assert load(save(sys.argv[1], {"w": w}, int(sys.argv[2]) * 1000000 + i), None)["w"].shape == (100,)
print(i)
"""


def test_two_jobs_that_save_into_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    args = [[sys.executable, "-c", WRITER, str(tmp_path), str(k)] for k in (1, 2)]
    both = [subprocess.Popen(a, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for a in args]
    for p in both:
        out, errors = p.communicate(timeout=60)
        assert p.returncode == 0 and int(out) > 5, errors
    assert not [n for n in os.listdir(tmp_path) if n.endswith(".tmp")]


def test_a_save_beside_one_in_the_background(tmp_path: Path) -> None:
    w = Tensor.zeros(2_000_000).contiguous().realize()
    c = Checkpointer(str(tmp_path), {"w": w}, every=1, asynchronous=True, keep=100)
    for i in range(1, 7):
        c.step(i)
        save(str(tmp_path), {"w": w}, 1000 + i)
    c.finish()
    assert len([n for n in os.listdir(tmp_path) if n.startswith("step-") and not n.endswith(".tmp")]) == 12
