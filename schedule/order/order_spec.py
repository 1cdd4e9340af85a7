"""Spec of the order of items, from `order_items` on: every edge is to an earlier item of the list, and where one item
writes what another reads, there is a way along edges from the later to the earlier one.

    w: STORE(b);  r reads b after w    ==>    w stands before r, and r comes after it, at once or by way of others
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from manygrad.schedule.facts.items import Item
from manygrad.schedule.facts.touched import Span, touched
from manygrad.schedule.spec import items_spec
from manygrad.tensor.uop import UOp


def order_spec(items: Sequence[Item], name: str) -> None:
    """Each item by itself, and the order of all. Raises `AssertionError` naming the pass and both items."""
    items_spec(items, name)
    before = _all_before(items, name)
    for w, r, is_newer in _conflicts(items):
        first, second = (r, w) if is_newer else (w, r)
        if not before[second] >> first & 1:
            why = "writes what the other reads as it was" if is_newer else "reads what the other writes"
            raise AssertionError(
                f"after pass {name!r}: no edge from {_told(items, second)} to {_told(items, first)}: it {why}"
            )


def _all_before(items: Sequence[Item], name: str) -> list[int]:
    """For each item a set, as bits, of the positions of those that it comes after, by way of others too."""
    place: dict[object, int] = {}
    before: list[int] = []
    for n, item in enumerate(items):
        found = 0
        for key in item.after:
            if key not in place:
                why = "stands later" if any(i.key is key for i in items[n:]) else "is gone"
                raise AssertionError(f"after pass {name!r}: {_told(items, n)} has an edge to an item that {why}")
            found |= before[place[key]] | 1 << place[key]
        if place.setdefault(item.key, n) != n:
            raise AssertionError(
                f"after pass {name!r}: {_told(items, place[item.key])} and {_told(items, n)} have one key"
            )
        before.append(found)
    return before


def _conflicts(items: Sequence[Item]) -> Iterator[tuple[int, int, bool]]:
    """(writer, reader, whether the reader reads an older value) of each buffer whose parts that they touch meet."""
    writers: dict[UOp, list[int]] = {}
    for w, item in enumerate(items):
        for b in item.writes:
            writers.setdefault(b, []).append(w)
    spans: dict[tuple[int, UOp], list[Span] | None] = {}

    def meet(i: int, j: int, b: UOp) -> bool:
        for n in (i, j):
            if (n, b) not in spans:
                spans[n, b] = touched(items[n], b)
        first, second = spans[i, b], spans[j, b]
        if first is None or second is None:
            return True
        return any(x[0] <= y[1] and y[0] <= x[1] for x in first for y in second)

    for r, item in enumerate(items):
        for b, effects in item.reads:
            for w in writers.get(b, ()):
                if w != r and meet(w, r, b):
                    yield w, r, effects.union(item.effects).isdisjoint(items[w].effects)


def _told(items: Sequence[Item], n: int) -> str:
    return f"call {n} ({items[n].what.op.name} of {items[n].line or 'no line'})"
