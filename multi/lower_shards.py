"""lower_shards: from values on several devices to per-device values, MSTACK/MSELECT and explicit collectives.

Precondition: the user's graph; a sharded op is one node whatever the device count. Postcondition: no node's device is a
tuple, except MSTACK, collectives and the buffers under MSELECT; only this worker's devices are left.

    REDUCE(ADD, x cut along 0 over (CPU:0, CPU:1))  ==>
    s = ALLREDUCE(MSTACK(REDUCE(ADD, x0), REDUCE(ADD, x1)));  MSELECT(s, 0), MSELECT(s, 1)

Shapes: a value of global shape S cut on dim a has, on device i, S with dim a of bounds[i+1] - bounds[i].
"""

from __future__ import annotations

from collections.abc import Callable

from manygrad.multi.local import local_name, on
from manygrad.multi.placement import REPLICATE, Partial, Shard
from manygrad.multi.reshard import ELSEWHERE, Local, Resharding
from manygrad.multi.rules import RULES, answer, placement, settled
from manygrad.multi.rules.rule import LocalPart
from manygrad.multi.small_first import early_first, small_first
from manygrad.multi.world import World
from manygrad.tensor.source import inherit, line_of
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.rewrite import with_sources


def lower_shards(sink: UOp, me: World) -> UOp:
    """The pass; `me` says which devices are this worker's."""
    order = early_first(sink)
    if not any(
        isinstance(u.device, tuple) or (isinstance(u.device, str) and "@" in u.device)
        for u in order
        if u.op in (Ops.BUFFER, Ops.PARAM, Ops.SHARD, Ops.COPY)
    ):
        return sink
    low = Resharding(me)
    for u in small_first(order):
        if u.op is Ops.SINK:
            own = [x for s in u.src for x in (low.loc[s] if s in low.loc else (low.one[s],))]
            low.one[u] = u.replace(src=tuple(x for x in own if x is not ELSEWHERE) + tuple(low.shared))
        elif isinstance((u.src[0] if u.op is Ops.STORE else u).device, tuple):
            low.loc[u] = LOWER.get(u.op, _by_rule)(u, low)
        else:
            low.one[u] = _single(u, low)
    return low.one[sink]


def _by_rule(u: UOp, low: Resharding) -> Local:
    """The op on each device's parts, which are resharded as its rule wants them."""
    devices, (wants, result), lower = u.device, answer(u), RULES[u.op].lower
    assert isinstance(devices, tuple)
    parts = [low.at(s, devices, placement(s), want) for s, want in zip(u.src, wants)]
    return tuple(
        inherit(lower(u, tuple(p[k] for p in parts), LocalPart(i, len(devices), wants, result)), u)
        for k, i in enumerate(low.mine(devices))
    )


def _store(u: UOp, low: Resharding) -> Local:
    """Into each device's part of the target, of which cut dims stay whole."""
    target, value = u.src
    assert isinstance(target.device, tuple)
    want, base = settled(placement(target)), target
    while base.op in GroupOp.MOVEMENT or base.op is Ops.AFTER:
        base = base.src[0]
    cut = placement(base)
    if isinstance(cut, Shard) and not isinstance(want, Shard):
        raise ValueError(
            f"assignment into a part of dim {cut.axis}, along which the tensor of shape {base.shape} is cut "
            f"over {len(target.device)} devices ({line_of(u)}); assign whole rows of it with t[...] = value, "
            "or bring it to one device first"
        )
    values = low.at(value, target.device, placement(value), want)
    return tuple(inherit(UOp(Ops.STORE, u.dtype, (t, v), u.arg), u) for t, v in zip(low.loc[target], values))


def _buffer(u: UOp, low: Resharding) -> Local:
    return tuple(UOp(Ops.MSELECT, u.dtype, (u,), i) for i in low.mine(u.arg.device))


def _after(u: UOp, low: Resharding) -> Local:
    effects = [low.loc[e] for e in u.src[1:]]
    return tuple(u.replace(src=(x, *(e[k] for e in effects))) for k, x in enumerate(low.loc[u.src[0]]))


def _finish(u: UOp, low: Resharding) -> Local:
    """The sum that is due, and what its collective computes of it."""
    s, finish = u.src[0], None if u.arg.value.op is Ops.PARAM else u.arg.value
    have = placement(s)
    assert isinstance(have, Partial) and isinstance(u.device, tuple)
    return low.summed(low.loc[s], have, placement(u), u.device, s, finish)


def _shard(u: UOp, low: Resharding) -> Local:
    """Each device's slice, of a value on one device or, laid out anew, on several."""
    devices, want, src = u.arg.devices, placement(u), u.src[0]
    if isinstance(src.device, str) and "@" in src.device and low.me.size > 1:
        raise ValueError(
            f"shard: the tensor lies on {src.device} only; bring it to every worker first: "
            f".to({local_name(src.device)!r}) ({line_of(u)})"
        )
    if isinstance(src.device, tuple):
        return low.at(src, devices, placement(src), want)
    x, mine = low.one[src], low.mine(devices)
    parts = low.cut(tuple(x for _ in mine), want, mine) if isinstance(want, Shard) else tuple(x for _ in mine)
    return tuple(on(part, local_name(devices[i])) for part, i in zip(parts, mine))


def _single(u: UOp, low: Resharding) -> UOp:
    """A node on one device or none: kept where the device is this worker's; a copy between workers is a collective."""
    source = u.src[0].device if u.op is Ops.COPY else None
    if isinstance(source, tuple):
        whole = low.at(u.src[0], source, placement(u.src[0]), REPLICATE)
        return inherit(on(whole[0], local_name(u.arg)), u) if low.me.is_local(u.arg) else ELSEWHERE
    if source is not None and "@" in source and "@" not in u.arg:
        return low.broadcast(u, source)
    if source is not None and "@" in source and low.me.rank_of(source) != low.me.rank_of(u.arg):
        return low.send(u, source, u.arg)
    if u.op in (Ops.BUFFER, Ops.PARAM):
        return u if low.me.is_local(u.arg.device) else ELSEWHERE
    src = tuple(low.one[s] for s in u.src)
    if ELSEWHERE in src:
        return ELSEWHERE
    node = with_sources(u, src)
    return node.replace(arg=local_name(u.arg)) if u.op is Ops.COPY else node


# what is not lowered by its placement rule alone
LOWER: dict[Ops, Callable[[UOp, Resharding], Local]] = {
    Ops.STORE: _store,
    Ops.BUFFER: _buffer,
    Ops.PARAM: _buffer,
    Ops.AFTER: _after,
    Ops.FINISH: _finish,
    Ops.SHARD: _shard,
}
