"""Where the tensors of a capture lie: their buffers, whose memory these are a part of, and at which addresses."""

from __future__ import annotations

from collections.abc import Iterable

from manygrad.runtime.buffer import Buffer
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops


def whole(b: Buffer) -> Buffer:
    """The buffer that `b` is a view of, or `b`."""
    return b if b.base is None else b.base


def address(b: Buffer) -> int:
    """Its address in host memory, 0 where it has none."""
    return getattr(b.handle, "address", 0) or 0


def stored(t: Tensor) -> Tensor:
    """`t` computed, as a whole buffer: itself, or a copy of a view."""
    if t.uop.op is not Ops.BUFFER:
        t.realize()
    return t if t.uop.op is Ops.BUFFER else t.clone().realize()


def united(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same addresses as disjoint intervals, ascending."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
