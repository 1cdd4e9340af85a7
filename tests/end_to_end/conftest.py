"""Whole runs: the real command, real workers, real training.
One Ray serves all tests that need no command of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command
from tests.own_ray import own_ray

ROOT = Path(__file__).parents[2]
LIMIT_S = 90


@dataclass
class Run(Command):
    """A command on this machine."""

    began: float = field(default_factory=time.monotonic)

    def wait_for_log(self, rank: int, text: str) -> None:
        """Until the rank's log has `text`."""
        path = self.run_dir / f"rank{rank}.log"
        while time.monotonic() < self.began + LIMIT_S:
            if path.exists() and text in path.read_text():
                return
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} in {path}")


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`command(*arguments, **environment)` starts `launcher *arguments`;
    what still runs afterwards is killed by its id."""
    runs: list[Run] = []

    def start(*args: str, **env: str) -> Run:
        run_dir = tmp_path / f"run{len(runs)}"
        options = ["--run-dir", str(run_dir)] if "--nodes" in args else []
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "manygrad.launcher.cli", *options, *args],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if not k.startswith(("MANYGRAD_", "RAY_"))} | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        runs.append(Run(process, run_dir, LIMIT_S))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.communicate()


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with own_ray(4) as found:
        yield found
