"""The traces of all ranks as one, with an arrow for each message."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from manygrad.launcher import traces
from manygrad.launcher.api import launch

PICTURE = Path(__file__).parents[2] / "docs" / "picture.py"


def summed() -> list[float]:
    from manygrad import Tensor, TinyJit, world

    x = Tensor(np.arange(2 * world.size * 3, dtype=np.float32).reshape(2 * world.size, 3))
    cut, step = x.shard(world.devices, axis=0).realize(), TinyJit(lambda x: x.sum(0))
    return [step(cut) for _ in range(4)][-1].tolist()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_run_leaves_one_trace_with_an_arrow_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], transport: str
) -> None:
    monkeypatch.setenv("PROFILE", "1")
    monkeypatch.setenv("TRANSPORT", transport)
    assert launch(summed, nodes=3, run_dir=tmp_path / "run") == [[45.0, 51.0, 57.0]] * 3
    whole = tmp_path / "run" / "profile.json"
    assert f"the profile of all ranks is in {whole}" in capfd.readouterr().err
    events = json.loads(whole.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}
    leave, come = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert leave and leave.keys() == come.keys()
    assert max(Counter(e["id"] for e in events if e["ph"] in "sf").values()) == 2  # each message has one of both
    for name, start in leave.items():
        assert start["pid"] != come[name]["pid"] and start["ts"] <= come[name]["ts"], name
    calls = [e["name"] for e in events if e["ph"] == "X" and e["cat"] == "calls"]
    assert any(n.startswith("send 12 to") or n.startswith("send 4 to") for n in calls), calls
    svg = tmp_path / "step.svg"
    subprocess.run([sys.executable, str(PICTURE), str(whole), str(svg)], check=True, timeout=60)
    drawn = ElementTree.fromstring(svg.read_text())
    assert len(drawn.findall("{*}line")) >= 2 and len(drawn.findall("{*}rect")) > 10


def test_traces_are_joined_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    assert traces.join(str(tmp_path)) is None
    one = tmp_path / "profile.rank0.json"
    one.write_text(json.dumps({"traceEvents": [{"pid": 0}]}))
    assert traces.join(str(tmp_path)) is None  # it is there
    (tmp_path / "profile.rank1.json").write_text('{"traceEvents": [')
    with pytest.raises(ValueError):
        traces.join(str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"profile.rank0.json", "profile.rank1.json"}
    (tmp_path / "profile.rank1.json").write_text('{"traceEvents": [{"pid": 1}]}')
    assert traces.join(str(tmp_path)) == str(tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text())["traceEvents"] == [{"pid": 0}, {"pid": 1}]
