"""The version of our own code that what is kept on disk was made by: schedules, machine code, results of searches.

One digest of the source of all modules that take part in making any of it. A change of one of them leaves all old
entries unused: which of them it would have changed nobody knows. 260 files take about 12 ms, once a process.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("tensor/uop", "multi", "collectives", "schedule"),
    *("runtime/codegen", "runtime/devices", "native"),
)
FILES = (
    *("tensor/code.py", "tensor/dtype.py", "tensor/engine.py", "tensor/environment.py", "tensor/source.py"),
    "tensor/threads.py",
    *("session.py", "runtime/current.py", "runtime/profile/__init__.py", "runtime/profile/profile.py"),
)
KINDS = (".py", ".ll")


def files(root: Path = ROOT) -> Iterator[str]:
    """Their paths under `root`."""
    yield from FILES
    for folder in FOLDERS:
        for above, below, names in os.walk(root / folder):
            below.sort()
            yield from (os.path.relpath(os.path.join(above, n), root) for n in sorted(names) if n.endswith(KINDS))


def digest_of(root: Path) -> bytes:
    """Digest of the code under `root`."""
    found = hashlib.sha256()
    for name in files(root):
        with open(root / name, "rb") as f:
            text = f.read()
        found.update(f"{name} {len(text)} ".encode() + text)
    return found.digest()


@cache
def code_version() -> bytes:
    """Version of the code that runs here."""
    return digest_of(ROOT)
