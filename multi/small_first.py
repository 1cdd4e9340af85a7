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


def last_first(sink: UOp) -> list[UOp]:
    """A topological order in which of the sums of a CAT (`schedule/cut_sums.py`) the last comes first: gradients lie in
    the order of the parameters, and are computed from the last layer to the first."""
    done: dict[UOp, None] = {}
    if not any(map(_is_cut_sum, order := sink.toposort())):
        return order
    todo: list[tuple[UOp, bool]] = [(sink, False)]
    while todo:
        u, ready = todo.pop()
        if ready:
            done[u] = None
        elif u not in done:
            todo.append((u, True))
            below = u.src if _is_cut_sum(u) else u.src[::-1]
            todo += [(s, False) for s in below if s not in done]
    return list(done)


def _is_cut_sum(u: UOp) -> bool:
    return u.op is Ops.CAT and all(s.op is Ops.FINISH for s in u.src)


def small_first(order: Sequence[UOp]) -> list[UOp]:
    """Takes and gives a topological order."""
    small: set[UOp] = set()
    for u in order:
        if u.op not in LARGE and small.issuperset(u.src) and numel(u.shape) <= SMALL:
            small.add(u)
    return [u for u in order if u in small] + [u for u in order if u not in small]
