"""A rank that fails saves its last step; the step is replayed on one machine, with the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from manygrad.runtime.engine.replay import SavedStep

SCRIPT = """
import sys
import numpy as np
from manygrad import Tensor, TinyJit, nn, world

how = sys.argv[1]
Tensor.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)).to(world.devices)
model[0].weight.shard_(world.devices, 0)
optimizer = nn.optim.AdamW(model.parameters(), lr=0.01)

@TinyJit
def train(x):
    optimizer.zero_grad()
    loss = model(x).square().sum().log()
    loss.backward()
    optimizer.step()
    return loss

for step in range(6):
    x = np.random.default_rng(step).standard_normal((4, 8)).astype(np.float32)
    if how == "nan" and step == 4:
        x[:] = np.inf
    loss = train(Tensor(x).shard(world.devices, axis=0))
    value = loss.item()
    if how == "rank" and step == 4 and world.rank == world.size - 1:
        raise RuntimeError(f"rank {world.rank} has had enough")
    if how == "nan" and not np.isfinite(value):
        raise ValueError("the loss is NaN")
"""


def failed(folder: Path, how: str, nodes: int) -> tuple[list[Path], str]:
    """The steps that are saved, and what the run says."""
    (folder / "train.py").write_text(SCRIPT)
    launcher = [
        sys.executable,
        "-P",
        "-m",
        "manygrad.launcher.cli",
        "train.py",
        *(["--nodes", str(nodes)] if nodes else []),
    ]
    done = subprocess.run(
        [*launcher, "--", how] if nodes else [sys.executable, "train.py", how],
        cwd=folder,
        env={**os.environ, "THREADS": "1", "FAILED_STEPS": "steps"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return sorted((folder / "steps").iterdir()), done.stdout + done.stderr


def replayed(path: Path, code: int = 0, **env: str) -> str:
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "replay", str(path)]
    done = subprocess.run(
        command, cwd=path.parent, env={**os.environ, **env}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("nodes", [0, 2])
def test_a_rank_that_fails_saves_its_step(nodes: int, tmp_path: Path) -> None:
    (path,), said = failed(tmp_path, "rank", nodes)
    assert path.name.startswith(f"rank{max(nodes - 1, 0)}-") and f"launcher replay {path}" in said
    shown = replayed(path)
    assert f"rank {max(nodes - 1, 0)} of {max(nodes, 1)}, step 5, ended by RuntimeError: rank" in shown
    assert "replayed, with the same bits" in shown
    saved = SavedStep(str(path))
    assert any(k.startswith("given ") for k in saved.arrays) == (nodes > 1)
    assert saved.replay() == []
    if nodes > 1:  # as of a rank that waited in vain in the last collective
        del saved.arrays[[k for k in saved.arrays if k.startswith("given ")][-1]]
        with pytest.raises(EOFError, match=r"train.py:\d+: the rank has not come to the end of this "):
            saved.replay()


def test_a_replay_tells_other_bits_and_damage(tmp_path: Path) -> None:
    (path,), _ = failed(tmp_path, "rank", 0)
    with np.load(path) as file:
        arrays = {k: file[k].copy() for k in file.files}
    name = max((k for k in arrays if k.startswith("memory ")), key=lambda k: arrays[k].nbytes)
    arrays[name][3::4] ^= 1
    with open(path, "wb") as f:
        np.savez(f, **arrays)
    assert re.search(
        r"with other bits than the rank had:\n  graph 1: float32.* last used at train.py:", replayed(path, 1)
    )
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    assert "is no saved step" in replayed(path, 2)
    assert "No such file" in replayed(tmp_path / "nothing", 2)


def test_a_replay_looks_closer(tmp_path: Path) -> None:
    """The run did not look for NaN; its replay names the op and line."""
    paths, _ = failed(tmp_path, "nan", 2)
    shown = replayed(paths[0], 1, DETECT_ANOMALY="1")
    assert re.search(r"AnomalyError: NaN .* at train.py:\d+", shown), shown
