"""A run over hosts (`tests/hosts.py`) that trains until it is told to end, while its links are cut, slow or lossy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hosts import Hosts, hosts

TRAIN = """
import os, subprocess, sys, time
import numpy as np
from manygrad import Tensor, TinyJit, world

n = world.size
w = Tensor(np.arange(64, dtype=np.float32)).shard(world.devices).contiguous().realize()

@TinyJit
def step(x, w):
    return (x * w).sum(0)

def any_of(flag):
    return Tensor(np.full((n,), float(flag), np.float32)).shard(world.devices, axis=0).max().item() > 0

if "DETACH" in os.environ:
    subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
steps = plans = 0
print("training", flush=True)
progress = os.open(f"progress{world.rank}", os.O_CREAT | os.O_WRONLY, 0o600)
while not any_of(os.path.exists("end")):
    for _ in range(5):
        x = Tensor(np.full((n, 64), steps, np.float32)).shard(world.devices, axis=0)
        assert (step(x, w).numpy() == n * steps * np.arange(64)).all()
        steps += 1
        print("step", steps, flush=True)
    if any_of(os.path.exists("plan")):
        plans += 1
        size = 64 + plans
        v = Tensor(np.arange(size, dtype=np.float32)).shard(world.devices).contiguous()
        x = Tensor(np.ones((n, size), np.float32)).shard(world.devices, axis=0)
        assert ((x * v).sum(0).numpy() == n * np.arange(size)).all()
    os.pwrite(progress, b"%9d %9d" % (steps, plans), 0)
    time.sleep(0.02)
print("made", steps, "steps", flush=True)
"""


class Outage:
    """A run with the launcher on host 0 and a rank on each of the others."""

    def __init__(self, tmp_path: Path, h: Hosts, script: str = TRAIN, **env: str):
        self.folder, self.hosts, self.ranks = tmp_path, h, len(h.names) - 1
        (tmp_path / "train.py").write_text(script)
        places = ";".join(f"{a},{n}" for a, n in zip(h.addresses, h.names, strict=True))
        self.process = subprocess.Popen(
            [
                *h.prefixes[0],
                sys.executable,
                "-P",
                str(Path(__file__).with_name("on_hosts.py")),
                places,
                "--",
                "train.py",
            ]
            + [
                "--nodes",
                str(self.ranks),
                "--run-dir",
                str(tmp_path / "run"),
                "--log-ranks",
                "all",
                "--start-timeout",
                "1800",
            ],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if not k.startswith(("MANYGRAD_", "RAY_"))}
            | {"TRANSPORT": "zmq"}
            | env,
            stdout=(tmp_path / "out").open("w"),
            stderr=(tmp_path / "err").open("w"),
            start_new_session=True,
        )

    def progress(self) -> tuple[int, int]:
        """Steps and new plans that every rank has made."""
        made = []
        for r in range(self.ranks):
            path = self.folder / f"progress{r}"
            made.append([int(x) for x in path.read_text().split()] if path.exists() else [])
        return min(m[0] if m else 0 for m in made), min(m[1] if m else 0 for m in made)

    def until(self, ready: Callable[[], bool], limit_s: float = 60) -> None:
        end = time.monotonic() + limit_s
        while not ready():
            assert self.process.poll() is None, (self.folder / "err").read_text()
            assert time.monotonic() < end, ((self.folder / "err").read_text(), self.progress())
            time.sleep(0.01)

    def more(self, steps: int = 0, plans: int = 0) -> None:
        """Until so many more have been made."""
        s, p = self.progress()
        self.until(lambda: self.progress()[0] >= s + steps and self.progress()[1] >= p + plans)

    def outage(self, host: int, seconds: float = 2.0, steps: int = 0) -> tuple[int, int]:
        """Cut a host off; meanwhile all make at least so many steps.
        Returns the plans made before and at the end of it."""
        self.hosts.down(host)
        plans = self.progress()[1]
        end = time.monotonic() + seconds
        self.more(steps=steps)
        time.sleep(max(0.0, end - time.monotonic()))
        made = self.progress()[1]
        self.hosts.up(host)
        return plans, made

    def end(self) -> None:
        """Exit code 0, and every line that the ranks printed is in the logs, once and in order."""
        (self.folder / "end").touch()
        code = self.process.wait(60)
        out, err = (self.folder / "out").read_text(), (self.folder / "err").read_text()
        assert code == 0 and "warning" not in err, (code, err)
        steps = self.progress()[0]
        for r in range(self.ranks):
            log = (self.folder / "run" / f"rank{r}.log").read_text()
            assert [int(x) for x in re.findall(r"^step (\d+)$", log, re.M)] == list(range(1, steps + 1))
            assert log.endswith(f"made {steps} steps\n")
        assert (
            re.findall(rf"\[ranks 0-{self.ranks - 1}\] made (\d+) steps", out)
            or out.count(f" made {steps} steps") == self.ranks
        )

        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        """Of the ranks on their hosts; supervisors end a moment after the launcher."""
        end = time.monotonic() + 30
        while left := [p for n in self.hosts.names for p in _in_namespace(n)]:
            assert time.monotonic() < end, left
            time.sleep(0.05)

    def close(self) -> None:
        for pid in [p for n in self.hosts.names for p in _in_namespace(n)]:
            os.kill(pid, 9)
        self.process.wait()


def _in_namespace(name: str) -> list[int]:
    return [
        int(p) for p in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    ]


@contextmanager
def training(tmp_path: Path, script: str = TRAIN, **env: str) -> Iterator[Outage]:
    """A run over three hosts, the launcher on the first, which is closed at the end."""
    with hosts(3) as h:
        run = Outage(tmp_path, h, script, **env)
        try:
            yield run
        finally:
            run.close()
