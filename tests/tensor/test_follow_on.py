"""What tests FOLLOW=1, in a process of its own: functions of `Tensor` are wrapped at import, for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "loops": ["tests/tensor/test_following.py"],
    "fuzzer": ["tests/fuzz/test_fuzz.py", "-k", "test_fuzzer and following"],
    "planted faults": ["tests/fuzz/test_planted.py", "-k", "plain_loops"],
}


@pytest.mark.parametrize("name", FILES)
def test_with_calls_that_are_put_off(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *FILES[name]]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "FOLLOW": "1"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
