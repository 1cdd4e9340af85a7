"""The spec of the order: each pass that loses an edge, an item or the order is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from manygrad import Context, Tensor
from manygrad.schedule import lower
from manygrad.schedule.facts.items import Item
from manygrad.schedule.order.order_spec import order_spec
from tests.schedule.programs import linear_of, stored

TWO = ("CPU:0", "CPU:1")
ORDERED = [p.name for p in lower.PASSES if p.spec is order_spec]


def program() -> list[Tensor]:
    """Kernels that merge, a sum over devices, and what is written after it was read."""
    x, w = stored(8, 8), stored(8, 8)
    grad = (x.softmax() @ w).sum(0)
    total = stored(8, 8).shard(TWO, 0).sum(0)
    old = w.flip(0) * 2
    w.assign(w - grad)
    return [w, old, total * 2, x.cumsum(0).exp().sum(1)]


def drop_edges(items: list[Item]) -> list[Item]:
    """Of the last item that has any."""
    n = max(n for n, i in enumerate(items) if i.after)
    return [replace(i, after=()) if m == n else i for m, i in enumerate(items)]


def drop_item(items: list[Item]) -> list[Item]:
    awaited = next(i.key for i in items if any(i.key in j.after for j in items))
    return [i for i in items if i.key is not awaited]


def turn_round(items: list[Item]) -> list[Item]:
    return items[::-1]


def same_key(items: list[Item]) -> list[Item]:
    return [*items, replace(items[0], after=())]


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize(
    "fault, said",
    [(drop_edges, "no edge from"), (drop_item, "is gone"), (turn_round, "stands later"), (same_key, "have one key")],
    ids=["edge", "item", "order", "key"],
)
def test_a_pass_that_breaks_the_order_is_named(
    name: str, fault: Callable[[list[Item]], list[Item]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(p: lower.Pass[lower.Lowering]) -> lower.Pass[lower.Lowering]:
        return replace(p, run=lambda items, to: fault(p.run(items, to))) if p.name == name else p

    monkeypatch.setattr(lower, "PASSES", tuple(map(broken, lower.PASSES)))
    with pytest.raises(AssertionError, match=rf"after pass '{name}': .*{said}"), Context(SCACHE=0):
        linear_of(program())


def test_unbroken_all_is_well() -> None:
    assert ORDERED[0] == "order_items" and ORDERED[-1] == "lower_collectives"
    with Context(SCACHE=0):
        linear_of(program())
