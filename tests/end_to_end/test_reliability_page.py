"""The commands of docs/reliability.md, as they stand there, in the order of the page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PAGE = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_the_page(command: Callable[..., Any], tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert "range(begun, 60)" in program

    def write(steps: int) -> None:
        text = program.replace("range(begun, 60)", f"range(begun, {steps})")
        (tmp_path / "train.py").write_text(text, encoding="utf-8")

    write(1000)  # it is stopped long before, however slowly the questions are answered
    lines = [x for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for x in block.splitlines()]
    start, status, stacks, stop, again = (shlex.split(x)[1:] for x in lines)

    def ask(words: list[str]) -> str:
        asked = [sys.executable, "-P", "-m", "manygrad.launcher.cli", *words]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done
        return done.stdout

    run = command(*start)
    run.run_dir = tmp_path / "runs" / "first"
    while not list(tmp_path.glob("checkpoints/step-00000010")):
        assert run.process.poll() is None, run.wait()
        time.sleep(0.05)
    (pid,) = re.findall(r"rank 1 on \S+, pid (\d+): running, step \d+", ask(status))
    psutil.Process(int(pid)).kill()
    run.wait_for_log(0, "attempt 2 begins")
    while (shown := ask(status)).count(": running, step") < 2:
        assert run.process.poll() is None, run.wait()
    assert "attempt 1: 2 nodes, " in shown and "rank 1 failed: killed by SIGKILL" in shown and "attempt 2, for" in shown
    assert "rank 1:\n  thread MainThread:\n" in (shown := ask(stacks)) and "train.py" in shown, shown
    ask(stop)
    run.wait()
    assert run.code == 143 and "rank 1 failed: killed by SIGKILL" in run.err, run.err
    saved = re.search(r"the run was preempted \(SIGTERM\): step (\d+) is saved", run.err.partition("attempts:")[0])
    assert saved is not None, run.err
    step = saved[1]
    write(int(step) + 20)
    run = command(*again).wait()
    assert run.code == 0 and f"begins at step {step}\n" in run.out and "done" in run.out, (run.out, run.err)
