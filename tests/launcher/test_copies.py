"""Who survives a failure has the last snapshot in memory, and what a lost worker had is with its neighbour: the next
attempt goes on from there, without the disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

Launcher = Callable[..., Any]

# adds step + 1 in each step to values that each rank has some rows of, and to copies of others
TRAIN = """
import os, shutil, signal, sys, time
import numpy as np
from manygrad import Tensor, world
from manygrad.checkpoint import Checkpointer

copies = Tensor(np.zeros((640, 512), np.float32)).shard(world.devices).contiguous().realize()
cut = Tensor(np.zeros((6 * world.size, 8), np.float32)).shard(world.devices, axis=0).contiguous().realize()
state = {{"copies": copies, "cut": cut, "at": 0}}
checkpoints = Checkpointer("checkpoints", state, {options})
begun = checkpoints.resume()
print("epoch", world.epoch, "rank", world.rank, "begins at", begun, "with", state["at"], flush=True)
for i in range(begun, 8):
    copies.assign(copies + (i + 1)).realize()
    cut.assign(cut + (i + 1)).realize()
    Tensor(np.ones(world.size, np.float32)).shard(world.devices, axis=0).sum().item()
    state["at"] = i + 1
    {fault}
    checkpoints.step(i + 1)
assert (copies.numpy() == 36).all() and (cut.numpy() == 36).all(), (copies.numpy(), cut.numpy())
print("done", flush=True)
"""
BEGUN = re.compile(r"epoch (\d+) rank (\d+) begins at (\d+) with (\d+)")
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# every rank, so that all have done what they do beside the script; then rank 1 takes the checkpoints away, and dies
LOSE_THE_DISK = f"""
    if world.epoch == 0 and i == 5:
        checkpoints.finish()
        Tensor(np.ones(world.size, np.float32)).shard(world.devices, axis=0).sum().item()
        if world.rank == 1:
            shutil.rmtree("checkpoints", ignore_errors=True)
            {KILL}
        time.sleep(60)
"""


def begun(out: str) -> list[set[str]]:
    """At which steps each epoch began."""
    found: dict[int, set[str]] = {}
    for epoch, _, at, with_ in BEGUN.findall(out):
        assert at == with_
        found.setdefault(int(epoch), set()).add(at)
    return [found[e] for e in sorted(found)]


def run(launcher: Launcher, fault: str, options: str, nodes: int = 3, **env: str) -> Any:
    given = "--nodes", str(nodes), "--max-restarts", "3", "--log-ranks", "all"
    done = launcher(TRAIN.format(fault=fault, options=options), *given, real_endpoint=True, **env).wait()
    logs = [(done.run_dir / f"rank{r}.log").read_text() for r in range(nodes)]
    assert done.code == 0 and all("done" in text for text in logs), (done.out, done.err)
    return done


@pytest.mark.parametrize(
    "options,at,transport",
    [
        ("every=2, asynchronous=True", "4", ""),
        ("every=2", "4", "zmq"),
        ("every=100, memory_every=1, asynchronous=True", "5", "zmq"),
        ("every=2, memory_every=0", "0", ""),  # (nothing in memory, and the disk's are gone)
    ],
)
def test_a_killed_worker_whose_checkpoints_are_gone(options: str, at: str, transport: str, launcher: Launcher) -> None:
    done = run(launcher, LOSE_THE_DISK, options, TRANSPORT=transport)
    assert begun(done.out) == [{"0"}, {at}], done.err
    assert [a["kept"] for a in done.report["attempts"]] == [0, 2]


def test_what_one_rank_has_lost_is_with_its_neighbour_again_at_once(launcher: Launcher) -> None:
    """Rank 1 dies, then rank 2 before anything more was saved."""
    again = f"""
    if world.epoch == 1 and i == 4:
        checkpoints.finish()
        if world.rank == 2:
            {KILL}
        time.sleep(60)
    """
    done = run(launcher, LOSE_THE_DISK + again, "every=2, asynchronous=True")
    assert begun(done.out) == [{"0"}, {"4"}, {"4"}], done.err


def test_two_neighbours_that_die_leave_the_disk(launcher: Launcher) -> None:
    fault = f"""
    if world.epoch == 0 and i == 5:
        checkpoints.finish()
        Tensor(np.ones(world.size, np.float32)).shard(world.devices, axis=0).sum().item()
        if world.rank: {KILL}
        time.sleep(60)
    """
    done = run(launcher, fault, "every=3, memory_every=1")
    assert begun(done.out) == [{"0"}, {"3"}], done.err


def test_a_copy_that_is_damaged_leaves_the_disk(launcher: Launcher) -> None:
    """A bit of what rank 2 has of rank 1 is another one."""
    fault = f"""
    if world.epoch == 0 and i == 5:
        checkpoints.finish()
        Tensor(np.ones(world.size, np.float32)).shard(world.devices, axis=0).sum().item()
        if world.rank == 2:
            from manygrad.runtime.current import current
            (kept,) = current().kept.values()
            (files,) = kept.snapshots.values()
            files["part-00001.safetensors"].data[-1] ^= 1
        Tensor(np.ones(world.size, np.float32)).shard(world.devices, axis=0).sum().item()
        if world.rank == 1: {KILL}
        time.sleep(60)
    """
    done = run(launcher, fault, "every=3, memory_every=1")
    assert begun(done.out) == [{"0"}, {"3"}], done.err
    assert "is damaged: a checksum of" in done.out + done.err, done.err
