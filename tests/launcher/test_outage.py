"""The network between the launcher and its ranks goes away for two seconds: nothing ends, nothing is lost,
nothing comes twice. Where it goes away for good, the run ends and says so; where it is slow or loses packets, it goes
on."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.launcher.outage import training


def test_the_launcher_is_cut_off_while_training_goes_on(tmp_path: Path) -> None:
    """The control channel of all ranks is down, twice: while steps are replayed,
    and while each needs the launcher's word on a new plan."""
    with training(tmp_path) as run:
        run.more(steps=20)
        run.outage(0, steps=20)
        (tmp_path / "plan").touch()
        run.more(plans=5)
        before, after = run.outage(0)
        # (one was agreed, and one made and not written down)
        assert after <= before + 2, "the launcher was not cut off"
        run.more(plans=5)
        run.end()


def test_ranks_are_cut_off_from_everybody(tmp_path: Path) -> None:
    """One after the other; both the control channel and the sockets of links."""
    with training(tmp_path) as run:
        run.more(steps=20)
        run.outage(1)
        (tmp_path / "plan").touch()
        run.more(steps=20, plans=5)
        run.outage(2)
        run.more(steps=20, plans=5)
        run.end()


def test_the_launcher_is_cut_off_for_good(tmp_path: Path) -> None:
    """On a clock that runs 30 times as fast: all end, each on its own host, and what a rank has detached with it."""
    with training(tmp_path, MANYGRAD_CLOCK_RATE="30", MANYGRAD_ENV="DETACH", DETACH="1") as run:
        run.more(steps=20)
        run.hosts.down(0)
        assert run.process.wait(60) == 1
        assert "no sign of life" in (tmp_path / "err").read_text()
        run.nothing_is_left()


def test_a_rank_is_cut_off_for_good(tmp_path: Path) -> None:
    """The error names it and its host, within the time that is promised for an unreachable host."""
    with training(tmp_path, RECONNECT_TIMEOUT_S="3", HEARTBEAT_TIMEOUT_S="10") as run:
        run.more(steps=20)
        run.hosts.down(1)
        began = time.monotonic()
        code = run.process.wait(60)
        took_s = time.monotonic() - began
        err = (tmp_path / "err").read_text()
        assert code == 1 and took_s < 30, (took_s, err)
        assert re.search(r"rank 0 failed: .*rank 1 lost rank 0 .*its host has not answered for 3 s", err), err
        assert re.search(r"^  node 0 \(", err, re.M) and "rank 1: stopped: PeerLost at train.py:" in err, err
        run.nothing_is_left()


def test_a_run_goes_on_without_the_host_that_is_cut_off(tmp_path: Path) -> None:
    """In a new epoch, of one rank less; what still runs on the other side of the cut has no part in it, and ends."""
    restarts = {"MANYGRAD_MAX_RESTARTS": "2", "MANYGRAD_MIN_NODES": "1"}
    with training(tmp_path, RECONNECT_TIMEOUT_S="3", HEARTBEAT_TIMEOUT_S="10", **restarts) as run:
        run.more(steps=20)
        run.hosts.down(1)
        log = tmp_path / "run" / "rank0.log"
        run.until(lambda: "step" in log.read_text().partition("attempt 2 begins, on 1 node\n")[2])
        run.hosts.up(1)  # it comes back: too late for this attempt
        time.sleep(1)
        (tmp_path / "end").touch()
        assert run.process.wait(60) == 0, (tmp_path / "err").read_text()
        err = (tmp_path / "err").read_text()
        assert re.search(r"attempt 1: 2 nodes, .* rank 0 failed: ", err) and "attempt 2: 1 node, " in err, err
        run.nothing_is_left()


def test_links_lose_packets(tmp_path: Path) -> None:
    """TCP sends them again: steps go on."""
    with training(tmp_path) as run:
        run.more(steps=20)
        for i in range(3):
            run.hosts.limit(i, loss=0.02)
        (tmp_path / "plan").touch()
        run.more(steps=50, plans=5)
        run.end()


BIG = """
import os
import numpy as np
from manygrad import Tensor, world

NBYTES = 8 << 20
print("training", flush=True)
open(f"there{world.rank}", "w").close()
while not os.path.exists("slow"):
    pass
x = Tensor(np.ones((world.size, NBYTES // 4), np.float32)).shard(world.devices, axis=0)
assert (x.sum(0).numpy() == world.size).all()
"""


def test_a_slow_link_is_not_a_dead_one(tmp_path: Path) -> None:
    """At 10 Mbit/s a sum of 8 MB takes longer than any time that a silent peer is given."""
    with training(tmp_path, BIG, COLLECTIVE_TIMEOUT_S="6", RECONNECT_TIMEOUT_S="2", HEARTBEAT_TIMEOUT_S="5") as run:
        run.until(lambda: all((tmp_path / f"there{r}").exists() for r in range(2)))
        for i in range(3):
            run.hosts.limit(i, 10e6)
        before = [run.hosts.sent_nbytes(i) for i in (1, 2)]
        (tmp_path / "slow").touch()
        began = time.monotonic()
        assert run.process.wait(120) == 0, (tmp_path / "err").read_text()
        assert time.monotonic() - began > 8 * (8 << 20) / 10e6, "the link was not slow"
        for i, b in zip((1, 2), before, strict=True):  # half of the terms, then half of the sums
            assert 8 << 20 < run.hosts.sent_nbytes(i) - b < 1.2 * (8 << 20), "data was sent again"
