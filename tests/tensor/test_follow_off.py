"""FOLLOW=0, where no call is put off: in processes of their own, as functions of `Tensor` are wrapped at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/nn/test_optim.py", "tests/nn/test_optim_state.py", "tests/nn/test_recurrent.py",
    "tests/tensor/test_autograd.py", "tests/tensor/test_inplace.py",
    "tests/tensor/test_storage.py", "tests/tensor/test_threads.py",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_where_no_call_is_put_off(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", name]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "FOLLOW": "0"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
