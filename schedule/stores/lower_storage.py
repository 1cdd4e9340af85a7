"""lower_storage: CAT, SCATTER, COPY, collectives and outputs as explicit effects on buffers.

Precondition: simplified per-device graph. Postcondition: no CAT, SCATTER, COPY or collective is left as a value; what
several kernels build together, and what is copied or communicated, stands as AFTER(buffer, STORE or CALL, ...).

    CAT(a, b)                ==>  t = BUFFER; AFTER(t, STORE(t[:n], a), STORE(t[n:], b))
    SCATTER(base, v, i) add  ==>  t1 = AFTER(t, STORE(t, base)); AFTER(t1, STORE(GATHER(t1, i), v, "add"))
    STORE(x, SCATTER(x, v, i) add)  ==>  STORE(GATHER(x, i), v, "add")
                                         ("set" likewise, which is written in order; "place" without an arg)
    COPY(x, d)               ==>  AFTER(t, CALL(COPY d, t, CONTIGUOUS(x)))
    STORE(t, COPY(x, DISK))  ==>  CALL(COPY DISK, t, CONTIGUOUS(x))

A value that is itself an output is written straight into the output's buffer; a constant into each one that is to hold
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from manygrad.multi.local import local_name
from manygrad.schedule.facts.buffers import Temps, base_buffer, device_of, in_memory, unmoved
from manygrad.schedule.facts.index import contiguous_offset
from manygrad.schedule.facts.join import store_part
from manygrad.schedule.graph.simplify import constant
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import GroupOp, Ops, UOp, ViewArg
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, rewrite_once
from manygrad.tensor.uop.shape import is_buffer
from manygrad.tensor.uop.track import made_from


def fresh_targets(sink: UOp, order: list[UOp]) -> dict[UOp, UOp]:
    """value -> buffer, for outputs whose buffer nobody reads: the value can be built right there; so can what a
    CONTIGUOUS value is made of part by part.

    Not for a value that is memory already, or a view of it: others read and write it where it is.
    """
    read: set[UOp] = set()
    for u in order:
        sources = u.src[1:] if u.op is Ops.STORE else u.src
        read.update(s for s in sources if is_buffer(s))
    out: dict[UOp, UOp] = {}
    for s in sink.src:
        if (
            s.op is Ops.STORE
            and is_buffer(s.src[0])
            and s.src[0] not in read
            and s.src[1] not in out
            and constant(s.src[1]) is None
            and not in_memory(unmoved(s.src[1]))
        ):
            out[s.src[1]] = s.src[0]
    for value, buffer in list(out.items()):
        if value.op is Ops.CONTIGUOUS and value.src[0].op in LOWER:
            out.setdefault(value.src[0], buffer)
    return out


def _unreshaped(u: UOp) -> UOp:
    while u.op is Ops.RESHAPE:
        u = u.src[0]
    return u


def received_into(fresh: dict[UOp, UOp]) -> dict[UOp, UOp]:
    """MSELECT of a collective -> the output's buffer that it, or a reshape of it, is stored in."""
    out: dict[UOp, UOp] = {}
    for value, buffer in fresh.items():
        value = _unreshaped(value)
        if value.op is Ops.MSELECT and value.src[0].op in GroupOp.COLLECTIVE:
            out.setdefault(value, buffer)
    return out


class _Storage(NamedTuple):
    sink: UOp
    temps: Temps
    fresh: dict[UOp, UOp]
    received: dict[UOp, UOp]


def lower_storage(sink: UOp, temps: Temps) -> UOp:
    fresh = fresh_targets(sink, sink.toposort())
    return rewrite_once(sink, _OUTPUTS, _Storage(sink, temps, fresh, received_into(fresh)))


def _output(u: UOp, old: UOp, done: Mapping[UOp, UOp], ctx: _Storage) -> UOp:
    """The node as effects; of an output, in the output's buffer."""
    node = _RULES.rewrite(u, {"ctx": ctx, "old": old, "done": done}) or u
    target = ctx.fresh.get(old)
    if target is not None and base_buffer(node) is not target:
        value = node.src[0] if node.op is Ops.CONTIGUOUS else node
        made = base_buffer(value) is target
        node = value if made else UOp(Ops.AFTER, old.dtype, (target, _store(target, value)))
    if old.op in LOWER or old.op in GroupOp.COLLECTIVE or target is not None:
        made_from(node, old)
    return node


def _lower_value(u: UOp, old: UOp, ctx: _Storage) -> UOp:
    device = old.arg if old.op is Ops.COPY else device_of(old, ctx.sink)
    return LOWER[old.op](old, u.src, ctx.fresh.get(old) or ctx.temps.new(old.shape, old.dtype, device))


def _select(u: UOp) -> UOp | None:
    return u.src[0].src[u.arg] if u.src[0].op is Ops.MSTACK else None


def _lower_store(u: UOp, old: UOp, done: Mapping[UOp, UOp], ctx: _Storage) -> UOp | None:
    """STORE of a value that is scattered into its target, built in it, or copied into a file."""
    target, value = old.src
    if value.op is Ops.SCATTER and value.src[0] is target:
        return _store_in_place(old, done)
    if ctx.fresh.get(value) is target:
        return _unreshaped(u.src[1])
    if value.op is Ops.COPY and _is_file(value):
        return _copied_into_file(u, value, done[value.src[0]])
    return None


