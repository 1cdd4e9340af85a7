"""DiLoCo against arithmetic in NumPy, on one worker and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from manygrad import Tensor, TinyJit, nn, world
from manygrad.errors import JitError

STEPS, EVERY = 12, 4
SCRIPT = """
import json, sys
import numpy as np
from pathlib import Path
from manygrad import Tensor, nn, world
from manygrad.checkpoint import Checkpointer, check_replicas

out, dtype, steps = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
w = Tensor(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3))
b = Tensor(np.full(3, 0.5, np.float32))
if dtype == "other":
    dtype, w = None, Tensor(np.full((2, 3), float(world.rank), np.float32))
optimizer = nn.optim.DiLoCo(nn.optim.SGD([w, b], lr=0.125), every=4, lr=0.75, momentum=0.5, delta_dtype=dtype)
checkpoints = Checkpointer(Path(out).parent / "checkpoints", {"optimizer": optimizer}, every=4)
path = []
for step in range(checkpoints.resume(), steps):
    x = np.random.default_rng(100 * step + world.rank).standard_normal((4, 2)).astype(np.float32)
    optimizer.zero_grad()
    ((Tensor(x) @ w + b).square().mean() * 3).backward()
    optimizer.step()
    path.append([*w.numpy().ravel().tolist(), *b.numpy().tolist()])
    if (step + 1) % 4 == 0:
        check_replicas({"w": w, "b": b, "outer": optimizer.outer})
    checkpoints.step(step + 1)
Path(f"{out}.{world.rank}").write_text(json.dumps(path))
"""


def wanted(workers: int, dtype: str | None) -> list[list[np.ndarray]]:
    """By worker and step, what all parameters are; computed apart from manygrad, in float64 but for what travels."""
    outer = [np.linspace(-1, 1, 6).reshape(2, 3), np.full(3, 0.5)]
    own = [[t.copy() for t in outer] for _ in range(workers)]
    velocity = [np.zeros_like(t) for t in outer]
    paths: list[list[np.ndarray]] = [[] for _ in range(workers)]

    def rounded(x: np.ndarray) -> np.ndarray:
        return (
            x if dtype is None else x.astype(np.float32).astype(np.dtype(getattr(ml_dtypes, dtype))).astype(np.float64)
        )

    for step in range(STEPS):
        for rank, (w, b) in enumerate(own):
            x = np.random.default_rng(100 * step + rank).standard_normal((4, 2)).astype(np.float32).astype(np.float64)
            y = x @ w + b
            g = 6 * y / y.size
            w -= 0.125 * x.T @ g
            b -= 0.125 * g.sum(0)
        if (step + 1) % EVERY == 0:
            for i, t in enumerate(outer):
                total = np.sum([rounded(t - o[i]) for o in own], axis=0)
                d = (rounded(total) if workers > 1 else total) / workers
                velocity[i] = 0.5 * velocity[i] + d
                t -= 0.75 * (d + 0.5 * velocity[i])
                for o in own:
                    o[i][:] = t
        for rank, o in enumerate(own):
            paths[rank].append(np.concatenate([t.ravel() for t in o]))
    return paths


def run(folder: Path, nodes: int, dtype: str, steps: int = STEPS, code: int = 0) -> Any:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "script.py", "--nodes", str(nodes), "--"]
    done = subprocess.run(
        [*command, str(folder / "out"), dtype, str(steps)],
        cwd=folder,
        env={**os.environ, "THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else [json.loads((folder / f"out.{rank}").read_text()) for rank in range(nodes)]


@pytest.mark.parametrize("nodes, dtype", [(1, ""), (1, "bfloat16"), (2, ""), (2, "bfloat16")])
def test_as_numpy(nodes: int, dtype: str, tmp_path: Path) -> None:
    """Between outer steps workers differ, after them they are one."""
    found = run(tmp_path, nodes, dtype)
    for path, want in zip(found, wanted(nodes, dtype or None)):
        np.testing.assert_allclose(path, want, rtol=3e-2 if dtype else 2e-5, atol=2e-3 if dtype else 1e-6)
    if nodes == 2:
        assert found[0][EVERY - 1] == found[1][EVERY - 1] and found[0][EVERY] != found[1][EVERY]
        exact, rough = wanted(2, None), wanted(2, "bfloat16")
        assert abs(np.array(exact) - np.array(rough)).max() > 1e-4  # (the rounding is seen)


def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = run(tmp_path / "whole", 2, "")
    run(tmp_path / "cut", 2, "", steps=8)
    assert run(tmp_path / "cut", 2, "") == [path[8:] for path in whole]


def test_workers_that_do_not_begin_alike_are_told(tmp_path: Path) -> None:
    assert "hold different values of what every rank must hold alike" in run(tmp_path, 2, "other", code=1)


def test_what_makes_no_sense() -> None:
    w = Tensor.ones(3)
    inner = nn.optim.SGD([w])
    for options, words in (
        ({"every": 0}, "every must be at least 1"),
        ({"lr": -1}, "lr must not be negative"),
        ({"momentum": 1}, "momentum must lie"),
        ({"delta_dtype": "float32"}, "bfloat16, float16 or None"),
    ):
        with pytest.raises(ValueError, match=words):
            nn.optim.DiLoCo(inner, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"leave out to\(world.devices\)"):
        nn.optim.DiLoCo(nn.optim.SGD([Tensor.ones(3).to(("CPU:0", "CPU:1"))]))
    optimizer = nn.optim.DiLoCo(inner, every=2)

    @TinyJit
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(JitError, match="DiLoCo.step"):
        for _ in range(3):
            step()
    assert world.size == 1


def test_a_schedule_sets_the_inner_rate() -> None:
    w = Tensor.ones(3)
    optimizer = nn.optim.DiLoCo(nn.optim.SGD([w], lr=1.0), every=2)
    schedule = nn.optim.lr_scheduler.StepLR(optimizer.inner, 1, gamma=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.step()
        schedule.step()
    np.testing.assert_allclose(w.numpy(), 1 - 0.7 * 1.5 * 1.9, rtol=1e-6)  # two steps of 1 and 0.5, and one outer one
