"""A Ray cluster over machines (`tests/machines.py`), started as a user starts one: `ray start --head` on the first,
`ray start --address` on the others; and the `launcher` command on any of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.commands import Command
from tests.hosts import Hosts
from tests.machines import child_of, files, machines, processes

LIMIT_S = 60
PORT = 6379
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
WORKER_PORTS = range(10002, 10200)
SMALL = [
    *"--num-cpus=1 --object-store-memory=80000000 --disable-usage-stats --temp-dir=/tmp/ray".split(),
    *(f"--min-worker-port={WORKER_PORTS[0]}", f"--max-worker-port={WORKER_PORTS[-1]}"),
]
# workers of Ray's that wait for something to do come and go
IDLE = re.compile(r"\d+ (ray::IDLE|.*/default_worker\.py )")


@dataclass
class Run(Command):
    """One run of the launcher on machine `host`."""

    def until(self, path: Path) -> None:
        """Until the run has made this file."""
        end = time.monotonic() + LIMIT_S
        while not path.exists():
            assert self.process.poll() is None, self.wait()
            assert time.monotonic() < end, f"{path.name} was not made"
            time.sleep(0.02)

    def interrupt(self) -> None:
        """As Ctrl-C on the terminal of the launcher."""
        os.kill(child_of(self.process.pid), signal.SIGINT)

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())


@dataclass
class RayOnMachines:
    """`shared` is the folder that all machines see; a run is in a new folder there, with `train.py` and the run
    directory `run`."""

    hosts: Hosts
    shared: Path
    env: dict[str, str]
    daemons: list[list[str]] = field(default_factory=list)  # what Ray has started on each
    runs: list[Run] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.hosts.addresses[0]}:{PORT}"

    def start(self) -> None:
        head = [f"--port={PORT}", "--head", "--include-dashboard=false"]
        self._start_ray([0], *head)
        self._start_ray(range(1, len(self.hosts.names)), f"--address={self.address}")
        self.daemons = [processes(self.hosts, i) for i in range(len(self.hosts.names))]

    def _start_ray(self, machines: Any, *options: str) -> None:
        started = [
            self.on(i, *RAY, *options, f"--node-ip-address={self.hosts.addresses[i]}", *SMALL, STARTED=f"host{i}")
            for i in machines
        ]
        for process in started:
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, out + err

    def on(self, i: int, *command: str, folder: Path | str = "/", **env: str) -> subprocess.Popen[str]:
        """Start a command on machine i."""
        pipe = subprocess.PIPE
        command = (*self.hosts.prefixes[i], "env", "-C", str(folder), *command)
        return subprocess.Popen(
            command, env=self.env | env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def launch(self, script: str, *args: str, host: int = 0, beside: dict[str, str] | None = None, **env: str) -> Run:
        """`launcher train.py` on machine `host`, a node on each, with more files `beside` the script."""
        folder = self.shared / f"run{len(self.runs)}"
        folder.mkdir()
        for name, text in {"train.py": script, **(beside or {})}.items():
            (folder / name).write_text(textwrap.dedent(text))
        options = ["--address", self.address, "--nodes", str(len(self.hosts.names)), "--run-dir", "run"]
        command = [sys.executable, "-P", "-m", "manygrad.launcher.cli", *options, "--log-ranks", "all"]
        process = self.on(host, *command, "train.py", *args, folder=folder, **env)
        self.runs.append(Run(process, folder / "run", LIMIT_S))
        return self.runs[-1]

    def nothing_is_left(self) -> None:
        """No process beside Ray's own, and no file of a run's, on any machine."""
        end = time.monotonic() + 20
        while left := [x for i in range(len(self.hosts.names)) for x in self._left(i)]:
            assert time.monotonic() < end, left
            time.sleep(0.1)

    def _left(self, i: int) -> list[str]:
        more = [p for p in processes(self.hosts, i) if p not in self.daemons[i] and not IDLE.match(p)]
        kept = ("/tmp/ray", str(self.shared), self.env["CACHE_DIR"], "/dev/shm/plasma")
        made = [f for f in files(self.hosts, i) if not f.startswith(kept) and not str(self.shared).startswith(f)]
        return [f"host{i}: {x}" for x in more + [f for f in made if not self.env["CACHE_DIR"].startswith(f)]]


@contextmanager
def ray_on_machines(count: int, shared: Path) -> Iterator[RayOnMachines]:
    """A cluster of `count` machines with a CPU each, whose token is in the shared folder."""
    token = shared / "token"
    token.write_text("0123456789abcdef" * 4)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MANYGRAD_", "RAY_"))} | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    with machines(count, shared, env["CACHE_DIR"]) as h:
        cluster = RayOnMachines(h, shared, env)
        cluster.start()
        try:
            yield cluster
        finally:
            for run in cluster.runs:
                if run.process.poll() is None:
                    os.killpg(run.process.pid, signal.SIGKILL)
                    run.process.communicate()
