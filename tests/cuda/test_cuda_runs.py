"""Runs of several workers on emulated GPUs: the numbers of one device, and the end of a run whose kernel faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.install import emulated

ROOT = Path(__file__).parents[2]
TRAIN = """
import numpy as np
from manygrad import Tensor, nn, world
from manygrad.nn.optim import AdamW

Tensor.manual_seed(0)
rng = np.random.default_rng(0)
x = Tensor(rng.standard_normal((32, 12)).astype(np.float32)).shard(world.devices, axis=0)
y = Tensor(rng.integers(0, 5, 32)).shard(world.devices, axis=0)
model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).to(world.devices)
optimizer = AdamW(model.parameters(), lr=0.05)
with Tensor.train():
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", loss.numpy().tobytes().hex(), loss.item())
print("device", model[0].weight.device)
"""
KILLED = TRAIN.replace("        print(", "        if world.rank == 1: os.kill(os.getpid(), 9)\n        print(").replace(
    "import numpy", "import os, numpy", 1
)
FAULT = """
from manygrad import Tensor, world
from tests.cuda.install import emulator
emulator().tells = False
x = Tensor.ones(64).contiguous().realize()
if world.rank == 1:
    for memory in emulator().memories:  # (all of it is somebody else's now)
        memory.starts.clear(), memory.ends.clear()
        memory._sorted = None
print((x + 1).sum().item())
Tensor.ones(8).shard(world.devices, axis=0).sum().item()
"""
HANGS = """
from manygrad import Tensor, world
from manygrad.runtime.devices import get_device
x = Tensor.ones(64).contiguous().realize()
if world.rank == 1:
    get_device("CUDA:0").alloc(4).stream.handle.hangs = True
print((x + 1).sum().item())
Tensor.ones(8).shard(world.devices, axis=0).sum().item()
"""


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MANYGRAD_"))}
    paths = [str(ROOT), str(ROOT / "tests" / "cuda" / "shim"), *filter(None, [env.get("PYTHONPATH")])]
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", str(folder / "train.py"), *options]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


@emulated
@pytest.mark.parametrize(
    "options",
    [
        ("--devices-per-node", "4"),
        ("--nodes", "2", "--devices-per-node", "2"),
        ("--nodes", "4", "--devices-per-node", "2"),
    ],
)
def test_training_gives_the_bits_of_one_device(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = []
    for i, own in enumerate([(), options]):
        (folder := tmp_path / str(i)).mkdir()
        done = run(folder, TRAIN, "--device", "CUDA", *own)
        assert done.returncode == 0, done
        losses = re.findall(r"loss (\w+) ([\d.]+)", done.stdout)
        assert len(losses) == 4 and float(losses[-1][1]) < float(losses[0][1]) and "CUDA" in done.stdout
        found.append(losses)
    assert found[0] == found[1]


@emulated
def test_a_fault_of_a_kernel_ends_the_run_and_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, FAULT, "--nodes", "2", "--device", "CUDA")
    assert done.returncode == 1, done
    assert "rank 0: stopped" in done.stderr and "running -> failed (CUDAError: CUDA:0: " in done.stderr, done.stderr
    assert "a kernel that ran before has used an address that is not its own" in done.stderr


@emulated
def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    assert "os.kill" in KILLED
    done = run(tmp_path, KILLED, "--nodes", "2", "--device", "CUDA")
    assert done.returncode == 137, done
    assert "rank 1 failed: killed by SIGKILL" in done.stderr, done.stderr


@emulated
def test_a_kernel_that_does_not_end_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_TIMEOUT_S", "1")
    done = run(tmp_path, HANGS, "--nodes", "2", "--device", "CUDA")
    assert done.returncode == 1, done
    assert "rank 0: stopped" in done.stderr and "CUDAError: CUDA:0: the GPU has not got on for 1 s" in done.stderr
