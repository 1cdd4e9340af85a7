"""A folder of this process's own for pocl, an OpenCL driver that compiles through files.

A binary carries the name of the folder in which it was compiled, and whoever releases the program removes that: where
processes share the folder above, one removes what another is about to read ("Can't get stat() on .../program.bc").
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from manygrad.tensor.environment import CACHE_DIR

VARIABLE = "POCL_CACHE_DIR"


@contextmanager
def own_folder() -> Iterator[None]:
    """While the driver is found, which is when it looks at the variable; processes started later get theirs."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(_folder())
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@cache
def _folder() -> Path:
    """Removed when this process ends; those of processes that were killed are removed now."""
    above = Path(os.environ.get(VARIABLE) or Path(CACHE_DIR.value).expanduser() / "pocl")
    host = socket.gethostname()
    for left in above.glob(f"{host}-*"):
        if not Path("/proc", left.name.rpartition("-")[2]).exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
    made = above / f"{host}-{os.getpid()}"
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
