"""plan_memory: the temporary buffers of a LINEAR share one block a device.

Two buffers may overlap when no call needs both. Offsets are chosen largest-first into the lowest gap that is free over the
buffer's life. Buffers from outside (PARAMs) are never reused.
"""

from __future__ import annotations

from dataclasses import dataclass

from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.serial import register
from manygrad.tensor.uop.shape import numel

ALIGN = 64


@register
@dataclass(frozen=True)
class MemoryPlan:
    """`pools`: (device, nbytes) per block; `offsets`: (uid, pool number, offset, nbytes) per temporary buffer."""

    pools: tuple[tuple[str, int], ...]
    offsets: tuple[tuple[int, int, int, int], ...]


def nbytes_of(buffer: UOp) -> int:
    return numel(buffer.arg.shape) * buffer.dtype.itemsize


def is_temporary(buffer: UOp) -> bool:
    return buffer.op is Ops.BUFFER and buffer.arg.uid < 0


def plan_memory(calls: list[UOp], reuse: bool = True) -> MemoryPlan:
    lives: dict[UOp, list[int]] = {}
    for at, call in enumerate(calls):
        for b in (a.src[0] if a.op is Ops.VIEW else a for a in call.src[1:]):
            if is_temporary(b):
                lives.setdefault(b, [at, at])[1] = at
    pools: dict[str, int] = {}
    numbers: dict[str, int] = {}
    placed: dict[str, list[tuple[int, int, int, int]]] = {}  # per device: (begin, end, first, last)
    offsets = []
    for b, (first, last) in sorted(lives.items(), key=lambda p: (-nbytes_of(p[0]), -p[0].arg.uid)):
        device = b.arg.device
        size = max(ALIGN, -(-nbytes_of(b) // ALIGN) * ALIGN)
        mine = placed.setdefault(device, [])
        meet = sorted((x for x in mine if not reuse or not (x[3] < first or last < x[2])), key=lambda x: x[0])
        at = 0
        for begin, end, _, _ in meet:
            if begin - at >= size:
                break
            at = max(at, end)
        mine.append((at, at + size, first, last))
        pools[device] = max(pools.get(device, 0), at + size)
        offsets.append((b.arg.uid, numbers.setdefault(device, len(numbers)), at, nbytes_of(b)))
    return MemoryPlan(tuple((d, pools[d]) for d in numbers), tuple(sorted(offsets)))
