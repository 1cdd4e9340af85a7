"""Errors of a file system as errors about a checkpoint, with what to do next."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from manygrad.errors import CheckpointError

NEXT = {
    errno.ENOSPC: "the disk is full: free some of it, or keep fewer checkpoints (keep=)",
    errno.EDQUOT: "the quota is used up: free some of it, or keep fewer checkpoints (keep=)",
    errno.EFBIG: "a file may not be that large here: look at `ulimit -f`",
    errno.EROFS: "the file system is read-only: mount it writable, or choose another folder",
    errno.EACCES: "this user may not do that there: change the permissions, or choose another folder",
    errno.EPERM: "this user may not do that there: change the permissions, or choose another folder",
    errno.ENOENT: "it is not there (any more): has something removed it, or its file system been unmounted?",
    errno.EIO: "the device does not answer as it should: look at the system's log",
    errno.ESTALE: "the file server has lost it: mount it anew",
}


@contextmanager
def errors_of(what: str, path: str) -> Iterator[None]:
    """An `OSError` inside becomes a CheckpointError about `path`: `what` ("saving") failed."""
    try:
        yield
    except OSError as e:
        name = e.filename if isinstance(e.filename, str) else path
        advice = NEXT.get(e.errno or 0, "look at the file system it is on")
        raise CheckpointError(f"{what} {path} failed: {e.strerror or e} ({name}); {advice}") from e
