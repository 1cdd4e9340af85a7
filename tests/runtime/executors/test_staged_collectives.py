"""Collectives over devices whose memory the host does not see: messages pass through the CPU, sums do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor, TinyJit
from manygrad.launcher.api import launch
from manygrad.multi.world import Membership, World
from manygrad.nn.optim import SGD
from manygrad.runtime.current import use
from manygrad.runtime.devices import BACKENDS
from manygrad.runtime.runtime import Runtime
from manygrad.tensor.uop import Ops, UOp
from tests.opencl import OPENCL
from tests.schedule.programs import scheduled

X = np.random.default_rng(0).standard_normal((12, 6)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)


def train(devices: tuple[str, ...], cut: bool = False) -> tuple[list[float], list[list[float]]]:
    """(losses, weights) of a few steps, captured after the first; `cut`: the weight has rows on each device."""
    w = Tensor(W).shard(devices, axis=0 if cut else None)
    w.requires_grad_()
    optimizer = SGD([w], lr=0.1)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (x @ w).softmax().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with Tensor.train():
        losses = [step(Tensor(X * (1 + k)).shard(devices, axis=0)).item() for k in range(5)]
    return losses, w.tolist()


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "TINY", "tests.runtime.devices.tiny")


@pytest.mark.parametrize("kind", ["TINY", OPENCL])
@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "cut"])
def test_training_on_several_devices_of_a_process(kind: str, cut: bool) -> None:
    want = train(("CPU:0",))
    got = train(tuple(f"{kind}:{i}" for i in range(3)), cut)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["TINY", OPENCL])
@pytest.mark.parametrize("size", [1, 2])
def test_sums_are_taken_on_the_device_that_holds_the_result(kind: str, size: int) -> None:
    me = World(Membership(rank=0, size=size, devices_per_node=2), kind)
    with use(Runtime(world=me)):
        x = Tensor(np.ones((4, 4096), np.float32)).shard(me.devices, axis=0)
        linear = scheduled(x.sum(0)).linear
    (what,) = [call.src[0] for call in linear.src if call.src[0].op is Ops.ALLREDUCE]
    calls = what.src[0].src
    sums = [call for call in calls if call.src[0].op is Ops.SINK]
    assert sums and {device_of(a) for call in sums for a in call.src[1:]} == {f"{kind}:0", f"{kind}:1"}
    assert all(len({device_of(a) for a in call.src[1:]}) == 1 for call in sums)
    sent = [device_of(call.src[1]) for call in calls if call.src[0].op in (Ops.SEND, Ops.RECEIVE)]
    assert set(sent) == ({"CPU"} if size > 1 else set())


def device_of(u: UOp) -> str:
    return (u.src[0] if u.op is Ops.VIEW else u).arg.device


@pytest.mark.parametrize("kind", ["TINY", OPENCL])
def test_every_way_of_moving_shards(kind: str) -> None:
    devices = tuple(f"{kind}:{i}" for i in range(3))
    x = Tensor(X[:8]).shard(devices, axis=0)  # uneven
    assert x.sum(0).allclose(Tensor(X[:8].sum(0)).shard(devices), atol=1e-5)
    np.testing.assert_array_equal(x.shard(devices, axis=1).numpy(), X[:8])  # all-to-all
    np.testing.assert_array_equal(x.to(devices[1]).numpy(), X[:8])  # all-gather
    np.testing.assert_allclose(x.amax(0).numpy(), X[:8].max(0))
    np.testing.assert_allclose((x.T @ x).numpy(), X[:8].T @ X[:8], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["TINY", OPENCL])
def test_a_captured_step_on_several_devices_reads_what_came_before(kind: str) -> None:
    devices = tuple(f"{kind}:{i}" for i in range(3))
    w = Tensor(np.ones((4, 2), np.float32)).shard(devices).contiguous().realize()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        return (x @ w).relu().sum(0)

    for i in range(8):
        x = Tensor(np.full((7, 4), i, np.float32)).shard(devices, 0)
        np.testing.assert_allclose(step(x).numpy(), np.full(2, 28.0 * i))


@pytest.mark.parametrize("kind", ["TINY", OPENCL])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_index_made_of_constants_is_checked_on_every_device(kind: str, axis: int) -> None:
    """It lies on no device of its own: what is computed of it on one is read by the others."""
    devices, a = (f"{kind}:0", f"{kind}:1"), np.arange(60, dtype=np.float32).reshape(30, 2)
    t = Tensor(a).shard(devices, axis)
    i = Tensor.arange(30).cast("uint8").cast("int32")
    rows = t.gather(0, i.reshape(30, 1).expand(30, 2).cast("int64") % 30)
    np.testing.assert_array_equal(rows.numpy(), a)
    with pytest.raises(IndexError, match="index 30 is out of range"):
        t.gather(0, (i + 1).reshape(30, 1).expand(30, 2).cast("int64")).numpy()


@pytest.mark.parametrize("kind", ["PYTHON", "TINY", OPENCL])
def test_a_captured_step_on_devices_of_two_kinds(kind: str) -> None:
    """Kernels of two kinds are not one graph."""

    @TinyJit
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return ((x * 2).contiguous() + 1).realize(), ((x.to(kind) * 3).contiguous() + 1).realize()

    for i in range(5):
        a, b = step(Tensor(np.full(5, i, np.float32), device="CPU").realize())
        assert a.tolist() == [2.0 * i + 1] * 5 and b.tolist() == [3.0 * i + 1] * 5


def _worker() -> Any:
    from manygrad import world

    assert world.device_kind == "OPENCL"
    losses, weights = train(world.devices)
    return losses, weights


@pytest.mark.parametrize("kind", [OPENCL])
def test_training_on_two_workers(kind: str, tmp_path: Path) -> None:
    want = train(("CPU:0",))
    found = launch(_worker, nodes=2, device=kind, timeout=300, run_dir=str(tmp_path / "run"))
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0][0], want[0], rtol=1e-5)
    np.testing.assert_allclose(found[0][1], want[1], rtol=1e-4, atol=1e-6)
