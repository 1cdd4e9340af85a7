"""A script with several Checkpointers: at SIGTERM all save."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from manygrad import Tensor
from manygrad.checkpoint import Checkpointer, load
from manygrad.errors import Preempted
from manygrad.runtime.current import current
from manygrad.runtime.exchange.communication import Hooks

SCRIPT = """
import os, signal, sys
import numpy as np
from pathlib import Path
from manygrad import Tensor, nn, world
from manygrad.checkpoint import Checkpointer

model, mean = nn.Linear(2, 1).to(world.devices), nn.Linear(2, 1).to(world.devices)
optimizer = nn.optim.SGD(model.parameters(), lr=0.1)
first = Checkpointer("first", {"model": model, "optimizer": optimizer}, every=100)
second = Checkpointer("second", {"mean": mean}, every=1000, asynchronous=True)
unused = Checkpointer("unused", {"mean": mean})
epochs = Checkpointer("epochs", {"mean": mean}, every=1)
begun = [first.resume(), second.resume()]
print(f"begun {begun}")
for step in range(begun[0], 40):
    x = Tensor(np.ones((4, 2), np.float32)).shard(world.devices, axis=0)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if step == 11 and world.rank == 1 and not begun[0]:
        os.kill(os.getpid(), signal.SIGTERM)
    first.step(step + 1)
    second.step(step + 1)
    if step % 5 == 4:
        epochs.step(step // 5 + 1)
"""


def ending_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The launcher says that all ranks are to save at that step."""
    hooks = Hooks(lambda *_: lambda: None, lambda *_: None, lambda now: now >= step)
    monkeypatch.setattr(current().communication, "hooks", hooks)
    monkeypatch.setattr(current().communication, "turns", None)


def test_all_of_a_round_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same step, what they hold at their turn; one that is called in each round, and one only now and then."""
    ending_at(monkeypatch, 12)
    x = Tensor(np.zeros(3, np.float32))
    a, b, rare = (Checkpointer(tmp_path / n, {"x": x}, every=100) for n in ("a", "b", "rare"))
    with pytest.raises(Preempted, match=r"step 12 is saved in .*a; step 12 is saved in .*b$"):
        for step in range(1, 20):
            a.step(step)
            x.assign(x + 1).realize()
            b.step(step)
            if step % 5 == 0:
                rare.step(step // 5)
    assert load(tmp_path / "a" / "step-00000012", None)["x"].numpy()[0] == 11
    assert load(tmp_path / "b" / "step-00000012", None)["x"].numpy()[0] == 12
    assert not (tmp_path / "rare").exists()


def test_one_that_counts_otherwise_saves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending_at(monkeypatch, 10)
    a, epochs = (Checkpointer(tmp_path / n, {"x": 1}, every=100) for n in ("a", "epochs"))
    with pytest.raises(Preempted, match=r"step 10 is saved in .*a; step 2 is saved in .*epochs"):
        for step in range(1, 20):
            a.step(step)
            epochs.step(step // 5)


def test_one_that_is_called_no_more_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a loop that has ended, and one that was made and never called: a further step at most."""
    ending_at(monkeypatch, 5)
    before, a, never = (Checkpointer(tmp_path / n, {"x": 1}, every=100) for n in ("before", "a", "never"))
    for step in range(1, 4):
        before.step(step)
    done = 3
    with pytest.raises(Preempted, match=r"step 5 is saved in .*a$"):
        for done in range(4, 20):
            a.step(done)
    assert done == 5 and never.folder
    ending_at(monkeypatch, 1)
    a, never = (Checkpointer(tmp_path / n, {"x": 1}, every=100) for n in ("b", "never"))
    with pytest.raises(Preempted, match=r"step 1 is saved in .*b$"):
        for done in range(1, 20):
            a.step(done)
    assert done == 2


def test_two_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", "script.py", "--nodes", "2", "--grace", "60"]
    for code in (143, 0):
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "THREADS": "1"}, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == code, done.stdout + done.stderr
        if code:
            (saved,) = (tmp_path / "first").iterdir()
            assert re.search(rf"{saved.name[-2:]} is saved in \S+first; step {saved.name[-2:]} is saved", done.stderr)
            assert [p.name for p in (tmp_path / "second").iterdir()] == [saved.name]
            epochs = (int(saved.name[-2:]) - 1) // 5
            assert len([*(tmp_path / "epochs").iterdir()]) == epochs
            assert not (tmp_path / "unused").exists()
    assert f"begun [{int(saved.name[-2:])}, {int(saved.name[-2:])}]" in done.stdout
