"""touched: which elements of a buffer a call can touch."""

from __future__ import annotations

from manygrad.schedule.facts.items import Item
from manygrad.schedule.facts.nodes import indices
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.shape import numel

Span = tuple[int, int]  # the first and the last element


def touched(item: Item, buffer: UOp) -> list[Span] | None:
    """The parts of a buffer that a call can touch, one for each access; None where it may be all of it."""
    passed = {i: a.arg.offset if a.op is Ops.VIEW else 0 for i, a in enumerate(item.args) if _base(a) is buffer}
    if item.is_comm:
        if any(item.args[i] is buffer for i in passed):
            return None
        return [(at, at + numel(item.args[i].arg.shape) - 1) for i, at in passed.items()] or None
    kernels = item.what.src if item.what.op is Ops.CHAIN else (item.what,) if item.what.op is Ops.SINK else ()
    found: list[Span] = []
    for n, kernel in enumerate(kernels):
        slots = item.what.arg.slots[n] if item.what.op is Ops.CHAIN else range(len(item.args))
        for u in indices(kernel):
            if (at := passed.get(slots[u.src[0].arg])) is not None:
                first, last = sym.bounds(u.src[1])
                found.append((at + first, at + last))
    return found or None


def apart(a: Item, b: Item, buffer: UOp) -> bool:
    """Whether two calls touch different parts of a buffer, one after the other: one may write its part before the other
    reads its own."""
    first, second = touched(a, buffer), touched(b, buffer)
    if first is None or second is None:
        return False
    (begin, end), (other_begin, other_end) = _hull(first), _hull(second)
    return end < other_begin or other_end < begin


def _hull(spans: list[Span]) -> Span:
    return min(first for first, _ in spans), max(last for _, last in spans)


def _base(a: UOp) -> UOp:
    return a.src[0] if a.op is Ops.VIEW else a
