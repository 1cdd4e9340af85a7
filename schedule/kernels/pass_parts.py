"""pass_parts: a kernel that uses a buffer from a constant offset on is given that part of it: the offset belongs to the
CALL.

Precondition: items in order, kernels merged and chained. Postcondition: the same accesses; no kernel adds a constant to
all its indices of an argument. Calls of one kernel on different parts of a buffer, such as the layers of a model whose
parameters lie in one, share its code.

    w[r0 * 8 + r1 + 4096] of (w)      ==>  w[r0 * 8 + r1] of (VIEW(w, from 4096))

Of a buffer that workers send or receive as well, the part ends where the kernel's accesses do: so it is seen which
kernels may run while another part of it travels.
"""

from __future__ import annotations

from dataclasses import replace

from manygrad.schedule.facts.chain import ChainSpec
from manygrad.schedule.facts.items import Item, leaves_the_worker
from manygrad.schedule.facts.nodes import indices
from manygrad.tensor.uop import Ops, UOp, ViewArg
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.rewrite import rebuild
from manygrad.tensor.uop.shape import numel
from manygrad.tensor.uop.track import made_from


def pass_parts(items: list[Item]) -> list[Item]:
    travelling = frozenset(
        a.src[0] if a.op is Ops.VIEW else a for i in items if leaves_the_worker(i.what) for a in i.args
    )
    return [
        _of_kernel(i, travelling) if i.what.op is Ops.SINK else _of_chain(i) if i.what.op is Ops.CHAIN else i
        for i in items
    ]


def _of_kernel(item: Item, travelling: frozenset[UOp]) -> Item:
    offsets = _offsets(item.what, item.args)
    ends = {slot: _end(item.what, slot, b) for slot, b in enumerate(item.args) if b in travelling}
    args = [_part(b, offsets.get(slot, 0), ends.get(slot)) for slot, b in enumerate(item.args)]
    if args == item.args:
        return item
    what = _without(item.what, offsets)
    made_from(what, item.what, line=item.line)
    return replace(item, what=what, args=args)


def _of_chain(item: Item) -> Item:
    """Kernels may use one argument from different offsets on: it then is several arguments. The chain's own temporaries
    stay as they are."""
    spec: ChainSpec = item.what.arg
    own = {t.argument for t in spec.temps}
    given = [[item.args[i] for i in slots] for slots in spec.slots]
    offsets = [
        {p: n for p, n in _offsets(k, args).items() if slots[p] not in own}
        for k, args, slots in zip(item.what.src, given, spec.slots)
    ]
    if not any(offsets):
        return item
    parts = [[_part(b, moved.get(p, 0)) for p, b in enumerate(args)] for args, moved in zip(given, offsets)]
    args = list(dict.fromkeys(b for bs in parts for b in bs))
    slots = tuple(tuple(args.index(b) for b in bs) for bs in parts)
    temps = tuple(t._replace(argument=args.index(item.args[t.argument])) for t in spec.temps)
    kernels = tuple(map(_without, item.what.src, offsets))
    what = item.what.replace(src=kernels, arg=replace(spec, slots=slots, temps=temps))
    made_from(what, item.what, line=item.line)
    return replace(item, what=what, args=args)


def _offsets(kernel: UOp, args: list[UOp]) -> dict[int, int]:
    """By argument, the offset below which the kernel uses nothing of it, where that is more than 0."""
    least: dict[int, int] = {}
    for u in indices(kernel):
        slot, n = u.src[0].arg, _least(u.src[1])
        least[slot] = min(n, least.get(slot, n))
    return {slot: n for slot, n in least.items() if 0 < n < numel(args[slot].shape)}


def _least(index: UOp) -> int:
    """No less than this, where the access is made: what is computed from data is asked to lie inside of its dim, which
    begins at 0."""
    terms, const = sym.linear(index)
    return const + sum(
        min(0, k * (sym.vmax(t) if k < 0 else 0 if t.op is Ops.CAST else sym.vmin(t))) for t, k in terms.items()
    )


def _without(kernel: UOp, offsets: dict[int, int]) -> UOp:
    def earlier(u: UOp) -> UOp | None:
        if u.op is not Ops.INDEX or u.src[0].arg not in offsets:
            return None
        return u.replace(src=(u.src[0], sym.add(u.src[1], -offsets[u.src[0].arg]), *u.src[2:]))

    return rebuild(kernel, earlier, sym.simplified) if offsets else kernel


def _end(kernel: UOp, slot: int, buffer: UOp) -> int:
    """The element of an argument from which on the kernel uses nothing of it."""
    return min(numel(buffer.shape), 1 + max(sym.bounds(u.src[1])[1] for u in indices(kernel) if u.src[0].arg == slot))


def _part(buffer: UOp, offset: int, end: int | None = None) -> UOp:
    whole = numel(buffer.shape)
    # (of accesses whose condition never holds, too, but of an empty buffer)
    count = whole - offset if end is None or not whole else max(1, end - offset)
    if count == whole:
        return buffer
    return UOp(Ops.VIEW, buffer.dtype, (buffer,), ViewArg(offset, (count,)))
