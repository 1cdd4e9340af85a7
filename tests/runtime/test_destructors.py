"""A garbage collection may run anybody's destructor in the middle of everything that makes objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("threshold", [4, 5, 6])
def test_destructors_that_use_tensors_run_anywhere(threshold: int) -> None:
    """`threshold`: after so many new objects a collection runs, so that it meets other places."""
    script = Path(__file__).with_name("destructors.py")
    command = [sys.executable, "-X", "faulthandler", "-P", str(script), "400", str(threshold)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "wrong: []\n"), done.stdout + done.stderr
