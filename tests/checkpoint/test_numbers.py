"""Numbers that lie: copies that differ between ranks are named, and a spike of the loss is gone back from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, nn
from manygrad.checkpoint import Checkpointer, SpikeGuard, check_replicas
from manygrad.checkpoint.replicas import _odd
from manygrad.errors import AnomalyError, ReplicasDiffer
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.storage import storage

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
from manygrad import Tensor, nn, world
from manygrad.checkpoint import Checkpointer, check_replicas
from manygrad.errors import ReplicasDiffer
from manygrad.runtime.storage import storage
from manygrad.schedule.facts.index import contiguous_offset
from manygrad.tensor.uop.views import memory

how, out, steps = sys.argv[1], sys.argv[2], []
Tensor.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 2))
for name, p in model.state_dict().items():
    p.shard_(world.devices, 0 if name == "0.weight" else None)
optimizer = nn.optim.AdamW(model.parameters(), lr=0.01)
folder, flipped = Path(out).parent / "checkpoints", Path(out).parent / "flipped"
checkpoints = Checkpointer(folder, {"model": model, "optimizer": optimizer}, every=3, check_every=3, memory_every=1)
begun = checkpoints.resume() if how == "restart" else 0
own = Tensor(np.full(4, float(world.rank), np.float32)) if how == "own" else Tensor.ones(4)
error = ""
try:
    for step in range(begun, 9 if how == "restart" else 6):
        optimizer.zero_grad()
        model(Tensor.ones(8, 8).shard(world.devices, axis=0)).square().mean().backward()
        optimizer.step()
        if how in ("flip", "restart") and step == 3 and world.rank == 1 and not flipped.exists():
            flipped.touch()  # one bit, as of broken memory
            uop = model[1].bias.realize().uop
            (held,) = [b for b in storage(memory(uop)) if b is not None]
            held.as_numpy().view(np.uint8).reshape(-1)[4 * contiguous_offset(uop, memory(uop)) + 2] ^= 4
        if how == "own":
            check_replicas({"fine": Tensor.ones(3), "mine": own, "later": own * 2}, step)
        steps.append(step)
        checkpoints.step(step + 1)
except ReplicasDiffer as e:
    if how == "restart":
        raise
    error = str(e)
Path(f"{out}.{world.rank}").write_text(json.dumps([steps, error]))
"""


