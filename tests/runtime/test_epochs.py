"""A process leaves one world and enters the next: what it keeps, what ends, and what its errors say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manygrad.multi.world import Membership, World, is_of_a_rank
from manygrad.runtime.runtime import Runtime

WORKER = Path(__file__).with_name("epoch_worker.py")
Steps = list[tuple[int, int, int]]  # epoch, rank, size


def run(folder: Path, steps: list[Steps], env: dict[str, str]) -> list[dict[str, Any]]:
    """What each process found that went through its steps."""
    folder.mkdir()
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), json.dumps(s), str(i)],
            env={**os.environ, **one, **env},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, s in enumerate(steps)
    ]
    try:
        for p in processes:
            _, errors = p.communicate(timeout=120)
            assert p.returncode == 0, errors
    finally:
        for p in processes:
            p.kill()
            p.wait()
    return [json.loads((folder / f"result.{i}.json").read_text()) for i in range(len(steps))]


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_two_of_three_enter_the_next_epoch(tmp_path: Path, transport: str) -> None:
    env = {"TRANSPORT": transport}
    # the last one becomes the first; then the two change places
    found = run(
        tmp_path / "a", [[(0, 0, 3)], [(0, 1, 3), (1, 1, 2), (2, 0, 2)], [(0, 2, 3), (1, 0, 2), (2, 1, 2)]], env
    )
    fresh = run(tmp_path / "b", [[(1, 0, 2)], [(1, 1, 2)]], env)
    want = fresh[0]["epochs"][0]["sums"]
    assert len({f["epochs"][0]["sums"] for f in found}) == 1 and fresh[1]["epochs"][0]["sums"] == want
    assert [e["drawn"] for e in found[1]["epochs"]] == [e["drawn"] for e in found[2]["epochs"]]
    for f in found[1:]:
        assert [e["sums"] for e in f["epochs"][1:]] == [want, want], "as in a world that is new"
        assert f["epochs"][0]["new kernels"] > 0 == f["epochs"][2]["new kernels"], "compiled once"
    for f in [*found, *fresh]:
        # (pyzmq's collector of memory that was sent is the process's, and stays from the first such message on)
        alike = f["before"] if transport == "shm" else {**f["before"], "fds": f["epochs"][0]["held"]["fds"]}
        for e in f["epochs"]:
            assert e["right"] and e["jitted"] == [True] * 5
            assert e["local"] == [3.0 * i + 1 for i in range(8)]
            assert e["left"] == [[], []], "no thread runs on, and to leave twice is harmless"
            assert not e["endpoint lives"]
            assert e["held"] == alike, "no thread, descriptor or shared memory is left"
    for number, f in ((1, found[1]), (2, found[2])):
        first, second, third = f["epochs"]
        assert all(e["kept"] == [2.0 * i for i in range(8)] for e in f["epochs"])
        assert first["shown"] == [number, 3, 0, number] and second["shown"] == [2 - number, 2, 1, 2 - number]
        assert third["shown"][:3] == [number - 1, 2, 2]
        assert first["arenas held by a tensor"] > 0, "where a tensor lies in it, the memory stays"
        assert [len(e["errors"]) for e in f["epochs"]] == [4, 8, 8], "also in the next epoch"
        for error in [*first["errors"], *second["errors"][:4]]:
            assert error.startswith("LostValue: the value is lost: it was one of epoch 0 of job 'test', as rank")
        assert first["refused"].startswith(f"NoRank: this process does not communicate as rank {number}: it has left")


def test_a_process_alone_has_nothing_to_leave() -> None:
    runtime = Runtime()
    epoch, devices = runtime.epoch, runtime.devices
    assert runtime.leave() == [] and runtime.epoch is epoch and runtime.devices is devices


def test_the_world_is_one_object_that_shows_the_epoch() -> None:
    world = World(device_kind="NULL")
    world.show(Membership(rank=1, size=3, epoch=4))
    assert (world.rank, world.size, world.epoch) == (1, 3, 4) and world.devices == ("NULL:0@0", "NULL:0@1", "NULL:0@2")
    world.show(Membership(rank=0, size=1, epoch=5))
    assert (world.rank, world.size, world.epoch) == (0, 1, 5) and world.devices == ("NULL:0",)


def test_which_devices_are_named_by_ranks() -> None:
    assert is_of_a_rank("CPU:0@1") and is_of_a_rank(("CPU:0@0", "CPU:0@1"))
    assert not any(map(is_of_a_rank, ("CPU:0", ("CPU:0", "CPU:1"), "DISK:/data/x@3", None)))
