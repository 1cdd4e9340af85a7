"""Where checkpoints lie: a folder that the system mounts, or a remote one, named by a URL, through `fsspec`.

checkpoints, /data/checkpoints, file:///data/checkpoints    LOCAL
s3://bucket/run, gs://bucket/run, memory://run, ...         RemoteStore, with the driver that fsspec has for it
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from manygrad.errors import CheckpointError

T = TypeVar("T")
TRIES = 5  # of an operation of a remote store
FIRST_WAIT_S = 0.1  # between tries, then twice as long after each
PIECE = 64 << 20
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "b2"}
# what another try does not change
FINAL = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)


def location(folder: str | os.PathLike[str]) -> str:
    """A folder's absolute path, or its URL."""
    name = os.fspath(folder)
    for scheme in ("file://", "local://"):
        if name.startswith(scheme):
            return os.path.abspath(name.removeprefix(scheme))
    return name.rstrip("/") if is_remote(name) else os.path.abspath(name)


def is_remote(folder: str) -> bool:
    return "://" in folder


class CheckpointStore(Protocol):
    """What reading a checkpoint asks of a file system. Errors are OSErrors."""

    def names(self, folder: str) -> list[str]:
        """Files and folders in a folder. FileNotFoundError: there is none."""
        ...

    def size(self, path: str) -> int: ...

    def read(self, path: str, begin: int = 0, count: int | None = None) -> bytearray:
        """`count` bytes from `begin` on, or all; fewer where the file ends."""
        ...

    def read_into(self, path: str, begin: int, into: memoryview) -> int:
        """The bytes from `begin` on; returns how many there were, fewer than asked for where the file ends."""
        ...


class LocalStore:
    """Files of the system."""

    def names(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def size(self, path: str) -> int:
        return os.path.getsize(path)

    def read(self, path: str, begin: int = 0, count: int | None = None) -> bytearray:
        data = bytearray(max(0, os.path.getsize(path) - begin) if count is None else count)
        return data[: self.read_into(path, begin, memoryview(data))]

    def read_into(self, path: str, begin: int, into: memoryview) -> int:
        at = 0
        with open(path, "rb", buffering=0) as f:
            f.seek(begin)
            while at < len(into) and (n := f.readinto(into[at:])):
                at += n
        return at


class RemoteStore:
    """A file system of fsspec; paths are URLs. What fails for a moment is tried again."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs

    def _do(self, path: str, work: Callable[[], T]) -> T:
        """`work()`, again where it fails; an error of the driver is an OSError about `path`."""
        for n in range(TRIES):
            try:
                return work()
            except FINAL:
                raise
            except Exception as e:
                if n + 1 == TRIES:
                    code = e.errno if isinstance(e, OSError) and e.errno else errno.EIO
                    raise OSError(code, f"{type(e).__name__}: {e} ({TRIES} tries)", path) from e
                time.sleep(FIRST_WAIT_S * 2**n)
        raise AssertionError

    def names(self, folder: str) -> list[str]:
        return [path.rstrip("/").rpartition("/")[2] for path in self._entries(folder)]

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes of the files in a folder, by name. FileNotFoundError: there is none."""
        return {p.rpartition("/")[2]: e.get("size") or 0 for p, e in self._entries(folder).items()
                if e.get("type") != "directory"}  # fmt: skip

    def _entries(self, folder: str) -> dict[str, Any]:
        def look() -> dict[str, Any]:
            self.fs.invalidate_cache()  # (other workers write)
            return {e["name"]: e for e in self.fs.ls(folder, detail=True)}

        found = self._do(folder, look)
        own = self.fs._strip_protocol(folder).rstrip("/")  # (some stores list a folder in itself)
        return {p: e for p, e in found.items() if p.rstrip("/") != own}

    def size(self, path: str) -> int:
        return int(self._do(path, lambda: self.fs.info(path))["size"])

    def read(self, path: str, begin: int = 0, count: int | None = None) -> bytearray:
        end = None if count is None else begin + count
        return bytearray(self._do(path, lambda: self.fs.cat_file(path, start=begin, end=end)))

    def read_into(self, path: str, begin: int, into: memoryview) -> int:
        data = self.read(path, begin, len(into))
        into[: len(data)] = data
        return len(data)

    def write(self, path: str, parts: Iterable[memoryview]) -> None:
        """A file of all the parts. One of at most PIECE bytes is put there at once, a larger one in pieces."""
        data = list(parts)

        def put_at_once() -> None:
            self.fs.pipe_file(path, b"".join(data))

        def put() -> None:
            f = self.fs.open(path, "wb")
            for part in data:
                for at in range(0, len(part), PIECE):
                    f.write(part[at : at + PIECE])
            f.close()  # (not after an error: that would commit a half)

        self._do(path, put_at_once if sum(map(len, data)) <= PIECE else put)

    def make_folder(self, path: str) -> None:
        """In an object store there are no folders to make; asked for one it would make a bucket that is missing."""
        names = self.fs.protocol if isinstance(self.fs.protocol, (tuple, list)) else (self.fs.protocol,)
        if OBJECT_STORES.isdisjoint(names):
            self._do(path, lambda: self.fs.makedirs(path, exist_ok=True))

    def remove(self, path: str) -> None:
        """A file, or a folder with all in it; it may have gone already."""
        try:
            self._do(path, lambda: self.fs.rm(path, recursive=True))
        except FileNotFoundError:
            pass


LOCAL = LocalStore()


def remote_store(folder: str) -> RemoteStore:
    """The store of a URL."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise CheckpointError(
            f"{folder} is remote storage, for which fsspec is needed: pip install 'manygrad[remote]', and the driver "
            "of its scheme (s3fs, gcsfs, adlfs, ...)"
        ) from None
    try:
        return RemoteStore(url_to_fs(folder)[0])
    except (ImportError, ValueError) as e:
        raise CheckpointError(f"{folder} cannot be opened: {e}; install the driver of its scheme, or correct it") from e


def store_of(folder: str) -> CheckpointStore:
    return remote_store(folder) if is_remote(folder) else LOCAL
