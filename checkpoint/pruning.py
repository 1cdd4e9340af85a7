"""Removes older checkpoints, as `keep` says, and never because of one that cannot be loaded.

A checkpoint counts when all of it was read back. The newest one is, after each save; one that this process has read
back, and whose files are as they were then by size and time, is not read again, so a save costs one reading, and the
first one of a process that finds older ones those that it keeps.
"""

from __future__ import annotations

import os
import shutil
import warnings

from manygrad.checkpoint.disk_errors import errors_of
from manygrad.checkpoint.index import NAME, path_of
from manygrad.checkpoint.reader import CheckpointReader, Saved, newest_first
from manygrad.errors import CheckpointError
from manygrad.runtime.current import current

Stamps = tuple[tuple[int, int, int], ...]


def _found_whole() -> dict[str, Stamps]:
    """By path what this process has read back, and how its files were then."""
    found: dict[str, Stamps] = current().kept.setdefault("read back", {})
    return found


def prune(folder: str, keep: int, new: str = "") -> None:
    """Removes all but the newest `keep` whole checkpoints, and `new`, which was just made, perhaps of an earlier step;
    nothing while the newest one cannot be read back."""
    for saved in to_be_removed(folder, keep):
        if saved.path == new:
            continue
        away = os.path.join(folder, f"{os.path.basename(saved.path)}.removed.0.tmp")
        os.rename(saved.path, away)  # at once, so that a half is never taken for a checkpoint
        _found_whole().pop(saved.path, None)
        shutil.rmtree(away)


def to_be_removed(folder: str, keep: int, verify: bool = True) -> list[Saved]:
    """Older checkpoints than the newest `keep` whole ones. With `verify` these have been read back."""
    found = newest_first(folder, warns=False)
    if len(found) <= keep:
        return []
    whole = 0
    for i, saved in enumerate(found):
        if whole >= keep:
            return found[i:]
        try:
            reader = CheckpointReader(saved.path)
            if verify:
                _read_back(reader)
            whole += 1
        except CheckpointError as e:
            warnings.warn(f"{e}; older checkpoints than keep={keep} stay", stacklevel=3)
            if i == 0:
                return []
    return []


def _read_back(reader: CheckpointReader) -> None:
    """Verifies a checkpoint, unless this process has done so since its files were written."""
    stamps = _stamps(reader)
    if _found_whole().get(reader.folder) != stamps:
        reader.verify()
        _found_whole()[reader.folder] = stamps


def _stamps(reader: CheckpointReader) -> Stamps:
    """What changes of each file of a checkpoint when it is written to or replaced."""
    paths = [os.path.join(reader.folder, NAME), *(path_of(reader.folder, f) for f in reader.index["files"])]
    out = []
    for path in paths:
        with errors_of("looking at", path):
            s = os.stat(path)
        out.append((s.st_ino, s.st_size, s.st_mtime_ns))
    return tuple(out)
