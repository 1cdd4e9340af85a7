"""Sharding rules: for each op, how its sources must lie and how its result then lies.

A rule's `place` says where the parts must lie, its `lower` what one device does. A source that lies otherwise is
resharded by `multi.reshard`. What cannot stay cut is gathered first; that is always right, only slower.
"""

from __future__ import annotations

from manygrad.multi.placement import REPLICATE, Partial, Placement, Replicate, Shard
from manygrad.multi.rules.elementwise import beside, elementwise, keep, unmarked, wire
from manygrad.multi.rules.indexing import gather, local_gather, local_scatter, scatter
from manygrad.multi.rules.movement import cat, expand, flip, local_shape, local_shrink, pad_or_shrink, permute, reshape
from manygrad.multi.rules.reduce import finish, local_reduce, reduce
from manygrad.multi.rules.rule import Answer, ShardingRule
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.table import inferred, memo

RULES: dict[Ops, ShardingRule] = {
    **dict.fromkeys(GroupOp.ELEMENTWISE, ShardingRule(elementwise)),
    Ops.RESHAPE: ShardingRule(reshape, local_shape),
    Ops.PERMUTE: ShardingRule(permute),
    Ops.EXPAND: ShardingRule(expand, local_shape),
    Ops.PAD: ShardingRule(pad_or_shrink),
    Ops.SHRINK: ShardingRule(pad_or_shrink, local_shrink),
    Ops.FLIP: ShardingRule(flip),
    Ops.REDUCE: ShardingRule(reduce, local_reduce),
    Ops.GATHER: ShardingRule(gather, local_gather),
    Ops.SCATTER: ShardingRule(scatter, local_scatter),
    Ops.CAT: ShardingRule(cat),
    Ops.CONTIGUOUS: ShardingRule(keep),
    Ops.DETACH: ShardingRule(keep),
    Ops.WIRE: ShardingRule(wire, unmarked),
    Ops.FINISH: ShardingRule(finish),
    Ops.BARRIER: ShardingRule(beside),
    Ops.CHECK: ShardingRule(beside),
}


@inferred
def placement(u: UOp) -> Placement:
    """How a node on several devices lies; Replicate for nodes on one device."""
    if not isinstance(u.device, tuple) or u.op in (Ops.STORE, Ops.SINK, Ops.FUNCTION):
        return REPLICATE
    if u.op in (Ops.BUFFER, Ops.PARAM):
        return REPLICATE if u.arg.axis is None else Shard.of(u.arg.axis, u.arg.bounds)
    if u.op is Ops.SHARD:
        axis, bounds = u.arg.axis, u.arg.bounds
        if axis is None or bounds:
            return REPLICATE if axis is None else Shard.of(axis, bounds)
        return Shard.even(axis, u.src[0].shape[axis], len(u.arg.devices))
    if u.op is Ops.RESULT:
        return settled(placement(u.src[0].arg.src[u.arg]))
    if u.op in (Ops.AFTER, Ops.CUSTOM):
        return placement[u.src[0]]
    return answer(u)[1]


@memo
def answer(u: UOp) -> Answer:
    """Result of the placement rule for a multi-device node."""
    found: Answer = RULES[u.op].place(u, [placement(s) for s in u.src])
    return found


def settled(p: Placement) -> Shard | Replicate:
    """How a value is stored: a pending sum is carried out."""
    return REPLICATE if isinstance(p, Partial) else p


def store_spec(u: UOp) -> tuple[int | None, tuple[int, ...]]:
    """(axis, bounds) of the buffer that will hold `u`."""
    p = settled(placement(u))
    return (p.axis, p.bounds) if isinstance(p, Shard) else (None, ())
