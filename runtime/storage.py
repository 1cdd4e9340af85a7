"""The memory behind BUFFER nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.tensor.stored import LOST
from manygrad.tensor.uop import UOp
from manygrad.tensor.uop.shape import local_shape, numel
from manygrad.tensor.uop.table import Table

STORAGE: Table[Buffer | list[Buffer | None]] = Table("storage")


def storage(u: UOp) -> Buffer | list[Buffer | None]:
    """The memory behind a BUFFER node; made, not yet allocated, on first use.
    One per own device for a sharded buffer."""
    found = STORAGE.get(u)
    if found is None:
        if (why := LOST.get(u)) is not None:
            raise RuntimeError(why)
        spec = u.arg
        if isinstance(spec.device, str):
            found = Buffer(spec.device, numel(spec.shape), spec.dtype)
        else:
            world = current().world
            found = [
                Buffer(d.partition("@")[0], numel(local_shape(spec, i)), spec.dtype) if world.is_local(d) else None
                for i, d in enumerate(spec.device)
            ]
        STORAGE[u] = found
    return found


def lose(nodes: Iterable[UOp], is_gone: Callable[[Any], bool], why: str) -> None:
    """Values are lost of which memory is gone, as told by its handle."""
    for u in nodes:
        found = STORAGE.get(u)
        parts = found if isinstance(found, list) else [found]
        if any(b is not None and b.is_allocated and is_gone(b.handle) for b in parts):
            LOST[u] = why
            STORAGE.pop(u)
