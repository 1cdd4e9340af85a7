"""split_kernels: every STORE becomes an item of its own, every CALL one call.

Precondition: stores decided. Postcondition: `Item`s, in graph order; those of kernels call their STORE, which
`rangeify` turns into loops and arguments.
"""

from __future__ import annotations

from manygrad.schedule.facts.buffers import base_buffer, happened
from manygrad.schedule.facts.items import Item
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import numel


def split_kernels(sink: UOp) -> list[Item]:
    items: list[Item] = []
    for u in sink.toposort():
        if u.op is Ops.STORE:
            if numel(u.src[1].shape):
                items.append(Item((u,), u, [], [base_buffer(u.src[0])], []))
        elif u.op is Ops.CALL:
            what, args = u.src[0], list(u.src[1:])
            n = 1 if what.op is Ops.COPY else len(args) // 2
            buffers = [base_buffer(a) for a in args]
            reads = [(base_buffer(a), happened(a)) for a in args[n:]]
            parts = [UOp(Ops.VIEW, b.dtype, (b,), a.arg) if a.op is Ops.VIEW else b for a, b in zip(args, buffers)]
            items.append(Item((u,), what, parts, buffers[:n], reads))
    return items
