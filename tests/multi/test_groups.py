"""Groups of workers, each with a replica of a model that is cut over the group, and values of its own."""

from __future__ import annotations

import numpy as np
import pytest

from manygrad import Tensor, TinyJit, nn, values_may_differ, world
from manygrad.errors import LaunchError
from manygrad.launcher.api import launch
from manygrad.multi.world import Membership, World


def world_of(rank: int, size: int, per_node: int = 1) -> World:
    return World(Membership(rank, size, devices_per_node=per_node))


def test_groups_are_neighbours() -> None:
    assert [world_of(r, 4).group(2) for r in range(4)] == [("CPU:0@0", "CPU:0@1")] * 2 + [("CPU:0@2", "CPU:0@3")] * 2
    assert world_of(2, 4, per_node=2).group(4) == ("CPU:0@2", "CPU:1@2")
    assert world_of(5, 6).group(1) == world_of(0, 6).devices
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"4 workers do not make {count} groups"):
            world_of(1, 4).group(count)
    with pytest.raises(TypeError, match="how many groups there are"):
        world_of(1, 4).group([0, 1])  # type: ignore[arg-type]


RULES = {"0.*": 0, "2.weight": 1}  # the first layer by rows, the second by columns: an all-reduce at the end


def replicas(groups: int) -> float:
    """Each group makes as many steps as it likes with a replica; in between, and at the end, all sum what they have."""
    devices = world.group(groups)
    number = world.devices.index(devices[0]) // len(devices)
    rows = np.random.default_rng(1)
    first, second = (rows.integers(-3, 4, s).astype(np.float32) for s in ((12, 8), (8, 12)))
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.ReLU(), nn.Linear(12, 8, bias=False))
    model[0].weight.assign(Tensor(first)).realize()
    model[2].weight.assign(Tensor(second)).realize()
    nn.shard_rules(model, RULES, devices)
    step = TinyJit(lambda x: model(x))
    total = 0.0
    for round in range(3):
        made = 0.0
        for i in range(3 + 4 * number):  # (the groups go on at their own pace)
            x = np.full((2, 8), i + 10 * number + round, np.float32)
            y = step(Tensor(x).shard(devices)).numpy()
            assert np.array_equal(y, np.maximum(x @ first.T, 0) @ second.T), (number, round, i)
            made += float(y.sum())
        with values_may_differ():
            own = Tensor(np.full((world.size, 1), made, np.float32))
            total += own.shard(world.devices, axis=0).sum().item()
    return total


@pytest.mark.parametrize("groups", [2, 4])
def test_replicas_of_groups(groups: int) -> None:
    found = launch(replicas, groups, nodes=4)
    assert len(set(found)) == 1 and found[0] > 0


def apart() -> None:
    devices = world.group(2)
    size = 4 + 4 * (world.rank == 3)  # one of the second group builds another graph
    Tensor(np.ones((2, size), np.float32)).shard(devices, axis=0).sum(0).realize()


def test_members_that_run_different_programs_are_told() -> None:
    with pytest.raises(LaunchError, match="PlanMismatch"):
        launch(apart, nodes=4)


def leaves_its_group(how: str) -> None:
    devices = world.group(2)
    step = TinyJit(lambda x: x.sum(0).realize())
    for i in range(10 if world.rank != 3 else 7):
        step(Tensor(np.full((4, 8), i, np.float32)).shard(devices, axis=0).realize())
    if how == "a plan":
        with values_may_differ():
            Tensor(np.ones((4, 6), np.float32)).shard(world.devices, axis=0).sum(0).realize()


@pytest.mark.parametrize("how", ["the end", "a plan"])
def test_a_rank_that_leaves_its_group_is_named(how: str) -> None:
    """It has ended, or is where all ranks are to come, while the other one of its group waits for it."""
    does = "finished the script" if how == "the end" else "came to plan 1, .*"
    with pytest.raises(LaunchError, match=f"rank 3 {does} while rank 2 waits for it"):
        launch(leaves_its_group, how, nodes=4)
