"""small_first: the order in which a program's nodes are lowered, from which its collectives have theirs.

What is made of small values alone comes first, all else keeps its order:

    loss = all_reduce(sum(losses)); n = all_reduce(count(targets)); ...  ==>  n = ...; loss = ...; ...

All workers run collectives in one order, so one that could be sent at once waits for those before it. A small one is
cheap to move and to hold, but others wait for its latency: it is over while what is large is being computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.shape import numel

SMALL = 1 << 14  # elements: microseconds to compute, and too little memory to matter
LARGE = frozenset({Ops.STORE, Ops.FUNCTION})  # whatever they give: one keeps its place, the other may compute for long


def early_first(sink: UOp) -> list[UOp]:
    """A topological order. Where sums are cut (`schedule/graph/cut_sums.py`), nodes stand by how many steps lead to
    them, and so collectives as they can begin: gradients lie in the order of the parameters, but are computed from the
    last layer to the first, and some by themselves."""
    order = sink.toposort()
    if not any(map(_is_cut_sum, order)):
        return order
    steps: dict[UOp, int] = {}
    for u in order:
        steps[u] = 1 + max((steps[s] for s in u.src), default=0)
    return sorted(order, key=steps.__getitem__)


def _is_cut_sum(u: UOp) -> bool:
    return u.op is Ops.CAT and all(s.op is Ops.FINISH for s in u.src)


def small_first(order: Sequence[UOp]) -> list[UOp]:
    """Takes and gives a topological order."""
    small: set[UOp] = set()
    for u in order:
        if u.op not in LARGE and small.issuperset(u.src) and numel(u.shape) <= SMALL:
            small.add(u)
    return [u for u in order if u in small] + [u for u in order if u not in small]
