"""A rule: how the sources of an op must lie, how its result then lies, and what the op is on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from manygrad.multi.placement import Placement
from manygrad.tensor.uop import UOp

Answer = tuple[Sequence[Placement], Placement]


class LocalPart(NamedTuple):
    """Device `i` of `devices`, in a node whose sources lie as `wants` and whose result as `result`."""

    i: int
    devices: int
    wants: Sequence[Placement]
    result: Placement


def same(u: UOp, src: tuple[UOp, ...], part: LocalPart) -> UOp:
    """The op itself, on the sources' parts."""
    return u.replace(src=src)


class ShardingRule(NamedTuple):
    """`place(u, placements of its sources)`: the placement wanted of each source, and that of the result. `lower(u,
    parts of its sources, part)`: the node of one device."""

    place: Callable[[UOp, list[Placement]], Answer]
    lower: Callable[[UOp, tuple[UOp, ...], LocalPart], UOp] = same
