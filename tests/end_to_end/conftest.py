"""Whole runs: the real command, real workers, real training.
One Ray serves all tests that need no command of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command

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
    """A Ray of the test's own, as in a user's Ray job; `manygrad.launch` uses it and leaves it running."""
    folder = tempfile.mkdtemp(prefix="mgtest-", dir="/tmp")
    token = Path(folder, "token")
    token.write_text("0123456789abcdef" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.delenv("RAY_ADDRESS", raising=False)
        import ray

        from manygrad.launcher.cluster import _reread_settings

        _reread_settings()
        options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
        ray.init(address="local", num_cpus=4, object_store_memory=80 << 20, _temp_dir=folder, **options)
        yield ray
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