def run(how: str, nodes: int, folder: Path, *options: str) -> list[Any]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-P", "-m", "manygrad.launcher.cli", str(script), "--nodes", str(nodes)]
    done = subprocess.run(
        [*launcher, *options, "--run-dir", str(folder / "run"), "--", how, str(folder / "out")],
        env={**os.environ, "THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder.joinpath("said").write_text(done.stderr)
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(nodes)]


def test_one_bit_that_turned_over_is_found_by_all_ranks(tmp_path: Path) -> None:
    for steps, error in run("flip", 3, tmp_path):
        assert steps == [0, 1, 2, 3, 4, 5]
        assert error.startswith(
            "after step 6: the copies of 'model.1.bias' (float32 (2,)) differ: rank 1 has other bits"
        )


def test_a_run_with_restarts_goes_on_before_it(tmp_path: Path) -> None:
    assert run("restart", 2, tmp_path, "--max-restarts", "1") == [[[3, 4, 5, 6, 7, 8], ""]] * 2
    said = (tmp_path / "said").read_text()
    assert "ReplicasDiffer: after step 6: the copies of 'model.1.bias'" in said, said
    names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-00000003", "step-00000006", "step-00000009"}


def test_values_of_a_rank_of_its_own_are_named(tmp_path: Path) -> None:
    for steps, error in run("own", 2, tmp_path):
        assert steps == [] and "after step 0: the copies of 'mine' (float32 (4,)) differ" in error
        assert "rank 0 and rank 1 have other bits each, and so do those of 1 more tensors" in error


def test_ranks_that_agree_go_on(tmp_path: Path) -> None:
    assert run("none", 2, tmp_path) == [[[0, 1, 2, 3, 4, 5], ""]] * 2


def test_copies_on_devices_of_one_process() -> None:
    devices = ("CPU:0", "CPU:1", "CPU:2")
    model = nn.Linear(4, 4).to(devices)
    check_replicas({"model": model})
    parts = storage(model.weight.uop)
    assert isinstance(parts, list) and isinstance(parts[2], Buffer)
    held = parts[2].copyout()
    held[5] = np.nextafter(held[5], 2)
    parts[2].copyin(held)
    with pytest.raises(ReplicasDiffer, match="after step 4.*'model.weight'.*CPU:2 has other bits than the 2 others"):
        check_replicas({"model": model}, 4)
    cut = Tensor(np.arange(6, dtype=np.float32)).shard(devices, axis=0)
    check_replicas({"cut": cut, "array": np.ones(2), "number": 3})


def test_who_is_odd_is_said_by_most() -> None:
    assert _odd("abcd", [1, 1, 2, 1]) == "c has other bits than the 3 others"
    assert _odd("abcde", [1, 1, 2, 1, 3]) == "c, e have other bits than the 3 others"
    assert _odd("ab", [1, 2]) == "a and b have other bits each"
    assert _odd("abcd", [1, 1, 2, 2]) == "no bits are those of most of a, b, c, d"


# *** spikes ***


class Training:
    """One weight that each batch is added to; the loss is the batch, but for those that are bad."""

    def __init__(self, folder: Path, bad: dict[int, float], every: int = 5, **options: Any):
        self.w = Tensor(np.zeros(1, np.float32))
        self.guard = SpikeGuard(**{"window": 4, **options})
        self.bad, self.ran = bad, list[int]()
        self.checkpoints = Checkpointer(folder, {"w": self.w, "spikes": self.guard}, every=every)
        self.begun = self.checkpoints.resume()

    def run(self, until: int) -> float:
        step = self.begun
        if step == 0:
            self.checkpoints.save(0)
        while step < until:
            loss = None
            if not self.guard.skips(step):
                loss = self.bad.get(step, 1.0 + step % 2)
                self.w.assign(self.w + 2.0**step).realize()
                self.ran.append(step)
            step = self.guard.step(self.checkpoints, step + 1, loss)
        return float(self.w.item())


@pytest.mark.parametrize("bad", [7.0, float("nan"), float("inf")])
def test_a_spike_is_gone_back_from_and_its_batch_left_out(bad: float, tmp_path: Path) -> None:
    training = Training(tmp_path, {8: bad})
    with pytest.warns(UserWarning, match="step 9: the loss is .* goes on from step 5 without this batch"):
        assert training.run(12) == 2**12 - 1 - 2**8
    assert training.ran == [*range(9), 5, 6, 7, 9, 10, 11]
    later = Training(tmp_path, {8: bad})  # what is left out stands in the checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*another number each time")  # (by what the tests before it were)
        assert later.begun == 10 and later.guard.skips(8) and later.run(12) == 2**12 - 1 - 2**8


def test_two_spikes_and_what_is_none(tmp_path: Path) -> None:
    training = Training(tmp_path, {6: 9.0, 8: 100.0, 2: 50.0, 10: 5.9})  # (the third is in no full window)
    with pytest.warns(UserWarning):
        assert training.run(12) == 2**12 - 1 - 2**6 - 2**8
    assert training.guard.left_out == [6, 8]


def test_spikes_that_do_not_end_are_an_error(tmp_path: Path) -> None:
    training = Training(tmp_path, dict.fromkeys(range(6, 20), float("nan")), most=2)
    with (
        pytest.warns(UserWarning),
        pytest.raises(AnomalyError, match=r"spike 3 after the checkpoint of step 5.*\[6, 7, 8\]"),
    ):
        training.run(20)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    training = Training(tmp_path, {1: float("nan")})
    training.begun = 1
    with pytest.raises(AnomalyError, match=r"call checkpoints.save\(0\)"):
        training.run(3)
    for wrong in ({"factor": 1.0}, {"window": 0}, {"most": 0}):
        with pytest.raises(ValueError, match="SpikeGuard"):
            SpikeGuard(**wrong)  # type: ignore[arg-type]
