"""insert_stores: the values that fusion decides to store get buffers of their own.

Precondition: storage lowered. Postcondition: each STORE is one kernel, of memory and numbers; no CONTIGUOUS or BARRIER
is left.

    v, of which a rule of `fusion.py` says so  ==>  AFTER(t, STORE(t, v)), t = BUFFER
    CAST.float32(v), v of a half type          ==>  CAST.float32(AFTER(t, STORE(t, v)))
    BARRIER(x, y)                              ==>  AFTER(x, what y waits for)
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from manygrad.schedule.facts.buffers import Temps, base_buffer, device_of, is_temporary
from manygrad.schedule.stores.fusion import decide_stores, explain
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import DEBUG
from manygrad.tensor.source import LINE, line_of
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, rewrite_once
from manygrad.tensor.uop.track import made_from


def insert_stores(sink: UOp, temps: Temps) -> UOp:
    order = sink.toposort()
    stored = decide_stores(order)
    if DEBUG >= 4 and stored:
        print(explain(stored))
    return rewrite_once(sink, _RULES, _Inserting(sink, stored.keys(), temps))


class _Inserting(NamedTuple):
    sink: UOp
    stored: AbstractSet[UOp]
    temps: Temps


def _store(u: UOp, old: UOp, ctx: _Inserting) -> UOp | None:
    """A value that is to be stored, in a buffer of its own unless it lies in a temporary one."""
    if old not in ctx.stored:
        return None
    if _widens(u):  # (half the bytes, and products see what they multiply)
        narrow = u.src[0]
        if narrow.op is not Ops.AFTER or not is_temporary(base_buffer(narrow)):
            narrow = _in_memory(narrow, old.src[0], ctx)
        return UOp(Ops.CAST, u.dtype, (narrow,))
    value = u.src[0] if u.op is Ops.CONTIGUOUS else _barrier(u) if u.op is Ops.BARRIER else u
    if u.op is not Ops.CONTIGUOUS or value.op is not Ops.AFTER or not is_temporary(base_buffer(value)):
        value = _in_memory(value, old, ctx)
    made_from(value, old)
    return value


def _widens(u: UOp) -> bool:
    return u.op is Ops.CAST and u.dtype is dtypes.float32 and u.src[0].dtype.is_half


def _in_memory(value: UOp, old: UOp, ctx: _Inserting) -> UOp:
    temp = ctx.temps.new(old.shape, old.dtype, device_of(old, ctx.sink))
    store = UOp(Ops.STORE, dtypes.void, (temp, value))
    LINE.setdefault(store, line_of(old))
    return UOp(Ops.AFTER, old.dtype, (temp, store))


def _barrier(u: UOp) -> UOp:
    effects = effects_below(u.src[1])
    return UOp(Ops.AFTER, u.dtype, (u.src[0], *effects)) if effects else u.src[0]


def effects_below(u: UOp) -> list[UOp]:
    """Effects that must have happened before an expression over stored values can be computed."""
    return list(
        dict.fromkeys(e for x in u.toposort(lambda x: x.op is not Ops.AFTER) if x.op is Ops.AFTER for e in x.src[1:])
    )


_RULES = PatternMatcher([(UPat(name="u"), _store), (UPat(Ops.BARRIER, "u"), _barrier)])
