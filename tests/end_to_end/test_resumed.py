"""Training that is killed again and again ends with the bits of one that was not, and goes on elsewhere."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT, STEPS = str(ROOT / "examples" / "train_mnist.py"), 160


def arguments(nodes: int, losses: Path, *more: str) -> tuple[str, ...]:
    script = ("--", "--batch", "40", "--steps", str(STEPS), "--losses", str(losses))
    return SCRIPT, "--nodes", str(nodes), *more, *script


def results(losses: Path, nodes: int) -> list[dict[str, Any]]:
    return [json.loads(Path(f"{losses}.{rank}").read_text()) for rank in range(nodes)]


def workers(run: Any) -> list[psutil.Process]:
    """The workers of the attempt that runs now, which the launcher has adopted or started."""
    found = []
    for p in psutil.process_iter():
        try:
            if "manygrad.launcher.worker" in p.cmdline() and p.cwd() == str(run.run_dir.parent):
                found.append(p)
        except psutil.Error:
            pass
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The losses and a digest of the weights of one process."""
    import runpy
    import sys

    out = tmp_path_factory.mktemp("undisturbed") / "losses"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["x", *arguments(1, out)[4:]])
        runpy.run_path(SCRIPT, run_name="__main__")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_killed_three_times(command: Callable[..., Any], tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    seed = random.randrange(1 << 32)
    chance, out = random.Random(seed), tmp_path / "losses"
    run = command(
        *arguments(4, out, "--max-restarts", "5", "--log-ranks", "all"), "--checkpoint", str(tmp_path / "checkpoints")
    )
    for epoch in range(3):
        run.wait_for_log(0, "first step done" if not epoch else f"attempt {epoch + 1} begins")
        if epoch:
            time.sleep(chance.uniform(0.0, 1.5))  # (short enough that the run has not ended)
        else:
            while not (tmp_path / "checkpoints" / "step-00000050").exists():
                time.sleep(0.01)
        while not (there := workers(run)):
            assert run.process.poll() is None, run.wait()
            time.sleep(0.01)
        victim = chance.choice(there)
        victim.kill()
    run.wait()
    assert run.code == 0, (seed, run.err)
    attempts = json.loads((run.run_dir / "report.json").read_text())["attempts"]
    assert [a["root_cause"] and a["root_cause"]["kind"] for a in attempts[:3]] == ["signal"] * 3, (seed, run.err)
    for found in results(out, 4):
        n = len(found["losses"])
        assert found["losses"] == undisturbed["losses"][-n:] and n < STEPS, seed
        assert found["weights"] == undisturbed["weights"], seed


def test_killed_on_four_and_resumed_on_two_and_three(
    command: Callable[..., Any], tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """On two to the bit; three add in another order (Decision 0004)."""
    checkpoints, out = tmp_path / "checkpoints", tmp_path / "losses"
    run = command(*arguments(4, out), "--checkpoint", str(checkpoints))
    while not (checkpoints / "step-00000100").exists():
        assert run.process.poll() is None, run.wait()
        time.sleep(0.01)
    workers(run)[0].kill()
    assert run.wait().code == 137, run.err
    for nodes in (2, 3):
        copy = tmp_path / f"on {nodes}"
        shutil.copytree(checkpoints, copy)
        run = command(*arguments(nodes, out), "--checkpoint", str(copy)).wait()
        assert run.code == 0, run.err
        for found in results(out, nodes):
            assert 0 < len(found["losses"]) <= STEPS - 100
            whole = undisturbed["losses"][-len(found["losses"]) :]
            if nodes == 2:
                assert found["losses"] == whole and found["weights"] == undisturbed["weights"]
            np.testing.assert_allclose(found["losses"], whole, atol=1e-5)
