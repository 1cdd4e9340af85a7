"""Which rank writes which part of a logical tensor: each element once, and about as many bytes on each rank.

cut over devices                     each device's part, by its worker
copies, of 1 MiB and more            rows divided among the workers that have one
copies of less                       whole, by the worker that has the least to write so far
on one device of a named worker      whole, by that worker
of each worker's own (DiLoCo)        whole, by each: the rows of a tensor that has a row for each worker
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from manygrad.tensor.uop import even_bounds

DIVIDED_NBYTES = 1 << 20

Bounds = tuple[tuple[int, int], ...]


class TensorPart(NamedTuple):
    """Elements [a, b) of each dim, that rank `owner` writes."""

    box: Bounds
    owner: int


class TensorLayout(NamedTuple):
    """How a tensor lies: on the workers `ranks`, one for each device, cut at `bounds` of dim `axis` (None: copies)."""

    shape: tuple[int, ...]
    itemsize: int
    ranks: tuple[int, ...]
    axis: int | None = None
    bounds: tuple[int, ...] = ()

    def box(self, i: int) -> Bounds:
        """What device i has of it."""
        whole = tuple((0, d) for d in self.shape)
        if self.axis is None:
            return whole
        return (*whole[: self.axis], (self.bounds[i], self.bounds[i + 1]), *whole[self.axis + 1 :])


def divide(tensors: Sequence[TensorLayout]) -> list[list[TensorPart]]:
    """The parts of each tensor; the same on every rank that is given the same."""
    written: dict[int, int] = {}
    out = []
    for t in tensors:
        parts = [p for p in _parts(t, written) if all(a < b for a, b in p.box)]
        for p in parts:
            written[p.owner] = written.get(p.owner, 0) + size(p.box) * t.itemsize
        out.append(parts)
    return out


def _parts(t: TensorLayout, written: dict[int, int]) -> list[TensorPart]:
    if t.axis is not None:
        return [TensorPart(t.box(i), rank) for i, rank in enumerate(t.ranks)]
    ranks = sorted(set(t.ranks))
    whole = t.box(0)
    if t.shape and t.shape[0] >= len(ranks) > 1 and size(whole) * t.itemsize >= DIVIDED_NBYTES:
        cuts = pairwise(even_bounds(t.shape[0], len(ranks)))
        return [TensorPart((rows, *whole[1:]), rank) for rows, rank in zip(cuts, ranks)]
    return [TensorPart(whole, min(ranks, key=lambda r: (written.get(r, 0), r)))]


def size(box: Bounds) -> int:
    return prod(b - a for a, b in box)


def common(x: Bounds, y: Bounds) -> Bounds | None:
    """What two boxes have in common; None: nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(x, y))
    return both if all(a < b for a, b in both) else None


def within(box: Bounds, outer: Bounds) -> tuple[slice, ...]:
    """Where `box` lies in an array that is `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer))
