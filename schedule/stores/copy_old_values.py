"""copy_old_values: what is read of a buffer's older value is read from a copy, so that no assignment waits for a
reader.

Precondition: storage lowered. Postcondition: an older value is read where it lies by the STORE that overwrites it
alone.

    STORE(a, b); STORE(b, a)                             (each would have to run before the other)
    ==>  s = AFTER(t, STORE(t, a)); r = AFTER(t', STORE(t', b)); STORE(a, r); STORE(b, s)

Nearly all programs have an order without copies, so the pass does something only in a schedule for which `order_items`
has found none.
"""

from __future__ import annotations

from manygrad.schedule.facts.buffers import Temps, base_buffer, happened, in_memory
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import with_sources
from manygrad.tensor.uop.shape import is_buffer


def copy_old_values(sink: UOp, temps: Temps) -> UOp:
    order = sink.toposort()
    old = _old_values(order)
    memory: dict[UOp, UOp] = {}  # a value in memory -> the same, the effects before it rebuilt
    copies: dict[UOp, UOp] = {}
    done: dict[UOp, UOp] = {}

    def lying(u: UOp) -> UOp:
        """`u`, memory or a view of it, where it lies."""
        return memory[u] if in_memory(u) else with_sources(u, (lying(u.src[0]), *(reading(s) for s in u.src[1:])))

    def reading(u: UOp) -> UOp:
        if u not in old:
            return done[u]
        if u not in copies:
            copy = temps.new(u.shape, u.dtype, base_buffer(u).device)
            copies[u] = UOp(Ops.AFTER, u.dtype, (copy, inherit(UOp(Ops.STORE, dtypes.void, (copy, memory[u])), u)))
        return copies[u]

    def stored(value: UOp, over: UOp) -> UOp:
        """`value`, which reads `over` where it lies: it is that which is overwritten."""
        found: dict[UOp, UOp] = {}
        for u in value.toposort(lambda u: not in_memory(u)):
            found[u] = (
                lying(u)
                if u is over
                else reading(u)
                if in_memory(u)
                else with_sources(u, tuple(found[s] for s in u.src))
            )
        return found[value]

    for u in order:
        if in_memory(u):
            memory[u] = done[u] = (
                u if is_buffer(u) else with_sources(u, (lying(u.src[0]), *(done[e] for e in u.src[1:])))
            )
        elif u.op is Ops.STORE:
            done[u] = with_sources(u, (lying(u.src[0]), stored(u.src[1], _memory_below(u.src[0]))))
        elif u.op is Ops.CALL:
            outs = 1 if u.src[0].op is Ops.COPY else (len(u.src) - 1) // 2
            done[u] = with_sources(
                u, (u.src[0], *(lying(s) if i < outs else reading(s) for i, s in enumerate(u.src[1:])))
            )
        else:
            done[u] = with_sources(u, tuple(reading(s) for s in u.src))
    return done[sink]


def _old_values(order: list[UOp]) -> set[UOp]:
    """The memory of which the graph writes a later value, too."""
    writers: dict[UOp, set[UOp]] = {}
    for u in order:
        if u.op is Ops.AFTER:
            writers.setdefault(base_buffer(u), set()).update(u.src[1:])
        elif u.op is Ops.STORE:
            writers.setdefault(base_buffer(u.src[0]), set()).add(u)
    return {u for u in order if in_memory(u) and writers.get(base_buffer(u), set()) - happened(u)}


def _memory_below(u: UOp) -> UOp:
    while not in_memory(u):
        u = u.src[0]
    return u
