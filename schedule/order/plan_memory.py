"""plan_memory: the calls become a LINEAR, whose temporary buffers share one block a device.

Two buffers may overlap when no call needs both. What workers exchange is in flight until something uses the result:
the memory is not given to what may run meanwhile. Offsets are chosen largest-first into the lowest gap that is free
over the buffer's life. Buffers from outside (PARAMs) are never reused. The temporaries of a CHAIN share a thread's
memory likewise.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from manygrad.schedule.facts.buffers import is_temporary, nbytes_of
from manygrad.schedule.facts.items import Item, leaves_the_worker
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.source import LINE
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.serial import register

ALIGN = 64
Key = TypeVar("Key", bound=Hashable)
Life = tuple[int, int]  # the first and the last step in which something is used


@register
class MemoryPool(NamedTuple):
    """A block of memory."""

    device: str
    nbytes: int


@register
class PlacedBuffer(NamedTuple):
    """Where a temporary buffer lies."""

    uid: int  # the buffer's
    pool: int  # the number of its pool
    offset: int  # in bytes
    nbytes: int


@register
@dataclass(frozen=True)
class MemoryPlan:
    """The arg of a LINEAR: a pool a device, and its temporary buffers by their uids."""

    pools: tuple[MemoryPool, ...]
    buffers: tuple[PlacedBuffer, ...]


def lives_of(steps: list[list[Key]]) -> dict[Key, Life]:
    found: dict[Key, Life] = {}
    for at, used in enumerate(steps):
        for x in used:
            found[x] = (found.get(x, (at, at))[0], at)
    return found


def place(sizes: Mapping[Key, int], lives: Mapping[Key, Life], reuse: bool = True) -> tuple[dict[Key, int], int]:
    """The offset of each, in the order in which they are given, and the bytes of all."""
    placed: list[tuple[int, int, Life]] = []  # (begin, end, life)
    offsets: dict[Key, int] = {}
    for x, nbytes in sizes.items():
        size, (first, last) = max(ALIGN, -(-nbytes // ALIGN) * ALIGN), lives[x]
        at = 0
        for begin, end, _ in sorted(p for p in placed if not reuse or (p[2][1] >= first and last >= p[2][0])):
            if begin - at >= size:
                break
            at = max(at, end)
        placed.append((at, at + size, (first, last)))
        offsets[x] = at
    return offsets, max((end for _, end, _ in placed), default=0)


def plan_memory(items: list[Item]) -> UOp:
    calls = [_call_of(item) for item in items]
    return UOp(Ops.LINEAR, dtypes.void, tuple(calls), memory_plan(calls))


def _call_of(item: Item) -> UOp:
    call = UOp(Ops.CALL, dtypes.void, (item.what, *item.args))
    LINE[call] = item.line  # (the same call of an older schedule may be of another line)
    return call


def _used(calls: list[UOp]) -> list[list[UOp]]:
    """The buffers that each call needs, those in flight among them."""
    used = [[a.src[0] if a.op is Ops.VIEW else a for a in call.src[1:]] for call in calls]
    collectives = [i for i, call in enumerate(calls) if leaves_the_worker(call.src[0])]
    touched = [set(u) for u in used]
    for i in collectives:  # (parts of one memory travel side by side)
        touched[i] = set(calls[i].src[1:])
    for at in collectives:
        count = len(calls[at].src[0].arg.members.mine)
        results = {*used[at][:count], *calls[at].src[1 : 1 + count]}
        ready = next((i for i in range(at + 1, len(calls)) if not results.isdisjoint(touched[i])), len(calls))
        used[ready - 1] = used[ready - 1] + used[at]
    return used


def memory_plan(calls: list[UOp], reuse: bool = True) -> MemoryPlan:
    lives = lives_of([[b for b in used if is_temporary(b)] for used in _used(calls)])
    largest_first = sorted(lives, key=lambda b: (-nbytes_of(b), -b.arg.uid))
    devices = list(dict.fromkeys(b.arg.device for b in largest_first))
    plans = [place({b: nbytes_of(b) for b in largest_first if b.arg.device == d}, lives, reuse) for d in devices]
    buffers = (
        PlacedBuffer(b.arg.uid, i, at, nbytes_of(b)) for i, (found, _) in enumerate(plans) for b, at in found.items()
    )
    return MemoryPlan(tuple(MemoryPool(d, total) for d, (_, total) in zip(devices, plans)), tuple(sorted(buffers)))
