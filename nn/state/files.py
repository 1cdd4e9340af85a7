"""Helpers that the file formats share."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO


@contextmanager
def written_at_once(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to; it takes the place of `path` when it is whole and on disk, so an old one stays until then.
    It gets the old one's permissions, else those of any new file; a link goes on pointing to it. What is there and is
    no file (/dev/null) is written as it is."""
    path = os.path.realpath(path)
    old = os.stat(path) if os.path.exists(path) else None
    if old is not None and not stat.S_ISREG(old.st_mode):
        with open(path, "w+b") as f:
            yield f
        return
    temporary = os.path.join(os.path.dirname(path), f".saving-{secrets.token_hex(8)}")
    try:
        with open(temporary, "x+b") as f:
            if old is not None:
                os.fchmod(f.fileno(), stat.S_IMODE(old.st_mode))
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        # (the error of a full disk names no file)
        if isinstance(e, OSError) and e.filename in (None, temporary) and e.filename2 is None:
            e.filename = path
            e.add_note("it was not saved" + (", the file that was there is as it was" if old is not None else ""))
        raise


def replaced(x: Any, kind: type, by: dict[int, Any], done: dict[int, Any] | None = None) -> Any:
    """Nested dicts, lists and tuples with the objects of `kind` exchanged by identity."""
    done = {} if done is None else done
    if isinstance(x, kind):
        return by[id(x)]
    if not isinstance(x, (dict, list, tuple)):
        return x
    if id(x) in done:
        return done[id(x)]
    if isinstance(x, tuple):
        return tuple(replaced(v, kind, by, done) for v in x)
    out: Any = {} if isinstance(x, dict) else []
    done[id(x)] = out
    if isinstance(x, dict):
        out.update((k, replaced(v, kind, by, done)) for k, v in x.items())
    else:
        out.extend(replaced(v, kind, by, done) for v in x)
    return out
