"""Movement ops and CAT: which of them leave a value cut, and their args in the sizes of one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

from manygrad.multi.local import cut_shape
from manygrad.multi.placement import REPLICATE, Partial, Placement, Shard
from manygrad.multi.rules.rule import Answer, LocalPart
from manygrad.tensor.uop import Ops, UOp


def reshape(u: UOp, ps: list[Placement]) -> Answer:
    """The cut dim may keep its size, absorb inner dims, or give some off; its elements must stay whole rows."""
    p = ps[0]
    if not isinstance(p, Shard):
        return ps, p
    found = reshaped(p.axis, p.bounds, p.origin, u.src[0].shape, u.arg)
    return ([REPLICATE], REPLICATE) if found is None else (ps, found)


@lru_cache(4096)  # layers of one kind ask for the same
def reshaped(
    axis: int, bounds: tuple[int, ...], origin: int, old: tuple[Any, ...], new: tuple[Any, ...]
) -> Shard | None:
    """How a Shard lies in the shape `new`; None where it does not."""
    before, (inner, unknown) = factors(old[:axis]), factors(old[axis + 1 :])
    for i, d in enumerate(new):
        if factors(new[:i]) == before and not (isinstance(d, int) and d == 1 and old[axis] != 1):
            rest, same = factors(new[i + 1 :])
            cuts = scaled(bounds, inner, rest) if rest and same == unknown else None
            if cuts and isinstance(d, int) and cuts[-1] == d:
                return Shard(i, cuts, origin)
            break
    return None


def factors(dims: Sequence[Any]) -> tuple[int, tuple[UOp, ...]]:
    """Factors of the product of dims: a number, and the symbolic ones, in one order."""
    return prod(d for d in dims if isinstance(d, int)), tuple(
        sorted((d for d in dims if not isinstance(d, int)), key=lambda d: d.key)
    )


def scaled(bounds: tuple[int, ...], factor: int, divisor: int) -> tuple[int, ...] | None:
    """bounds * factor / divisor, where all of them divide."""
    if any(b * factor % divisor for b in bounds):
        return None
    return tuple(b * factor // divisor for b in bounds)


def permute(u: UOp, ps: list[Placement]) -> Answer:
    """Cut along the same dim, at its new place."""
    p = ps[0]
    return (ps, Shard(u.arg.index(p.axis), p.bounds, p.origin)) if isinstance(p, Shard) else (ps, p)


def expand(u: UOp, ps: list[Placement]) -> Answer:
    """Cut as the source, unless the cut dim is the one that is expanded: then each device holds all of it."""
    p = ps[0]
    if isinstance(p, Shard) and u.src[0].shape[p.axis] == u.arg[p.axis]:
        return ps, p
    return [REPLICATE], REPLICATE


def local_shape(u: UOp, src: tuple[UOp, ...], part: LocalPart) -> UOp:
    """RESHAPE or EXPAND to the shape of the device's part."""
    shape = cut_shape(u.arg, part.result, part.i) if isinstance(part.result, Shard) else u.arg
    return UOp(u.op, u.dtype, src, shape)


def pad_or_shrink(u: UOp, ps: list[Placement]) -> Answer:
    """Cut as the source, unless the cut dim is the one that is padded or shrunk: then it is gathered first."""
    p = ps[0]
    if isinstance(p, Shard):
        whole = (0, u.src[0].shape[p.axis]) if u.op is Ops.SHRINK else (0, 0)
        if tuple(u.arg[p.axis]) == whole:
            return ps, p
    return [REPLICATE], REPLICATE


def local_shrink(u: UOp, src: tuple[UOp, ...], part: LocalPart) -> UOp:
    """SHRINK of other dims than the cut one, of which the device's part stays whole."""
    p = part.result
    if not isinstance(p, Shard):
        return u.replace(src=src)
    whole = (0, p.bounds[part.i + 1] - p.bounds[part.i])
    return u.replace(src=src, arg=(*u.arg[: p.axis], whole, *u.arg[p.axis + 1 :]))


def flip(u: UOp, ps: list[Placement]) -> Answer:
    """Cut as the source, unless the cut dim is the one that is flipped: then it is gathered first."""
    p = ps[0]
    return (ps, p) if isinstance(p, Shard) and not u.arg[p.axis] else ([REPLICATE], REPLICATE)


def cat(u: UOp, ps: list[Placement]) -> Answer:
    """Cut along another dim than the one along which values are joined; terms of one kind stay terms."""
    if all(isinstance(p, Partial) and p == ps[0] for p in ps):
        return ps, ps[0]
    cut = next((p for p in ps if isinstance(p, Shard) and p.axis != u.arg), None)
    return ([cut] * len(ps), cut) if cut is not None else ([REPLICATE] * len(ps), REPLICATE)
