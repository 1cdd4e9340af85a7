"""Graphs and collectives over shared memory as one native call: the same numbers and counts as one by one, also when a
peer is late in the middle of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import GlobalCounters, Tensor, TinyJit, Variable, world
from manygrad.errors import LaunchError
from manygrad.launcher.api import launch
from manygrad.runtime.current import current
from manygrad.runtime.executors.joined import JoinedItem
from manygrad.runtime.profile.profile import profile
from manygrad.tensor.environment import Context

LAYERS = 5


class Model:
    """Layers whose weights are cut over all devices: an all-reduce each."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def cut(axis: int) -> list[Tensor]:
            weights = rng.standard_normal((LAYERS, 16, 16)).astype(np.float32) / 4
            return [Tensor(w).shard(world.devices, axis).realize() for w in weights]

        self.up, self.down = cut(1), cut(0)
        self.inputs = [Tensor(np.full((3, 16), k, np.float32)).shard(world.devices).realize() for k in range(4)]

    def __call__(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down):
            x = x + (x @ up).relu() @ down
        return x


def counted(step: Any, x: Tensor) -> tuple[Any, ...]:
    """What a run counts, and its result."""
    endpoint, communication = current().communication.endpoint, current().communication
    assert endpoint is not None

    def now() -> tuple[int, ...]:
        c = GlobalCounters
        traffic = endpoint.bytes_sent, endpoint.bytes_received, endpoint.messages
        return (c.kernel_count, c.global_ops, c.global_mem, c.net_bytes, *traffic, communication.entered[0])

    before = now()
    result = step(x).numpy().tobytes()
    return (*(b - a for a, b in zip(before, now())), result)


def repeats(late_s: float) -> tuple[int, int, float]:
    """How many replays on the same memory, which native code makes alone, differ from those carried out item by item,
    in results or counts; how many native code made; the steps that were counted, of 40."""
    model, wrong, native = Model(), 0, 0
    joined, single = TinyJit(model.__call__), TinyJit(model.__call__)
    x = model.inputs[1]
    for _ in range(4):
        joined(x), single(x)
    before = GlobalCounters.steps
    for k in range(20):
        if late_s and k % 2 == world.rank:
            time.sleep(late_s)
        native += joined.again is not None and joined.again.replay.holds()
        found = counted(joined, x)
        with Context(JIT=2):
            wanted = counted(single, x)
        wrong += found != wanted
    return wrong, native, GlobalCounters.steps - before


@pytest.mark.parametrize("nodes, late_s", [(2, 0.0), (4, 0.0), (2, 0.06)])
def test_replays_on_the_same_memory(tmp_path: Path, nodes: int, late_s: float) -> None:
    for wrong, native, steps in launch(repeats, late_s, nodes=nodes, run_dir=tmp_path / "run"):
        assert wrong == 0 and steps == 40 and (native or late_s)


def steps(late_s: float) -> tuple[int, list[str], float]:
    """How many of the steps differ from those that are carried out item by item; the items; the greatest error."""
    model, wrong, error = Model(), 0, 0.0
    joined, single = TinyJit(model.__call__), TinyJit(model.__call__)
    for k in range(12):
        x = model.inputs[k % 4]
        if late_s and k % 2 == world.rank:
            time.sleep(late_s)
        found = counted(joined, x)
        with Context(JIT=2):  # (no graphs)
            wanted = counted(single, x)
        wrong += k > 2 and found != wanted
        plain = model(x).numpy()
        error = max(error, float(np.abs(np.frombuffer(found[-1], np.float32).reshape(plain.shape) - plain).max()))
    with profile():
        wrong += joined(model.inputs[1]).numpy().tobytes() != single(model.inputs[1]).numpy().tobytes()
    assert current().communication.waited_s > late_s  # (in turns, six times)
    return wrong, [type(i).__name__ for i in joined.captured.items], error


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_step_is_one_native_call(tmp_path: Path, nodes: int) -> None:
    for wrong, items, error in launch(steps, 0.0, nodes=nodes, run_dir=tmp_path / "run"):
        assert wrong == 0 and items == ["JoinedItem"] and error == 0.0


def test_a_step_goes_on_when_a_peer_is_late(tmp_path: Path) -> None:
    """Later than a native call waits: each rank comes to Python, and back."""
    for wrong, items, error in launch(steps, 0.12, nodes=2, run_dir=tmp_path / "run"):
        assert wrong == 0 and items == ["JoinedItem"] and error == 0.0


def stopped_everywhere() -> int:
    """How many results differ where each collective in turn ends the native call early, and Python carries it out."""
    model = Model()
    step = TinyJit(model.__call__)
    want = [step(x).numpy().tobytes() for x in model.inputs]
    (item,) = step.captured.items
    assert isinstance(item, JoinedItem)
    wrong, endpoint = 0, item.endpoint
    run, stops = endpoint.native.run_joined, []

    def stopping(table: Any, links: Any) -> None:
        """Ends before row `stop`, as if an earlier message were still queued there."""
        at, count = int(table[2]), int(table[1])
        if stops and at <= stops[0] < count:
            table[1] = stops.pop(0)
        run(table, links)
        table[1] = count

    endpoint.native.run_joined = stopping  # type: ignore[method-assign]
    for row in range(len(item.items)):
        for x, y in zip(model.inputs, want):
            stops[:] = [row]
            wrong += step(x).numpy().tobytes() != y
    return wrong


def test_python_carries_out_any_one_of_them(tmp_path: Path) -> None:
    assert launch(stopped_everywhere, nodes=2, run_dir=tmp_path / "run") == [0, 0]


def with_variable(differs: bool) -> list[Any]:
    """Of layers on the sum of so many first rows."""
    model, n = Model(), Variable("n", 1, 16)
    x = Tensor(np.arange(256, dtype=np.float32).reshape(16, 16) / 256).shard(world.devices).realize()

    @TinyJit
    def step(x: Tensor, k: Any) -> Tensor:
        return model(x[:k].sum(0, keepdim=True))

    found = []
    for k in (3, 5, 2, 16, 7):
        found.append(step(x, n.bind(k)).tolist())
        np.testing.assert_array_equal(
            found[-1], model(Tensor(x.numpy()[:k]).shard(world.devices).sum(0, keepdim=True)).numpy()
        )
    assert [type(i) for i in step.captured.items] == [JoinedItem]
    if differs:
        step(x, n.bind(4 + world.rank))
    return found


def test_variables(tmp_path: Path) -> None:
    one, other = launch(with_variable, False, nodes=2, run_dir=tmp_path / "run")
    assert one == other


def test_ranks_with_other_values_of_a_variable_are_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="PlanMismatch"):
        launch(with_variable, True, nodes=2, run_dir=tmp_path / "run")
