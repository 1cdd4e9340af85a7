"""What all ranks call a place in the tree of traces, which each of them grows for itself."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from types import CodeType
from typing import Any

from manygrad.tensor.uop import UOp


def digest_of(above: bytes, key: tuple[Any, ...], code: CodeType | None = None) -> bytes:
    """The digest of a node below the one with the digest `above`. `code`: that of the user which its key names."""
    return blake2b(above + repr([*_told(key, code)]).encode(), digest_size=8).digest()


def place_of(above: bytes, key: tuple[Any, ...]) -> int:
    """The number of what ends a trace at a node: positive, and an int64."""
    return int.from_bytes(digest_of(above, key), "little") >> 1 | 1


def _told(key: tuple[Any, ...], code: CodeType | None) -> Iterator[Any]:
    """What a key says that is the same on all ranks: no ids, of code or of state."""
    if code is not None:
        yield key[0].__qualname__, code.co_qualname, code.co_firstlineno
    i = 0 if code is None else 2
    while i < len(key):
        x = key[i]
        if isinstance(x, str) and x == "s" and key[i - 1] is not str:
            yield x
            i += 3  # (tensor and node)
        else:
            yield (x.op.name, x.dtype.name, x.shape) if isinstance(x, UOp) else getattr(x, "__qualname__", x)
            i += 1


__all__ = ["digest_of", "place_of"]
