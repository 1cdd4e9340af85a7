"""What the end of a program tells of its loops under DEBUG=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manygrad.tensor.deferred.counts import MOST_LINES, TOLD, FollowCounts
from manygrad.tensor.environment import FOLLOW

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")

PROGRAM = """
import numpy as np
from manygrad import Tensor, nn
from manygrad.nn import functional as F

model = nn.Sequential(nn.Linear(4, 8), nn.{layer}, nn.Linear(8, 3))
optimizer = nn.optim.Adam(model.parameters())
for i in range(10):
    x, y = Tensor(np.ones((5, 4), np.float32) * i), Tensor(np.arange(5) % 3)
    optimizer.zero_grad()
    out = model(x)
    {before}
    loss = F.cross_entropy(out, y)
    {read}
    loss.backward()
    {after}
    optimizer.step()
"""
WHY = {
    "nothing": ({}, 0, ""),
    "a read": ({"read": "loss.item()"}, 0, ""),
    "reads with dropout": ({"before": "out.sum().item()", "read": "loss.item()", "layer": "Dropout(0.1)"}, 0, ""),
    "a hook": ({"read": "model[0].weight.register_hook(lambda g: g)"}, 0, ""),
    "a hook of a value": ({"before": "out.register_hook(lambda g: g)"}, 12, "a hook is registered"),
    "an array": (
        {"before": "out = out[np.arange(5)]"},
        12,
        "`__getitem__` cannot be put off: an argument is a ndarray",
    ),
    "a gradient": ({"after": "model[0].weight.grad.numpy()"}, 0, ""),
    "a graph": ({"read": "loss.uop"}, 14, "what a tensor is made of is asked for"),
    "a context": ({"before": "with Context(JIT=0): out = out * 2"}, 12, "it is called inside of a Context"),
}


@pytest.mark.parametrize("name", WHY)
def test_the_line_and_the_reason(name: str, tmp_path: Path) -> None:
    change, line, why = WHY[name]
    script = tmp_path / "train.py"
    parts = {"layer": "ReLU()", "before": "pass", "read": "pass", "after": "pass"} | change
    text = PROGRAM.format(**parts)
    script.write_text(text.replace("import Tensor, nn", "import Context, Tensor, nn"))
    done = subprocess.run([sys.executable, script], env={**os.environ, "DEBUG": "1"}, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    found = done.stdout[done.stdout.index("FOLLOW: ") :].splitlines()
    recorded, replayed, at_once = (int(n) for n in found[0].split() if n.isdigit())
    if not why:
        assert recorded + replayed >= 7 and at_once <= 1, found
        return
    assert at_once >= 7
    assert any(f"train.py:{line}: " in text and why in text for text in found[1:]), found


def test_lines_and_reasons_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = FollowCounts()
    monkeypatch.setattr("manygrad.tensor.deferred.counts.DEBUG", 1)
    for i in range(MOST_LINES + 10):
        monkeypatch.setattr("manygrad.tensor.deferred.counts.user_line", lambda i=i: f"train.py:{i}")
        for k in range(1 + (i == 3) * 2 * TOLD):
            counts.note_flush(f"reason {k}")
            counts.note_flush("reason 0")
    assert len(counts.reasons) == MOST_LINES and len(counts.reasons["train.py:3"]) == TOLD
    told = counts.told()
    assert len(told) == TOLD + 2 and told[1].startswith(f"  train.py:3: {2 * TOLD + 2}x reason 0; 1x reason 1")
    assert told[-1] == f"  and {MOST_LINES - TOLD} more lines"
