"""split_kernels: every STORE becomes one kernel, every CALL one call; what each reads and writes is recorded.

Precondition: stores decided. Postcondition: `Item`s, in graph order, each with its dependencies on earlier effects.

A store whose kernel would read elements that another of its iterations overwrites goes through a temporary buffer.
"""

from __future__ import annotations

from manygrad.schedule.buffers import Temps, base_buffer, happened
from manygrad.schedule.items import Item
from manygrad.schedule.rangeify import Known, rangeify_once, writes_what_it_reads
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import numel
from manygrad.tensor.uop.track import made_from


def split_kernels(sink: UOp, temps: Temps) -> list[Item]:
    items: list[Item] = []
    known: Known = {}
    for u in sink.toposort():
        if u.op is Ops.STORE:
            if numel(u.src[1].shape):
                items += _kernel_items(u, temps, known)
        elif u.op is Ops.CALL:
            what, args = u.src[0], list(u.src[1:])
            n = 1 if what.op is Ops.COPY else len(args) // 2
            buffers = [base_buffer(a) for a in args]
            reads = [(base_buffer(a), happened(a)) for a in args[n:]]
            parts = [UOp(Ops.VIEW, b.dtype, (b,), a.arg) if a.op is Ops.VIEW else b for a, b in zip(args, buffers)]
            items.append(Item(u, what, parts, buffers[:n], reads))
    return items


def _kernel_items(store: UOp, temps: Temps, known: Known) -> list[Item]:
    ast, args, reads = rangeify_once(store, known)
    made_from(ast, store)
    if not (any(base_buffer(r) is args[0] for r in reads) and writes_what_it_reads(ast)):
        return [
            Item(store, ast, args, [args[0]], [(base_buffer(r), happened(r)) for r in reads] + _target_reads(store))
        ]
    value = store.src[1]
    temp = temps.new(value.shape, value.dtype, base_buffer(store.src[0]).device)
    first = UOp(Ops.STORE, dtypes.void, (temp, value))
    second = UOp(Ops.STORE, dtypes.void, (store.src[0], UOp(Ops.AFTER, value.dtype, (temp, first))), store.arg)
    out = _kernel_items(first, temps, known)
    ast, args, reads = rangeify_once(second, known)
    made_from(ast, store)
    out.append(Item(store, ast, args, [args[0]], [(base_buffer(r), happened(r)) for r in reads] + _target_reads(store)))
    return out


def _target_reads(store: UOp) -> list[tuple[UOp, frozenset[UOp]]]:
    """A store into an assigned buffer comes after those assignments."""
    effects = happened(store.src[0])
    return [(base_buffer(store.src[0]), effects)] if effects else []
