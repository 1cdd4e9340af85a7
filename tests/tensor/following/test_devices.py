"""Loops over several devices of one process are replayed as others are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from manygrad import Context, Tensor, nn, no_grad
from manygrad.nn import functional as F
from manygrad.tensor.environment import FOLLOW
from manygrad.tensor.uop import Ops
from tests.tensor.following.loops import LAYERS, Counts, Training, array, same

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
DEVICES = ("CPU:0", "CPU:1", "CPU:2")


class Sharded(Training):
    """`Training`, with a copy of the model on each device, and batches that are cut over them, or copied, too."""

    axis: int | None = 0

    def __init__(self, *layers: nn.Module, lr: float = 0.01) -> None:
        super().__init__(*layers, lr=lr)
        for t in self.model.state_dict().values():
            t.shard_(DEVICES)

    def batch(self, i: int, rows: int = 7) -> tuple[Tensor, Tensor]:
        x, y = Tensor(array(rows, 4, seed=i)), Tensor(np.arange(rows) % 3)
        return x.shard(DEVICES, self.axis), y.shard(DEVICES, self.axis)

    def loss(self, i: int) -> Tensor:
        x, y = self.batch(i)
        return F.cross_entropy(self.model(x), y)


def plain(loop: Sharded, i: int) -> list[Tensor]:
    loop.optimizer.zero_grad()
    loss = loop.loss(i)
    loss.backward()
    loop.optimizer.step()
    return [loss]


def read(loop: Sharded, i: int) -> list[Tensor]:
    loop.optimizer.zero_grad()
    loss = loop.loss(i)
    loss.item()
    loss.backward()
    loop.optimizer.step()
    return [loss]


def numbers(loop: Sharded, i: int) -> list[Tensor]:
    loss = loop.loss(i) * (1 + 1 / (i + 1))
    loss.backward()
    with no_grad():
        for p in loop.model.parameters():
            assert p.grad is not None
            p -= p.grad * (0.1 / (i + 1))
            p.grad = None
    return [loss]


def moved(loop: Sharded, i: int) -> list[Tensor]:
    x, _ = loop.batch(i)
    out = loop.model(x).detach()
    return [out.to("CPU:1") * 2, out.shard(DEVICES).sum(0), out.to("CPU:0").shard(DEVICES, 1).amax(1)]


STEPS: dict[str, Callable[[Sharded, int], list[Tensor]]] = {
    "plain": plain,
    "read": read,
    "numbers": numbers,
    "moved": moved,
}


@pytest.mark.parametrize("layer, axis", [("plain", 0), ("batch norm", 0), ("dropout", 0), ("plain", None)])
@pytest.mark.parametrize("name", STEPS)
def test_a_loop_over_devices_is_replayed(name: str, layer: str, axis: int | None, counts: Counts) -> None:
    def run(counted: Counts | None = None) -> list[np.ndarray]:
        loop = Sharded(*LAYERS[layer]())
        loop.axis = axis
        found: list[np.ndarray] = []
        for i in range(16):
            if counted is not None and i == 10:
                counted.replays = counted.captures = counted.flushes = 0
            found += [t.numpy() for t in STEPS[name](loop, i)]
        if counted is not None:
            assert (counts.captures, counts.flushes) == (0, 0) and counts.replays >= 6
        return [*found, *loop.state()]

    same(run)
    run(counts)


@pytest.mark.parametrize("axis", [0, None])
def test_a_value_that_is_read_is_stored_where_it_lies(axis: int | None) -> None:
    """Read again after the step it shows the same bits: it is not computed once more among other calls."""
    loop = Sharded()
    with Context(FOLLOW=0):
        loop.axis = axis
        loss = loop.loss(0)
        out = loop.model(loop.batch(0)[0])
        for t in (loss, out):
            first = t.numpy()
            assert t.uop.op is Ops.BUFFER
            np.testing.assert_array_equal(t.numpy(), first)
