"""Traces: their form, their tracks, nothing when nobody listens, one file a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import manygrad
from manygrad import Context, Tensor, TinyJit
from manygrad.multi.world import Membership, World
from manygrad.runtime.current import use
from manygrad.runtime.devices import get_device
from manygrad.runtime.profile import profile as profiling
from manygrad.runtime.runtime import Runtime
from manygrad.tensor.uop import passes

TWO = ("CPU:0", "CPU:1")


def spans(trace: dict[str, Any], cat: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == cat]


def test_a_trace_has_chromes_form_and_all_lanes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    @TinyJit
    def step(x: Tensor) -> Tensor:
        y = x.shard(TWO, axis=0)
        return ((y * 1.28125).exp().sum() + 1).to("CPU:1")

    x = Tensor(np.ones((6, 4), np.float32)).realize()
    get_device("CPU").kernels.kernels.clear()
    with manygrad.profile(str(path)) as p:
        for _ in range(3):
            step(x)
    found = json.loads(path.read_text())
    tracks = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert {"steps", "schedule", "compile", "kernels CPU:0", "kernels CPU:1", "copies CPU:1", "collectives"} <= tracks
    assert len(spans(found, "steps")) == 3 and len(p.events) == sum(e["ph"] == "X" for e in found["traceEvents"])
    for e in found["traceEvents"]:
        assert e["pid"] == 0 and isinstance(e["tid"], int) and e["ph"] in "XM"
        if e["ph"] == "X":
            assert e["dur"] >= 0 and e["name"] and e["ts"] > 0
    passes = {e["name"] for e in spans(found, "schedule")}
    assert {
        "lower_shards",
        "simplify",
        "lower_storage",
        "insert_stores",
        "split_kernels",
        "rangeify",
        "order_items",
        "chain_kernels",
        "pass_parts",
        "plan_memory",
        "schedule",
    } <= passes
    kernel = spans(found, "kernels")[0]
    assert {"line", "loops", "reduces", "buffers", "flops", "bytes", "opts"} == set(kernel["args"])
    assert kernel["args"]["line"].startswith("test_profile.py:")
    assert "float32" in kernel["args"]["buffers"][0]


def test_kernels_of_a_native_graph_have_their_own_times() -> None:
    @TinyJit
    def step(x: Tensor) -> Tensor:
        y = (x @ x).realize()
        return (y.sum(0) + 1).realize()

    x = Tensor(np.ones((16, 16), np.float32)).realize()
    for _ in range(3):
        step(x)
    (graph,) = step.captured.items
    with manygrad.profile() as p:
        out = step(x)
    kernels = [e for e in p.events if e.track == "kernels CPU:0"]
    assert [e.name for e in kernels] == [i.kernel.name for i in graph.items]  # type: ignore[attr-defined]
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(kernels))
    (whole,) = [e for e in p.events if e.track == "steps"]
    assert whole.start <= kernels[0].start and kernels[-1].end <= whole.end  # the clock of the native code is Python's
    assert (out.numpy() == 16 * 16 + 1).all()


def test_nothing_is_recorded_when_nobody_listens() -> None:
    assert not profiling.active and not passes.timers
    with manygrad.profile() as p:
        pass
    (Tensor(np.ones(4, np.float32)) * 1.40625).realize()
    assert p.events == [] and not profiling.active and not passes.timers


def test_nested_profiles_each_hear_what_runs_inside_them() -> None:
    x = Tensor(np.ones(4, np.float32)).realize()
    with manygrad.profile() as outer:
        (x + 1).realize()
        with manygrad.profile() as inner:
            (x + 2).realize()
    assert len(outer.events) > len(inner.events) > 0 and outer.events[-len(inner.events) :] == inner.events


def test_it_is_written_also_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyError), manygrad.profile(str(tmp_path / "a.json")):
        (Tensor(np.ones(3, np.float32)) + 1).realize()
        raise KeyError
    assert spans(json.loads((tmp_path / "a.json").read_text()), "kernels")


def test_debug_2_prints_each_kernel_of_a_graph_and_its_share_of_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    @TinyJit
    def step(x: Tensor) -> Tensor:
        y = (x * 3).realize()
        return (y.sum(0) + 1).realize()

    x = Tensor(np.ones((16, 16), np.float32)).realize()
    for _ in range(3):
        step(x)
    capsys.readouterr()
    with Context(DEBUG=2):
        step(x)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("***")]
    assert len(lines) == 2 and all("GFLOPS" in line and "GB/s" in line and "% of limit" in line for line in lines)


@pytest.mark.parametrize(
    ("path", "rank", "size", "want"),
    [
        ("1", 0, 1, "profile.json"),
        ("1", 1, 2, "profile.rank1.json"),
        ("out/t.json", 0, 1, "out/t.json"),
        ("out/t.json", 3, 4, "out/t.rank3.json"),
        ("out", 0, 1, "out/profile.rank0.json"),
    ],
)
def test_names_of_files(path: str, rank: int, size: int, want: str) -> None:
    with use(Runtime(world=World(Membership(rank, size)))):
        assert profiling.file_of(path) == want


PROGRAM = """
import sys
import numpy as np
from manygrad import Tensor, world
from manygrad.multi.world import Membership
world.show(Membership(int(sys.argv[1]), 2))
(Tensor(np.ones(8, np.float32)) * 2).realize()
"""


def test_two_workers_write_a_file_each(tmp_path: Path) -> None:
    env = {**os.environ, "PROFILE": str(tmp_path / "traces")}
    for rank in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(rank)], env=env, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert f"profile.rank{rank}.json" in done.stdout
    files = sorted((tmp_path / "traces").iterdir())
    assert [f.name for f in files] == ["profile.rank0.json", "profile.rank1.json"]
    for rank, file in enumerate(files):
        found = json.loads(file.read_text())
        assert {e["pid"] for e in found["traceEvents"]} == {rank} and spans(found, "kernels")
