"""Whatever lies in the cache folder: entries swapped, cut off, changed, emptied, made folders, a disk that is full or
cannot be read. A program computes the same numbers and never fails."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from manygrad import Context, Tensor
from manygrad.runtime.current import current
from manygrad.runtime.devices import get_device
from manygrad.runtime.devices.compile import diskcache

EXAMPLES = 40
DAMAGES = ("swap", "copy", "cut", "flip", "extend", "empty", "folder", "remove", "temporary")
FAULTS = ("none", "full", "unreadable", "no folder")
Damage = tuple[str, int, int, int]


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Damage], str, list[int]]:
    """What is done to which files, at which byte; how the disk is from then on; which values are computed."""
    damage = st.tuples(st.sampled_from(DAMAGES), st.integers(0, 50), st.integers(0, 50), st.integers(0, 1 << 16))
    return (
        draw(st.lists(damage, min_size=1, max_size=6)),
        draw(st.sampled_from(FAULTS)),
        draw(st.lists(st.integers(0, 2), min_size=1, max_size=2)),
    )


def compute(which: list[int]) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    for k in which:
        x = Tensor(a, device="CPU").realize()
        got: Any = (x * 2 + 1, x.sum(0), x @ x.T)[k]
        want = (a * 2 + 1, a.sum(0), a @ a.T)[k]
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5)


def forget() -> None:
    """As in a process that starts."""
    current().schedules.in_memory.clear()
    current().schedules.by_digest.clear()
    get_device("CPU").kernels.kernels.clear()


def damage(files: list[Path], what: str, i: int, j: int, at: int) -> None:
    a, b = files[i % len(files)], files[j % len(files)]
    if not a.is_file() or not b.is_file():
        return
    data = bytearray(a.read_bytes())
    if what == "swap":
        other = b.read_bytes()
        b.write_bytes(data)
        a.write_bytes(other)
    elif what == "copy":
        a.write_bytes(b.read_bytes())
    elif what == "cut":
        a.write_bytes(data[: at % (len(data) + 1)])
    elif what == "flip" and data:
        data[at % len(data)] ^= 1 << (j % 8)
        a.write_bytes(data)
    elif what == "extend":
        a.write_bytes(bytes(data) + b"x")
    elif what == "empty":
        a.write_bytes(b"")
    elif what == "folder":
        a.unlink()
        a.mkdir()
    elif what == "remove":
        a.unlink()
    elif what == "temporary":
        (a.parent / ".new-left").write_bytes(data)


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


def check(program: tuple[list[Damage], str, list[int]]) -> None:
    damages, fault, which = program
    folder = tempfile.mkdtemp(prefix="manygrad-cache-")
    try:
        with Context(CACHE_DIR=folder, SPEC=0):
            forget()
            compute([0, 1, 2])
            files = sorted(p for p in Path(folder).rglob("*") if p.is_file() and p.name != "lock")
            assert len(files) >= 6, "schedules and kernels are on disk"
            for d in damages:
                damage(files, *d)
            forget()
            if fault == "full":
                with mock.patch.object(diskcache.tempfile, "mkstemp", refusing(errno.ENOSPC)):
                    compute(which)
            elif fault == "unreadable":
                with mock.patch.object(diskcache.Path, "read_bytes", refusing(errno.EIO)):
                    compute(which)
            elif fault == "no folder":
                shutil.rmtree(folder)
                Path(folder).write_bytes(b"")
                compute(which)
            else:
                compute(which)
            forget()
            compute(which)
    finally:
        forget()
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).unlink(missing_ok=True)
