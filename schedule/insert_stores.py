"""insert_stores: the values that fusion decides to store get buffers of their own.

Precondition: storage lowered. Postcondition: each STORE is one kernel, of memory and numbers; no CONTIGUOUS or BARRIER
is left.

    v, of which a rule of `fusion.py` says so  ==>  AFTER(t, STORE(t, v)), t = BUFFER
    BARRIER(x, y)                              ==>  AFTER(x, what y waits for)
"""

from __future__ import annotations

from manygrad.schedule.buffers import Temps, base_buffer, device_of, is_temporary
from manygrad.schedule.fusion import decide_stores, explain
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import DEBUG
from manygrad.tensor.source import LINE, line_of
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import with_sources
from manygrad.tensor.uop.track import made_from


def insert_stores(sink: UOp, temps: Temps) -> UOp:
    order = sink.toposort()
    stored = decide_stores(order)
    if DEBUG >= 4 and stored:
        print(explain(stored))
    done: dict[UOp, UOp] = {}
    for u in order:
        src = tuple([done[s] for s in u.src])
        node = u if src == u.src else with_sources(u, src)
        if u.op is Ops.BARRIER:
            effects = effects_below(src[1])
            node = UOp(Ops.AFTER, u.dtype, (src[0], *effects)) if effects else src[0]
        if u in stored:
            value = node.src[0] if node.op is Ops.CONTIGUOUS else node
            if not (node.op is Ops.CONTIGUOUS and value.op is Ops.AFTER and is_temporary(base_buffer(value))):
                temp = temps.new(u.shape, u.dtype, device_of(u, sink))
                store = UOp(Ops.STORE, dtypes.void, (temp, value))
                LINE.setdefault(store, line_of(u))
                node = UOp(Ops.AFTER, u.dtype, (temp, store))
            else:
                node = value
            made_from(node, u)
        done[u] = node
    return done[sink]


def effects_below(u: UOp) -> list[UOp]:
    """What must have happened before an expression over stored values can be computed."""
    return list(
        dict.fromkeys(e for x in u.toposort(lambda x: x.op is not Ops.AFTER) if x.op is Ops.AFTER for e in x.src[1:])
    )
