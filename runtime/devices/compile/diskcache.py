"""Compiled code on disk, shared by all processes of a user.

One file an entry: magic, SHA-256 of key and payload, payload. Written to a temporary name and renamed, so a reader sees
a whole entry or none; a damaged one, or another key's, is taken for missing and rebuilt. CACHE_MB bounds the folder:
the entries used least recently (by modification time, renewed on use) go first. CACHE=0 switches it off, CACHE_DIR
moves it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from manygrad.tensor.environment import CACHE, CACHE_DIR, CACHE_MB, DEBUG

MAGIC = b"manygrad2\n"
RENEW_AFTER_S = 600.0  # how old an entry's time may get before a use renews it


def _digest(key: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(len(key).to_bytes(8, "little") + key + payload).digest()


class DiskCache:
    """`name` is the subfolder; keys are bytes (digests), values are bytes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.writes = random.randrange(32)  # processes that write few entries each must sweep, too

    @property
    def folder(self) -> Path:
        return Path(CACHE_DIR.value).expanduser() / self.name

    def path(self, key: bytes) -> Path:
        digest = key.hex()
        return self.folder / digest[:2] / digest[2:]

    def get(self, key: bytes) -> bytes | None:
        """The value, or None where there is none (or a damaged one, which is removed)."""
        if not CACHE:
            return None
        path = self.path(key)
        try:
            data = path.read_bytes()
            age = time.time() - path.stat().st_mtime
        except OSError:
            return None
        head = len(MAGIC) + 32
        payload = data[head:]
        if data[: len(MAGIC)] != MAGIC or _digest(key, payload) != data[len(MAGIC) : head]:
            if DEBUG >= 1:
                print(f"cache: {path} is damaged ({len(data)} bytes); it is made again")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        if age > RENEW_AFTER_S:
            with contextlib.suppress(OSError):
                os.utime(path)
        return payload

    def put(self, key: bytes, payload: bytes) -> None:
        """Stores a value; a full or read-only disk is no error."""
        if not CACHE:
            return
        path = self.path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(MAGIC + _digest(key, payload) + payload)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            if DEBUG >= 1:
                print(f"cache: cannot write {path}: {error}")
            return
        self.writes += 1
        if self.writes % 32 == 0:
            self.sweep()

    @contextlib.contextmanager
    def lock(self, timeout_s: float) -> Iterator[bool]:
        """Held by one holder at a time of all processes that use the folder; False where it was not had in `timeout_s`.

        It ends with the process that holds it. Without CACHE, or where the system has no such locks, all hold it.
        """
        try:
            import fcntl

            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.folder / "lock", "wb") if CACHE else None
        except (ImportError, OSError):
            file = None
        if file is None:
            yield True
            return
        with file:
            deadline, mine = time.monotonic() + timeout_s, False
            while not mine and time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    mine = True
                except OSError:
                    time.sleep(0.02)
            yield mine

    def claim(self, key: bytes) -> contextlib.ExitStack | None:
        """The right to make the entry of `key`, until the end of the `with`; None while another process, or another
        thread, has it.

        A lock on a file of its own: it ends with its process, so there is never a stale one. Without CACHE, or where
        the system has no such locks, all have the right.
        """
        try:
            import fcntl

            path = self.path(key)
            path = path.with_name(f".claim-{path.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "wb") if CACHE else None
        except (ImportError, OSError):
            file = None
        if file is None:
            return contextlib.ExitStack()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        claimed = contextlib.ExitStack()
        claimed.callback(file.close)
        claimed.callback(
            lambda: path.unlink(missing_ok=True)
        )  # (first; who opened it meanwhile claims a file that is gone: made twice at worst)
        return claimed

    def sweep(self) -> None:
        """Removes the least recently used entries of this folder until it fits CACHE_MB."""
        limit = int(CACHE_MB.value) << 20
        entries: list[tuple[float, int, str]] = []
        now = time.time()
        for root, _, files in os.walk(self.folder):
            for name in files:
                path = os.path.join(root, name)
                with contextlib.suppress(OSError):
                    found = os.stat(path)
                    if name == "lock" or (name.startswith(".new-") and now - found.st_mtime < 60):
                        continue  # being written
                    entries.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        if total <= limit:
            return
        for _, size, path in sorted(entries):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            if total <= limit * 0.8:
                return
