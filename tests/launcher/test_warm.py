"""`launcher warm SCRIPT`: the first steps of a script, after which it compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = """
for i in range(12):
    optimizer.zero_grad()
    loss = F.mse_loss(model(Tensor(np.ones((3, 4), np.float32))), Tensor(np.zeros((3, 2), np.float32)))
    loss.backward()
    optimizer.step()
    print("step", i, loss.item() > 0)
"""
CAPTURED = """
x = Tensor(np.ones((3, 4), np.float32)).realize()
forward = TinyJit(lambda x: model(x))
for i in range(12):
    print("step", i, forward(x).sum().item() != 0)
"""
BOTH = """
import numpy as np
from manygrad import Tensor, TinyJit, nn
from manygrad.nn import functional as F
Tensor.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = nn.optim.Adam(model.parameters(), lr=0.01)
"""


def run(*words: str, **environment: str) -> str:
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", *words]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=300
    ).stdout


@pytest.mark.parametrize("loop", [PLAIN, CAPTURED], ids=["plain", "captured"])
def test_a_script_that_was_warmed_compiles_nothing(loop: str, tmp_path: Path) -> None:
    script, cache = tmp_path / "train.py", tmp_path / "cache"
    script.write_text(BOTH + loop)
    there = {"CACHE_DIR": str(cache), "CACHE": "1"}
    assert run("warm", str(script), **there).splitlines() == [f"step {i} True" for i in range(5)]
    entries = {p for p in cache.rglob("*") if p.is_file()}
    assert len(run(str(script), **there).splitlines()) == 12
    assert entries and {p for p in cache.rglob("*") if p.is_file()} == entries


def test_so_many_steps_as_are_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BOTH + PLAIN)
    assert len(run("warm", str(script), LAST_STEP="2", CACHE_DIR=str(tmp_path / "cache")).splitlines()) == 2
