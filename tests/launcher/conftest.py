"""Helpers of the launcher's tests: run the real command on small scripts, and look for anything left behind."""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from manygrad.launcher.janitor import marked_processes

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT_S = 60


@dataclass
class Run:
    """One run of the launcher: `wait()`, then `code`, `out`, `err`, `took_s`, `report`."""

    process: subprocess.Popen[str]
    run_dir: Path
    mark: str  # in the environment of all that the command starts
    began: float = field(default_factory=time.monotonic)
    code: int = 0
    out: str = ""
    err: str = ""
    took_s: float = 0.0

    def wait(self, limit_s: float = LIMIT_S) -> Run:
        self.out, self.err = self.process.communicate(timeout=limit_s)
        self.code, self.took_s = self.process.returncode, time.monotonic() - self.began
        return self

    def wait_for_log(self, rank: int, text: str, limit_s: float = LIMIT_S) -> re.Match[str]:
        """Until the rank's log has what the pattern `text` says."""
        until = time.monotonic() + limit_s
        path = self.run_dir / f"rank{rank}.log"
        while time.monotonic() < until:
            if path.exists() and (found := re.search(text, path.read_text())):
                return found
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        raise AssertionError(f"no {text!r} in {path}")

    def still_there(self) -> list[str]:
        """What the command has started, known from its first moment on (its job's id is not)."""
        found = []
        for p in psutil.process_iter():
            try:
                if p.environ().get("STARTED_IN") == self.mark:
                    found.append(str(p.as_dict(["pid", "ppid", "status", "create_time", "cmdline"])))
            except psutil.Error:
                pass  # it has ended, or is not ours
        return found

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())


def _with_ctrl_c() -> None:
    """A shell's job in the background, as CI may be, ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def left_behind(job: str) -> list[str]:
    """Processes, folders and shared-memory files of a job that are still there."""
    folder = f"/tmp/mg-{job}"
    return (
        [f"process {p}" for p in marked_processes(job, folder)]
        + [f for f in [folder] if os.path.exists(f)]
        + glob.glob(f"/dev/shm/*{job}*")
    )


@pytest.fixture(name="left_behind")
def left_behind_fixture() -> Callable[[str], list[str]]:
    return left_behind


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`launcher(script text, *arguments)` starts the command in an empty folder;
    whatever still runs afterwards is killed by its id."""
    runs: list[Run] = []

    def start(script: str, *args: str, real_endpoint: bool = False, **env: str) -> Run:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(script))
        environ = (
            {k: v for k, v in os.environ.items() if not k.startswith(("MANYGRAD_", "RAY_"))}
            | {"PYTHONPATH": os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])}
            | {"STARTED_IN": (mark := f"{tmp_path}/{len(runs)}")}
            | env
        )
        if not real_endpoint:
            environ["MANYGRAD_ENDPOINT"] = "fake_endpoint:Endpoint"
        run_dir = tmp_path / f"run{len(runs)}"
        if "--nodes" in args:
            args = ("--run-dir", str(run_dir), *args)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "manygrad.launcher.cli", "train.py", *args],
            cwd=tmp_path,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_with_ctrl_c,
        )
        runs.append(Run(process, run_dir, mark))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.communicate()
