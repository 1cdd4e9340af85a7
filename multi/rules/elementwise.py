"""Elementwise ops, and what leaves a value as it is: markers, orders and checks."""

from __future__ import annotations

from manygrad.multi.placement import REPLICATE, Partial, Placement, Shard
from manygrad.multi.rules.rule import Answer, LocalPart
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import numel


def elementwise(u: UOp, ps: list[Placement]) -> Answer:
    """All sources cut like the largest cut one."""
    first = ps[0]
    if isinstance(first, Shard) and ps.count(first) == len(ps) and all(s.shape for s in u.src):
        return [first] * len(ps), first
    if u.op in (Ops.NEG,) and isinstance(ps[0], Partial) and ps[0].op is Ops.ADD:
        return ps, ps[0]
    if u.op is Ops.ADD and all(p == Partial(Ops.ADD) for p in ps):
        return ps, ps[0]
    cut = [(numel(s.shape), -i, p) for i, (s, p) in enumerate(zip(u.src, ps)) if isinstance(p, Shard)]
    if not cut:
        return [REPLICATE] * len(ps), REPLICATE
    out = max(cut, key=lambda c: c[:2])[2]
    return [out if s.shape else REPLICATE for s in u.src], out


def wire(u: UOp, ps: list[Placement]) -> Answer:
    """As the source; a sum that is due is said how to travel."""
    p = ps[0]
    return ps, Partial(p.op, u.arg) if isinstance(p, Partial) and p.op is Ops.ADD else p


def unmarked(u: UOp, src: tuple[UOp, ...], part: LocalPart) -> UOp:
    """The marker's source: how a sum travels is known from its placement."""
    return src[0]


def keep(u: UOp, ps: list[Placement]) -> Answer:
    """As the source; a sum that is due is carried out."""
    p = ps[0]
    return ([REPLICATE], REPLICATE) if isinstance(p, Partial) else ([p], p)


def beside(u: UOp, ps: list[Placement]) -> Answer:
    """The value is the first source's; the second one stays as it lies."""
    (kept,), out = keep(u, ps)
    return [kept, ps[1]], out
