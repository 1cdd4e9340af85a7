"""Tables of what is known of nodes: entries are found again, computed once, and go with their nodes."""

from __future__ import annotations

import weakref

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.table import Table, inferred, memo


def chain(n: int, value: float) -> UOp:
    u = UOp.const(dtypes.float32, value)
    for _ in range(n):
        u = UOp(Ops.NEG, dtypes.float32, (u,))
    return u


def test_an_entry_belongs_to_one_table_and_one_node() -> None:
    names, others = Table[str]("name"), Table[str]("name")
    u, v = chain(1, 0.5), chain(2, 0.5)
    names[u] = "u"
    assert names[u] == names.get(u) == "u" and u in names
    assert v not in names and u not in others and others.get(u) is None
    assert names.setdefault(u, "again") == "u" and names.setdefault(v, "v") == "v"
    assert names.pop(u) == "u" and names.pop(u) is None and u not in names and v in names


def test_an_entry_of_none_is_an_entry() -> None:
    calls: list[UOp] = []

    @memo
    def nothing(u: UOp) -> None:
        """Always None."""
        calls.append(u)

    u = chain(1, 1.5)
    assert nothing(u) is None and nothing(u) is None and calls == [u] and u in nothing
    assert nothing.__doc__ == "Always None." and nothing.name == "nothing"


def test_a_property_is_inferred_once_for_each_node_sources_first() -> None:
    order: list[UOp] = []

    @inferred
    def depth(u: UOp) -> int:
        order.append(u)
        return 1 + max((depth[s] for s in u.src), default=0)

    half = chain(40_000, 2.5)
    assert depth(half) == 40_001
    whole = half
    for _ in range(40_000):
        whole = UOp(Ops.NEG, dtypes.float32, (whole,))
    assert depth(whole) == 80_001 and len(order) == 80_001 and order[-1] is whole


def test_entries_go_with_their_nodes() -> None:
    values = Table[UOp]("value")
    u, v = chain(3, 0.0711), chain(5, 0.0722)
    values[u] = v
    nodes = [weakref.ref(x) for x in (*u.toposort(), *u.below(), *v.toposort())]
    del v
    assert all(ref() is not None for ref in nodes)
    del u
    assert not any(ref() is not None for ref in nodes)