def _lower_cat(u: UOp, src: tuple[UOp, ...], target: UOp) -> UOp:
    at = 0
    stores = []
    for s in src:
        n = s.shape[u.arg]
        part = tuple((at, at + n) if i == u.arg else (0, d) for i, d in enumerate(u.shape))
        stores.append(store_part(UOp(Ops.SHRINK, u.dtype, (target,), part), s))
        at += n
    return UOp(Ops.AFTER, u.dtype, (target, *stores))


def _lower_scatter(u: UOp, src: tuple[UOp, ...], target: UOp) -> UOp:
    start = UOp(Ops.AFTER, u.dtype, (target, _store(target, src[0])))
    place = UOp(Ops.GATHER, u.dtype, (start, *src[2:]))
    return UOp(Ops.AFTER, u.dtype, (start, UOp(Ops.STORE, dtypes.void, (place, src[1]), _how(u))))


def _store_in_place(u: UOp, done: Mapping[UOp, UOp]) -> UOp:
    """STORE(x, SCATTER(x, v, i)): only what the indices name is written, x is not copied."""
    target, value, *indices = (done[s] for s in u.src[1].src)
    place = UOp(Ops.GATHER, u.src[1].dtype, (target, *indices))
    return inherit(UOp(Ops.STORE, dtypes.void, (place, value), _how(u.src[1])), u)


def _how(scatter: UOp) -> str | None:
    """The arg of the STORE of a SCATTER."""
    return None if scatter.arg == "place" else scatter.arg


def _lower_copy(u: UOp, src: tuple[UOp, ...], target: UOp) -> UOp:
    if src[0].device is None:  # a constant is computed where it is wanted
        return _stored_on(src[0], target)
    call = UOp(Ops.CALL, dtypes.void, (UOp(Ops.COPY, u.dtype, (), u.arg), target, _readable(src[0])))
    return UOp(Ops.AFTER, u.dtype, (target, inherit(call, u)))


def _is_file(copy: UOp) -> bool:
    return isinstance(copy.arg, str) and copy.arg.startswith("DISK")


def _copied_into_file(store: UOp, copy: UOp, value: UOp) -> UOp:
    """A copy of `value` that is stored on DISK goes where it belongs, if that is one piece: no kernel could bring it
    there."""
    target = _readable(store.src[0])
    if target.op is Ops.CONTIGUOUS:
        return store
    return inherit(UOp(Ops.CALL, dtypes.void, (copy.replace(src=()), target, _readable(value))), store)


def _readable(u: UOp) -> UOp:
    """`u` as an argument of a CALL: memory as it is, a contiguous part of memory as a VIEW, anything else stored
    first."""
    value = u.src[0] if u.op is Ops.CONTIGUOUS else u
    if in_memory(value):
        return value
    base = unmoved(value)
    if (
        in_memory(base)
        and is_buffer(base_buffer(base))
        and all(isinstance(d, int) and d for d in (*value.shape, *base.shape))
    ):
        offset = contiguous_offset(value, base)
        if offset is not None:
            return UOp(Ops.VIEW, u.dtype, (base,), ViewArg(offset, value.shape))
    return UOp(Ops.CONTIGUOUS, u.dtype, (value,))


def _lower_collective(u: UOp, old: UOp, ctx: _Storage) -> UOp:
    """One CALL for all of this worker's devices: (what, *results, *inputs); an MSTACK of the flat results.

    A result that is itself an output is received straight into the output's buffer.
    """
    stack, members = u.src[0], u.arg.members
    outs, own = [], []
    for k, (x, n, i) in enumerate(zip(stack.src, members.counts, members.mine)):
        device = x.device or local_name(members.devices[i])  # (a part that turned out to be constant has none)
        target = ctx.received.get(UOp(Ops.MSELECT, u.dtype, (old,), k))
        outs.append(ctx.temps.new((n,), u.dtype, device) if target is None else target)
        own.append(_readable(x) if x.device is not None else _stored_on(x, ctx.temps.new(x.shape, x.dtype, device)))
    call = UOp(Ops.CALL, dtypes.void, (UOp(u.op, u.dtype, (), u.arg), *outs, *own))
    inherit(call, old)
    values = [UOp(Ops.AFTER, u.dtype, (o, call)) for o in outs]
    return UOp(
        Ops.MSTACK,
        u.dtype,
        tuple(
            v if len(v.shape) == 1 else UOp(Ops.RESHAPE, u.dtype, (v,), (n,)) for v, n in zip(values, members.counts)
        ),
    )


def _stored_on(value: UOp, target: UOp) -> UOp:
    return UOp(Ops.AFTER, value.dtype, (target, _store(target, value.src[0] if value.op is Ops.CONTIGUOUS else value)))


def _store(target: UOp, value: UOp) -> UOp:
    return inherit(UOp(Ops.STORE, dtypes.void, (target, value)), value)


LOWER = {Ops.CAT: _lower_cat, Ops.SCATTER: _lower_scatter, Ops.COPY: _lower_copy}
_RULES = PatternMatcher(
    [
        (UPat(LOWER, "u"), _lower_value),
        (UPat(GroupOp.COLLECTIVE, "u"), _lower_collective),
        (UPat(Ops.MSELECT, "u"), _select),
        (UPat(Ops.STORE, "u"), _lower_store),
    ]
)
_OUTPUTS = PatternMatcher([(UPat(name="u"), _output)])
