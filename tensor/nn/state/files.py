"""What the file formats share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO


@contextmanager
def written_at_once(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to; it takes the place of `path` when it is whole and on disk, so an old one stays until then."""
    fd, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), prefix=".saving-")
    try:
        with os.fdopen(fd, "w+b") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
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
