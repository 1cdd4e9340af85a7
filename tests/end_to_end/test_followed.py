"""Plain loops over workers are followed and replayed: all ranks agree how each step is made, also where one of them
alone reads what it holds, and one that runs another program is told."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from manygrad import Context, Tensor, launch, nn, no_grad, world
from manygrad.errors import LaunchError
from manygrad.nn import functional as F
from manygrad.nn.data import DataLoader, TensorDataset
from manygrad.tensor.deferred import counts
from manygrad.tensor.environment import FOLLOW

pytestmark = pytest.mark.skipif(not FOLLOW, reason="FOLLOW=0: no call is put off")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test
STEPS = 14


class Parallel:
    """A model with a copy on each worker, and batches that are cut over them."""

    def __init__(self, *layers: nn.Module) -> None:
        Tensor.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Tanh(), nn.Linear(8, 3))
        for t in self.model.state_dict().values():
            t.shard_(world.devices)
        self.optimizer = nn.optim.Adam(self.model.parameters(), lr=0.01)

    def loss(self, i: int, rows: int = 6) -> Tensor:
        x = Tensor(np.random.default_rng(i).standard_normal((rows, 4)).astype(np.float32))
        y = Tensor(np.arange(rows) % 3).shard(world.devices, axis=0)
        return self.loss_of(x.shard(world.devices, axis=0), y)

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        return F.cross_entropy(self.model(x), y)

    def step(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> list[np.ndarray]:
        return [t.numpy() for t in self.model.state_dict().values()]


def plain(*layers: nn.Module) -> list[np.ndarray]:
    loop = Parallel(*layers)
    return [*(loop.step(loop.loss(i)).numpy() for i in range(STEPS)), *loop.state()]


def scheduled() -> list[np.ndarray]:
    loop = Parallel()
    schedule = nn.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, STEPS)
    losses = []
    for i in range(STEPS):
        losses.append(loop.step(loop.loss(i)).numpy())
        schedule.step()
    return [*losses, *loop.state()]


def read_first() -> list[np.ndarray]:
    loop, found = Parallel(), []
    for i in range(STEPS):
        loss = loop.loss(i)
        found.append(loss.numpy())
        loop.step(loss)
    return [*found, *loop.state()]


def by_hand() -> list[np.ndarray]:
    loop, found = Parallel(), []
    for i in range(STEPS):
        loss = loop.loss(i) * (1 + 1 / (i + 1))
        loss.backward()
        with no_grad():
            for p in loop.model.parameters():
                assert p.grad is not None
                p -= p.grad * (0.1 / (i + 1))
                p.grad = None
        found.append(loss.numpy())
    return [*found, *loop.state()]


def loaded() -> list[np.ndarray]:
    """Each rank has read its own rows of a batch."""
    x = np.random.default_rng(0).standard_normal((6 * STEPS, 4)).astype(np.float32)
    loop, batches = Parallel(), DataLoader(TensorDataset(x, np.arange(6 * STEPS) % 3), 6, devices=world.devices)
    return [*(loop.step(loop.loss_of(*batch)).numpy() for batch in batches), *loop.state()]


def other_sizes() -> list[np.ndarray]:
    loop = Parallel()
    return [*(loop.step(loop.loss(i, 3 + 2 * (i % 2))).numpy() for i in range(2 * STEPS)), *loop.state()]


def read_on_one_rank() -> list[np.ndarray]:
    """In the middle of a step, between two, and after the last one, when no other rank comes any more."""
    loop, found = Parallel(nn.Dropout(0.3)), []
    first = loop.model[0].weight
    for i in range(2 * STEPS):
        loss = loop.loss(i)
        if i % 5 == world.rank:
            assert first.abs().sum().item() > 0
        loss.backward()
        if i % 7 == world.rank:
            assert first.numpy().any()
        loop.optimizer.step()
        found.append(loss.numpy())
        if i % 3 == 1 + world.rank:
            assert (first.square().sum() + loss).item() > 0
    found += loop.state()
    if world.rank == 1:
        for _ in range(4):
            assert first.square().sum().item() > 0
    return found


def beside_garbage() -> list[np.ndarray]:
    """Garbage holds a lazy value that ranks communicate for; one rank has collected it already."""
    gc.collect()
    gc.disable()
    try:
        old: Any = Parallel()
        old.itself, old.last = old, old.loss(0) * 2
        del old
        if world.rank == 0:
            gc.collect()
        return plain()
    finally:
        gc.enable()


def garbage_of_each_step() -> list[np.ndarray]:
    """Values of each step are held by garbage, which one rank collects at once and the others do not."""
    gc.collect()
    gc.disable()
    try:
        loop, losses = Parallel(), []
        for i in range(2 * STEPS):
            loss = loop.loss(i)
            held: Any = [loss * 2, loss.detach() + 1, loop.model[0].weight.sum()]
            held.append(held)
            loop.step(loss)
            if i % 3 != 1:
                losses.append(loss.numpy())
            del held
            if world.rank == 0:
                gc.collect()
        return [*losses, *loop.state()]
    finally:
        gc.enable()


LOOPS: dict[str, tuple[Callable[[], list[np.ndarray]], int]] = {
    "plain": (plain, STEPS - 5),
    "batch norm": (lambda: plain(nn.BatchNorm1d(8)), STEPS - 5),
    "dropout": (lambda: plain(nn.Dropout(0.3)), STEPS - 5),
    "scheduled": (scheduled, STEPS - 6),
    "read first": (read_first, 2 * STEPS - 12),
    "by hand": (by_hand, 2),
    "loaded": (loaded, STEPS - 5),
    "other sizes": (other_sizes, 2 * STEPS - 12),
    "read on one rank": (read_on_one_rank, 3),
    "beside garbage": (beside_garbage, STEPS - 5),
    "garbage of each step": (garbage_of_each_step, STEPS - 5),
}


def both() -> dict[str, tuple[list[np.ndarray], list[np.ndarray], int]]:
    """Of each loop what it shows where calls are made as they come, and where they are put off, and its replays."""
    found = {}
    for name, (loop, _) in LOOPS.items():
        with Context(FOLLOW=0):
            want = loop()
        before = counts.COUNTS.replays
        found[name] = want, loop(), counts.COUNTS.replays - before
    return found


@pytest.mark.parametrize("nodes", [2, 3])
def test_loops_over_workers_are_replayed(nodes: int, ray: Any, tmp_path: Path) -> None:
    for ranks in zip(
        *(found.items() for found in launch(both, nodes=nodes, run_dir=str(tmp_path / "run"), timeout=80))
    ):
        for name, (want, got, replays) in ranks:
            assert replays >= LOOPS[name][1], name
            for a, b, c in zip(got, want, ranks[0][1][1], strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)
                np.testing.assert_array_equal(a, c, err_msg=name)


def test_garbage_of_one_rank_is_not_computed(ray: Any, tmp_path: Path) -> None:
    (a, found), (b, _) = launch(garbage, nodes=2, run_dir=str(tmp_path / "run"), timeout=60)
    assert found >= STEPS - 5
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def garbage() -> tuple[list[np.ndarray], int]:
    """What the loop shows, and how many replays it has made."""
    return beside_garbage(), counts.COUNTS.replays


def differ(how: str) -> None:
    """Steps that are replayed; then rank 1 does something else."""
    loop, odd = Parallel(), world.rank == 1
    for i in range(20):
        other = odd and i == 12
        if other and how == "the end":
            return
        loss = loop.loss(i)
        if other and how == "a call":
            loss = loss * 2  # the other call
        loop.step(loss)
        if other and how == "a read":
            loop.loss(i).item()  # the other read


@pytest.mark.parametrize(
    "how, words",
    [
        ("a call", ["PlanMismatch", "rank 1 came to a plan", "test_followed.py"]),
        ("a read", ["PlanMismatch", "test_followed.py"]),
        (
            "the end",
            ["PlanMismatch: rank 1 finished the script", "what a loop is about to compute at test_followed.py"],
        ),
    ],
)
def test_a_rank_whose_loop_differs_is_told(how: str, words: list[str], ray: Any, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(differ, how, nodes=2, run_dir=str(tmp_path / "run"), timeout=40)
    assert caught.value.details["duration_s"] < 20
    for w in [*words, "Consequences:"]:
        assert w in caught.value.report, (w, caught.value.report)
