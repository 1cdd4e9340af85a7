"""Reads checkpoints: which there are in a folder, and parts of their tensors."""

from __future__ import annotations

import os
import re
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
REVISIONS = 1 << 20  # fewer than these has a step


class Saved(NamedTuple):
    """A committed checkpoint; a step that was saved again has a higher `revision`. They are ordered by age."""

    step: int
    revision: int
    path: str

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.revision

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"step-{self.step:08d}.{self.revision}" if self.revision else f"step-{self.step:08d}"


def committed(folder: str) -> list[Saved]:
    """The checkpoints in `folder`, the newest first; none where there is no such folder."""
    with errors_of("looking for checkpoints in", folder):
        try:
            names = store_of(folder).names(folder)
        except FileNotFoundError:
            return []
        found = [(m, os.path.join(folder, name)) for name in names if (m := COMMITTED.fullmatch(name))]
    if is_remote(folder):  # (where the index is the commit; a local folder gets its name when it is whole)
        found = [(m, path) for m, path in found if is_checkpoint(path)]
    saved = (Saved(int(m[1]), int(m[2] or 0), path) for m, path in found)
    # (a copy of one under a name of no save, `step-000000009`, is none that could be named by its step)
    return sorted((s for s in saved if os.path.basename(s.path) == s.name and s.revision < REVISIONS), reverse=True)


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
