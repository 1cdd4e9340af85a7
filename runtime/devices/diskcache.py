"""Compiled code on disk, shared by all processes of a user.

One file an entry: magic, SHA-256 of the payload, payload. Written to a temporary name and renamed, so a reader sees a
whole entry or none; a damaged one is taken for missing and rebuilt. CACHE_MB bounds the folder: the entries used least
recently (by modification time, renewed on use) go first. CACHE=0 switches it off, CACHE_DIR moves it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import tempfile
import time
from pathlib import Path

from manygrad.tensor.environment import CACHE, CACHE_DIR, CACHE_MB, DEBUG

MAGIC = b"manygrad1\n"
RENEW_AFTER_S = 600.0  # how old an entry's time may get before a use renews it


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
        if data[: len(MAGIC)] != MAGIC or hashlib.sha256(payload).digest() != data[len(MAGIC) : head]:
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
                    file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
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

    def sweep(self) -> None:
        """Removes the least recently used entries of the whole CACHE_DIR until it fits CACHE_MB."""
        limit = int(CACHE_MB.value) << 20
        entries: list[tuple[float, int, str]] = []
        now = time.time()
        for root, _, files in os.walk(self.folder):
            for name in files:
                path = os.path.join(root, name)
                with contextlib.suppress(OSError):
                    found = os.stat(path)
                    if name.startswith(".new-") and now - found.st_mtime < 60:
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


def code_version(*packages: str) -> bytes:
    """A digest of the source files of `packages` (folders beside `runtime/devices`): a change of them makes old entries unused."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for folder in (here, *(here.parent / p for p in packages)):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.digest()
