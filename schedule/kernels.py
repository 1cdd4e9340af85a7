"""split_kernels: every STORE becomes one kernel, every CALL one call; what each reads and writes is recorded.

Precondition: stores decided. Postcondition: `Item`s, in graph order, each with its dependencies on earlier effects.

A store whose kernel would read elements that another of its iterations overwrites goes through a temporary buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manygrad.schedule.desugar import Temps, base_buffer, device_of, is_buffer
from manygrad.schedule.fusion import decide_stores, explain
from manygrad.schedule.rangeify import Known, rangeify_once, writes_what_it_reads
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import DEBUG
from manygrad.tensor.source import inherit, line_of
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import numel


@dataclass
class Item:
    """One CALL in the making. `reads` are (buffer, effects that must have happened); `writes` its buffers."""

    effect: UOp
    what: UOp
    args: list[UOp]
    writes: list[UOp]
    reads: list[tuple[UOp, frozenset[UOp]]]
    after: set[int] = field(default_factory=set)

    @property
    def line(self) -> str:
        return line_of(self.effect)

    @property
    def is_comm(self) -> bool:
        return self.what.op in GroupOp.COLLECTIVE


def insert_stores(sink: UOp, temps: Temps) -> UOp:
    """Each stored value v -> AFTER(t, STORE(t, v)) with a buffer t of its own; BARRIER(x, y) -> AFTER(x, what y waits
    for)."""
    order = sink.toposort()
    stored = decide_stores(order)
    if DEBUG >= 4 and stored:
        print(explain(stored))
    done: dict[UOp, UOp] = {}
    for u in order:
        src = tuple([done[s] for s in u.src])
        node = u if src == u.src else u.replace(src=src)
        if node is not u:
            inherit(node, u)
        if u.op is Ops.BARRIER:
            effects = effects_below(src[1])
            node = UOp(Ops.AFTER, u.dtype, (src[0], *effects)) if effects else src[0]
        if u in stored:
            value = node.src[0] if node.op is Ops.CONTIGUOUS else node
            if not (node.op is Ops.CONTIGUOUS and value.op is Ops.AFTER and is_temp(value)):
                temp = temps.new(u.shape, u.dtype, device_of(u, sink))
                store = UOp(Ops.STORE, dtypes.void, (temp, value))
                store._cache.setdefault("line", line_of(u))
                node = UOp(Ops.AFTER, u.dtype, (temp, store))
            else:
                node = value
        done[u] = node
    return done[sink]


def effects_below(u: UOp) -> list[UOp]:
    """What must have happened before an expression over stored values can be computed."""
    return list(
        dict.fromkeys(e for x in u.toposort(lambda x: x.op is not Ops.AFTER) if x.op is Ops.AFTER for e in x.src[1:])
    )


def is_temp(u: UOp) -> bool:
    base = base_buffer(u)
    return base.op is Ops.BUFFER and base.arg.uid < 0


def happened(u: UOp) -> frozenset[UOp]:
    """The effects a read of `u` comes after."""
    out: set[UOp] = set()
    seen: set[UOp] = set()
    todo = [u]
    while todo:
        u = todo.pop()
        while not is_buffer(u) and u not in seen:
            seen.add(u)
            if u.op is Ops.AFTER:
                out.update(u.src[1:])
                todo += [
                    e.src[0] for e in u.src[1:] if e.op is Ops.STORE
                ]  # a store into an assigned buffer carries the stores before it
            u = u.src[0]
    return frozenset(out)


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
    return without_unread(items)


def without_unread(items: list[Item]) -> list[Item]:
    """Drops the calls that only write temporaries which no later call reads: what a device with an empty part was to
    make of it. Collectives stay, for other workers wait in them."""
    read: set[UOp] = set()
    kept: list[Item] = []
    for item in reversed(items):
        if item.is_comm or any(not is_temp(b) or b in read for b in item.writes):
            kept.append(item)
            read.update(base_buffer(a.src[0] if a.op is Ops.VIEW else a) for a in item.args)
    return kept[::-1]


def _kernel_items(store: UOp, temps: Temps, known: Known) -> list[Item]:
    ast, args, reads = rangeify_once(store, known)
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
    out.append(Item(store, ast, args, [args[0]], [(base_buffer(r), happened(r)) for r in reads] + _target_reads(store)))
    return out


def _target_reads(store: UOp) -> list[tuple[UOp, frozenset[UOp]]]:
    """A store into an assigned buffer comes after those assignments."""
    effects = happened(store.src[0])
    return [(base_buffer(store.src[0]), effects)] if effects else []
