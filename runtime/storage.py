"""The memory behind BUFFER nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from manygrad.errors import LostValue
from manygrad.multi.world import is_of_a_rank
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.tensor.engine import engine
from manygrad.tensor.lock import locked
from manygrad.tensor.storage import LIVE
from manygrad.tensor.stored import HISTORY, LOST
from manygrad.tensor.uop import Ops, UOp, standing_on, toposort
from manygrad.tensor.uop.shape import local_shape, numel
from manygrad.tensor.uop.table import Table

STORAGE: Table[Buffer | list[Buffer | None]] = Table("storage")
SPOILED: Table[Buffer | list[Buffer | None]] = Table("spoiled")  # the memory of a lost value, for who writes it anew


class Losses:
    """How often the value of a BUFFER was lost (`spoil`)."""

    count = 0


LOSSES = Losses()


def storage(u: UOp) -> Buffer | list[Buffer | None]:
    """The memory behind a BUFFER node; made, not yet allocated, on first use.
    One per own device for a sharded buffer."""
    found = STORAGE.get(u)
    if found is None:
        if (why := LOST.get(u)) is not None:
            raise LostValue(why)
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


def buffers_of(u: UOp) -> list[Buffer]:
    """The buffers of this worker behind a BUFFER node; none behind a constant, which a tensor without elements is."""
    found = storage(u) if u.op is Ops.BUFFER else []
    return [found] if isinstance(found, Buffer) else [b for b in found if b is not None]


def spoil(u: UOp, why: str) -> None:
    """What a BUFFER holds is no value, until something else is written there (`restore`)."""
    LOSSES.count += 1
    found = STORAGE.get(u)
    if found is not None:
        SPOILED[u] = found
        STORAGE.pop(u)
    LOST[u] = why


def restore(u: UOp) -> None:
    """A spoiled BUFFER is about to be written."""
    STORAGE[u] = SPOILED[u]
    SPOILED.pop(u)
    LOST.pop(u)


def lose(nodes: Iterable[UOp], is_gone: Callable[[Any], bool], why: str) -> None:
    """Values are lost of which memory is gone, as told by its handle."""
    for u in nodes:
        found = STORAGE.get(u)
        parts = found if isinstance(found, list) else [found]
        if any(b is not None and b.is_allocated and is_gone(b.handle) for b in parts):
            LOST[u] = why
            STORAGE.pop(u)


@locked
def lose_shared(why: str) -> None:
    """All values are lost that lie on devices named by ranks, or are yet to be computed from such a one."""
    live = list(LIVE)
    roots = nodes = toposort([t.uop for t in live])
    while roots:  # what backward() would follow
        before = {*nodes}
        roots = [h[0] for u in roots if (h := HISTORY.get(u)) is not None and h[0] is not None]
        roots = [u for u in toposort(roots) if u not in before]
        nodes = [*nodes, *roots]
    for u in nodes:
        if u.op is Ops.BUFFER and is_of_a_rank(u.device):
            LOST[u] = why
            STORAGE.pop(u)
    shared = standing_on([t.uop for t in live], lambda u: is_of_a_rank(u.device))
    for t in live:
        if t.uop in shared:
            engine().lose(t, why)
