"""Reads checkpoints: which there are in a folder, and parts of their tensors."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any, NamedTuple

import numpy as np

from manygrad.checkpoint.disk_errors import errors_of
from manygrad.checkpoint.index import CHUNK, NAME, box_of, checksums, nbytes_of, path_of, read_index
from manygrad.checkpoint.layout import Bounds, common, size, within
from manygrad.checkpoint.store import is_remote, store_of
from manygrad.errors import CheckpointError
from manygrad.nn.state.safetensors import CODES
from manygrad.runtime.current import current
from manygrad.tensor.dtype import DType

COMMITTED = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
PIECE = 64 * CHUNK  # read at once
HEAD = 256  # bytes of an index in which its step stands
_STEP = re.compile(rb'"format": "[^"]*", "step": (\d+)')
REVISIONS = 1 << 20  # fewer than these has a step


class Saved(NamedTuple):
    """A committed checkpoint; a step that was saved again has a higher `revision`. `step` is that of its folder's name,
    `done` that of its own index: another one where somebody has renamed it."""

    step: int
    revision: int
    path: str
    done: int

    @property
    def place(self) -> tuple[int, int, int]:
        """They are ordered by age."""
        return self.done, self.step, self.revision

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"step-{self.step:08d}.{self.revision}" if self.revision else f"step-{self.step:08d}"


def committed(folder: str) -> list[Saved]:
    """The checkpoints in `folder`, the newest by name first; none where there is no such folder."""
    return sorted((s for s in _named(folder) if _has_its_name(s)), reverse=True)


def newest_first(folder: str, warns: bool = True) -> list[Saved]:
    """The checkpoints in `folder` by the steps in their own indices. Warns of those that were renamed; CheckpointError
    where none has a name that a save gives."""
    named = _named(folder)
    found = [s._replace(done=_done(s)) for s in named if _has_its_name(s)]
    odd = [s for s in named if not _has_its_name(s)] if warns else []
    for s in odd:
        why = f"{s.path} is not looked at: a checkpoint of step {_done(s)} is named {_named_for(s)}"
        if not found:
            raise CheckpointError(f"{why}; rename it, or move it away to begin anew")
        warnings.warn(why, stacklevel=3)
    for s in found if warns else ():
        if s.done != s.step:
            warnings.warn(
                f"{s.path} was renamed: by its own index it has done {s.done} steps, and that is what counts. Rename "
                f"it to {_named_for(s)}",
                stacklevel=3,
            )
    return sorted(found, key=lambda s: s.place, reverse=True)


def _named(folder: str) -> list[Saved]:
    """What has a name as of a checkpoint."""
    with errors_of("looking for checkpoints in", folder):
        try:
            names = store_of(folder).names(folder)
        except FileNotFoundError:
            return []
        found = [(m, os.path.join(folder, name)) for name in names if (m := COMMITTED.fullmatch(name))]
    if is_remote(folder):  # (where the index is the commit; a local folder gets its name when it is whole)
        found = [(m, path) for m, path in found if is_checkpoint(path)]
    return [Saved(int(m[1]), int(m[2] or 0), path, int(m[1])) for m, path in found]


def _has_its_name(s: Saved) -> bool:
    """Whether a save could have named it: `step-000000009` has a digit too many, and no step would lead to it."""
    return os.path.basename(s.path) == s.name and s.revision < REVISIONS


def _named_for(s: Saved) -> str:
    return s._replace(step=_done(s), revision=s.revision % REVISIONS).name


def _done(s: Saved) -> int:
    """The step in the index of a checkpoint; that of its name, where this cannot be read."""
    try:
        head = store_of(s.path).read(os.path.join(s.path, NAME), 0, HEAD)
    except OSError:
        return s.step
    found = _STEP.search(head)
    return int(found[1]) if found else s.step


def is_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint itself."""
    with errors_of("looking into", folder):
        try:
            return NAME in store_of(folder).names(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False


class CheckpointReader:
    """The checkpoint in `folder`. CheckpointError on whatever in it is not as it was written."""

    def __init__(self, folder: str):
        self.folder, self.store = folder, store_of(folder)
        self.index: dict[str, Any] = read_index(folder)

    @property
    def state(self) -> Any:
        """The state as JSON, without its tensors; of what differs by rank that of one for this rank."""
        states = self.index.get("states")
        return states[current().world.rank % len(states)] if states else self.index["state"]

    def about(self, name: str) -> tuple[tuple[int, ...], DType]:
        t = self.index["tensors"][name]
        return tuple(t["shape"][1:] if t.get("by_rank") else t["shape"]), CODES[t["dtype"]]

    def read(self, name: str, box: Bounds) -> np.ndarray:
        """The elements `box` of a tensor, of what differs by rank from the row for this rank."""
        t = self.index["tensors"][name]
        if not t.get("by_rank"):
            return self._read(name, box)
        row = current().world.rank % t["shape"][0]
        return self._read(name, ((row, row + 1), *box)).reshape([b - a for a, b in box])

    def _read(self, name: str, box: Bounds) -> np.ndarray:
        """The elements `box` of what is saved, from those chunks of files which have some of their rows."""
        t = self.index["tensors"][name]
        out = np.empty([b - a for a, b in box], CODES[t["dtype"]].np)
        found = 0
        for part in t["parts"]:
            lies = box_of(part)
            if (wanted := common(lies, box)) is not None:
                place = out[within(wanted, box)]
                if wanted == lies and lies and place.flags.c_contiguous:
                    self._read_into(name, part, 0, memoryview(place.reshape(-1).view(np.uint8)))
                else:
                    rows = (wanted[0], *lies[1:]) if lies else lies
                    out[within(wanted, box)] = self._rows(name, part, rows)[within(wanted, rows)]
                found += size(wanted)
        if found != out.size:
            raise CheckpointError(
                f"{self.folder} has {found} of {out.size} elements of {name!r}; use another checkpoint"
            )
        return out

    def _rows(self, name: str, part: dict[str, Any], rows: Bounds) -> np.ndarray:
        """Whole rows of a part; the chunks that they lie in are checked."""
        code = self.index["tensors"][name]["dtype"]
        total = nbytes_of(part, code)
        row = total // part["shape"][0] if part["shape"] else total
        first = (rows[0][0] - part["start"][0]) * row if rows else 0
        last = first + size(rows) * CODES[code].itemsize
        begin, end = first // CHUNK * CHUNK, min(-(-last // CHUNK) * CHUNK, total)
        data = np.empty(end - begin, np.uint8)
        self._read_into(name, part, begin, memoryview(data))
        return data[first - begin : last - begin].view(CODES[code].np).reshape([b - a for a, b in rows])

    def _read_into(self, name: str, part: dict[str, Any], begin: int, view: memoryview) -> None:
        """Whole chunks of a part, from its byte `begin` on, which are checked."""
        path = path_of(self.folder, part["file"])
        for at in range(0, len(view), PIECE):
            piece, offset = view[at : at + PIECE], part["offset"] + begin + at
            with errors_of("reading", path):
                count = self.store.read_into(path, offset, piece)
            piece[count:] = bytes(len(piece) - count)  # (where the file ends before)
            first = (begin + at) // CHUNK
            for i, found in enumerate(checksums(piece)):
                if found != part["crc32"][first + i]:
                    raise CheckpointError(
                        f"{path} is damaged: the checksum of {name!r} is wrong in the {CHUNK} bytes from byte "
                        f"{offset + i * CHUNK} on; use another checkpoint"
                    )

    def verify(self) -> None:
        """Reads all of it."""
        for name, t in self.index["tensors"].items():
            for part in t["parts"]:
                self._rows(name, part, box_of(part))
