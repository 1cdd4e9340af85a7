"""Writes a checkpoint: parts, index, commit.

1. Each rank writes its parts into `DIR/step-00000010.JOB.ATTEMPT.tmp/`, then a description of them, `part-00001.json`.
2. Rank 0 waits for the descriptions of all ranks and makes `index.json` of them.
3. It renames the folder to `DIR/step-00000010`. That is the commit: before it there is no checkpoint, after it a whole
   one, for all of it is on disk. The other ranks wait to see it.

The ranks agree over the file system, which all of them see anyway, not by collectives: so the thread of an asynchronous
save does it while the next steps communicate. A rank that fails leaves a file `failed-00001`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from manygrad.checkpoint.disk_errors import errors_of
from manygrad.checkpoint.index import CHUNK, NAME, checksums, encode, merged
from manygrad.checkpoint.layout import TensorPart
from manygrad.checkpoint.pruning import prune
from manygrad.checkpoint.reader import committed
from manygrad.errors import CheckpointError, OtherRankFailed

PIECE = 8 * CHUNK  # bytes that are written before the disk is asked to begin with them
STALLED_S = 0.3  # nothing is written for so long in a run that has failed: who is waited for will not come
# between looks for the other ranks: a part of how long has been waited, within these bounds
LOOK_S, LONGEST_LOOK_S, LOOK_PART = 0.005, 0.2, 0.03
_ATTEMPT = re.compile(r"step-\d+\.(.+)\.(\d+)\.tmp")


@dataclass(frozen=True)
class Snapshot:
    """What a rank will write: of each tensor code of its type, shape, parts, and arrays of the rank's own parts.
    `own`: names of those that are rows, one for each rank. `differs`: so does the state by rank. `is_copy`: nobody else
    writes to these arrays."""

    rank: int
    step: int
    state: Any
    tensors: dict[str, tuple[str, tuple[int, ...], list[TensorPart], list[np.ndarray]]]
    own: frozenset[str] = frozenset()
    differs: bool = False
    is_copy: bool = True

    @cached_property
    def _laid_out(self) -> tuple[bytes, list[tuple[dict[str, Any], np.ndarray]], dict[str, Any]]:
        """How the file that the rank writes begins, its arrays with the descriptions of the parts that they are, and
        its own: {"files": ..., "tensors": ...} as in the index."""
        file = part_name(self.rank)
        header: dict[str, Any] = {"__metadata__": {"step": str(self.step), "rank": str(self.rank)}}
        arrays: list[tuple[dict[str, Any], np.ndarray]] = []
        tensors: dict[str, Any] = {}
        offset = 0
        for name, (code, shape, parts, own) in self.tensors.items():
            boxes = [p.box for p in parts if p.owner == self.rank]
            about = tensors[name] = {"dtype": code, "shape": list(shape), "parts": []}
            if name in self.own:
                about["by_rank"] = True
            for box, array in zip(boxes, own):
                start, dims = [a for a, _ in box], [b - a for a, b in box]  # (the array of a row lacks its dim)
                whole = tuple(dims) == tuple(shape)
                key = name if whole else f"{name}[{', '.join(f'{a}:{b}' for a, b in box)}]"
                while key in header:  # (another tensor has a name as of a part, or is named as the metadata are)
                    key += "'"
                header[key] = {"dtype": code, "shape": dims, "data_offsets": [offset, offset + array.nbytes]}
                about["parts"].append({"start": start, "shape": dims, "file": file, "offset": offset})
                arrays.append((about["parts"][-1], array))
                offset += array.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        head = struct.pack("<Q", len(text)) + text
        for part, _ in arrays:
            part["offset"] += len(head)
        files = {file: {"nbytes": len(head) + offset, "header": len(head), "crc32": crc32(head)}}
        about_all = {"files": files, "tensors": tensors}
        return head, arrays, about_all | ({"state_of_rank": self.state} if self.differs else {})

    def part_file(self, write: Callable[[memoryview], object]) -> dict[str, Any]:
        """Gives the bytes of the file that the rank writes to `write`, one chunk after the other, and returns its
        description."""
        head, arrays, about = self._laid_out
        write(memoryview(head))
        for part, array in arrays:
            data = memoryview(array.reshape(-1).view(np.uint8))
            known, found = part.get("crc32") if self.is_copy else None, list[int]()
            for at in range(0, len(data), CHUNK):
                chunk = data[at : at + CHUNK]
                if not self.is_copy:  # (the checksum is of what is written, whatever other threads do meanwhile)
                    chunk = memoryview(bytes(chunk))
                if known is None:
                    found += checksums(chunk)
                write(chunk)  # (which is in the processor's cache now)
            part["crc32"] = found if known is None else known
        return about


@dataclass(frozen=True)
class Attempt:
    """One save into `folder` by rank `rank` of `size`; no other has its `job` and `number`."""

    folder: str
    rank: int
    size: int
    job: str
    number: int
    keep: int | None
    timeout_s: float
    has_failed: Callable[[], bool] = lambda: False  # whether the run has, in another rank

    def write(self, snapshot: Snapshot) -> str:
        """Returns the path of the committed checkpoint. CheckpointError: there is none."""
        name = f"step-{snapshot.step:08d}"
        at = os.path.join(self.folder, f"{name}.{self.job}.{self.number}.tmp")
        inode = 0
        try:
            with errors_of("saving", at), ExitStack() as stack:
                self._clear()
                _make_folder(self.folder)
                inode = make_and_hold(at, stack)
                self._write_parts(at, snapshot)
                return self._commit(at, name, snapshot) if self.rank == 0 else self._wait_for_commit(at, inode)
        except OtherRankFailed:  # (who needs its folder yet; the next attempt takes it away)
            raise
        except BaseException:
            with suppress(OSError):
                self._give_up(at, made=inode != 0)
            raise

    def _give_up(self, at: str, made: bool) -> None:
        """This rank has failed: its parts go, and a file says so, also to ranks that come later."""
        if self.size == 1:
            shutil.rmtree(at)
            return
        if not made:
            os.makedirs(at, exist_ok=True)
        for name in os.listdir(at):
            if name.startswith(f"part-{self.rank:05d}."):
                os.unlink(os.path.join(at, name))
        os.close(os.open(os.path.join(at, f"failed-{self.rank:05d}"), os.O_CREAT | os.O_WRONLY, 0o666))

    def _clear(self) -> None:
        """Takes away what attempts that were cut short have left, and not what somebody writes just now: another job,
        or a save beside this one."""
        if self.rank:
            return
        with suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                found = _ATTEMPT.fullmatch(name)
                if found and (found[1] != self.job or int(found[2]) < self.number):
                    at = os.path.join(self.folder, name)
                    with suppress(BlockingIOError, FileNotFoundError), held(at, fcntl.LOCK_EX | fcntl.LOCK_NB):
                        shutil.rmtree(at, ignore_errors=True)

    # *** parts ***

    def _write_parts(self, at: str, snapshot: Snapshot) -> None:
        with open(os.path.join(at, part_name(self.rank)), "wb", buffering=0) as f:
            about = snapshot.part_file(_PartWriter(f))
            os.fsync(f.fileno())
        _sync_folder(at)  # (before the description, after which rank 0 may rename it)
        _write_file(os.path.join(at, f"part-{self.rank:05d}.json"), json.dumps(about).encode(), on_disk=False)

    # *** agreement ***

    def _commit(self, at: str, name: str, snapshot: Snapshot) -> str:
        pieces = [os.path.join(at, f"part-{rank:05d}.json") for rank in range(self.size)]
        self._wait(at, lambda there: all(os.path.basename(p) in there for p in pieces))
        read = []
        for p in pieces:
            with open(p, "rb") as f:
                read.append(json.loads(f.read()))
        _write_file(os.path.join(at, NAME), encode(merged(read, snapshot.step, snapshot.state)))
        for p in pieces:
            os.unlink(p)
        _sync_folder(at)
        again = [s for s in committed(self.folder) if s.step == snapshot.step]
        path = os.path.join(self.folder, f"{name}.{again[0].revision + 1}" if again else name)
        os.rename(at, path)
        _sync_folder(self.folder)
        if self.keep is not None:
            try:
                prune(self.folder, self.keep, path)
            except OSError as e:
                warnings.warn(f"older checkpoints in {self.folder} could not be removed: {e}", stacklevel=2)
        return path

    def _wait_for_commit(self, at: str, inode: int) -> str:
        """Rank 0 renames the folder."""
        self._wait(at, lambda there: not there)
        for saved in committed(self.folder):
            with suppress(OSError):
                if os.stat(saved.path).st_ino == inode:
                    return saved.path
        raise CheckpointError(f"{at} was not committed: rank 0 could not finish it; its own error says why")

    def look(self, at: str) -> dict[str, int]:
        """Sizes of the files that there are. FileNotFoundError: the folder is not there (any more)."""
        return _sizes(at)

    def _wait(self, at: str, done: Any) -> None:
        """Until `done(names in the folder)`. CheckpointError where another rank has failed, or none has written
        anything for timeout_s."""
        began = since = time.monotonic()
        before = -1
        while True:
            try:
                there = self.look(at)
            except FileNotFoundError:
                if self.rank == 0:  # (who alone renames it)
                    raise
                there = {}
            if done(there):
                return
            if failed := sorted(n for n in there if n.startswith("failed-")):
                ranks = ", ".join(str(int(n.removeprefix("failed-"))) for n in failed)
                raise OtherRankFailed(
                    f"{at} was not committed: rank {ranks} could not write its part; its error says why", peer=-1
                )
            if sum(there.values()) + len(there) != before:
                since, before = time.monotonic(), sum(there.values()) + len(there)
            limit_s = min(self.timeout_s, STALLED_S) if self.has_failed() else self.timeout_s
            if time.monotonic() - since > limit_s:
                missing = [r for r in range(self.size) if f"part-{r:05d}.json" not in there] or [0]
                late = ", ".join(map(str, missing))
                raise OtherRankFailed(
                    f"{at} was not committed: nothing was written for {limit_s:g} s, while rank {late} "
                    f"was waited for. {self.folder} must be one folder that all workers see, at one path; a slow disk "
                    "needs a longer timeout_s",
                    peer=missing[0],
                )
            time.sleep(min(LONGEST_LOOK_S, max(LOOK_S, LOOK_PART * (time.monotonic() - began))))


def part_name(rank: int) -> str:
    return f"part-{rank:05d}.safetensors"


@contextmanager
def held(folder: str, how: int) -> Iterator[int]:
    """A descriptor of a folder, with a lock that goes with it, or with its process: who writes there shares one.
    BlockingIOError: others hold it."""
    at = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(at, how)
        except BlockingIOError:
            raise
        except OSError:  # (a file system without locks)
            pass
        yield at
    finally:
        os.close(at)


def make_and_hold(folder: str, stack: ExitStack) -> int:
    """Makes a folder, and holds it as long as the stack is open; gives its inode. (Somebody who found it before it was
    held may have taken it away.)"""
    for _ in range(100):
        os.makedirs(folder, exist_ok=True)
        with suppress(FileNotFoundError):
            inode = os.fstat(stack.enter_context(held(folder, fcntl.LOCK_SH))).st_ino
            if os.stat(folder).st_ino == inode:
                return inode
    raise FileNotFoundError(errno.ENOENT, "it is taken away again and again", folder)


def _sizes(folder: str) -> dict[str, int]:
    """Sizes of the files in a folder, without those taken away meanwhile. FileNotFoundError: so is the folder."""
    found = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            found[entry.name] = entry.stat().st_size
    return found


def _write_all(f: BinaryIO | Any, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += f.write(data[at:]) or 0


class _PartWriter:
    """Writes piece by piece. The disk begins with the first ones, and not at fsync."""

    def __init__(self, f: BinaryIO | Any) -> None:
        self.f, self.written, self.begun = f, 0, 0

    def __call__(self, piece: memoryview) -> None:
        _write_all(self.f, piece)
        self.written += len(piece)
        whole = self.written // CHUNK * CHUNK  # (a page that is being written to the disk cannot be written to)
        if whole - self.begun >= PIECE and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # (a hint: what is not on disk yet is not forgotten, but begun to be written)
                os.posix_fadvise(self.f.fileno(), self.begun, whole - self.begun, os.POSIX_FADV_DONTNEED)
            self.begun = whole


def _write_file(path: str, data: bytes, on_disk: bool = True) -> None:
    """Whole (and `on_disk`), or not there."""
    with open(f"{path}.part", "wb", buffering=0) as f:
        _write_all(f, memoryview(data))
        if on_disk:
            os.fsync(f.fileno())
    os.rename(f"{path}.part", path)


def _make_folder(path: str) -> None:
    """With those above it, on disk."""
    if not os.path.isdir(path):
        above = os.path.dirname(os.path.abspath(path))
        _make_folder(above)
        with suppress(FileExistsError):
            os.mkdir(path)
        _sync_folder(above)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
