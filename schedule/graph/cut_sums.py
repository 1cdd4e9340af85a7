"""cut_sums: between hosts a scattered sum of joined terms becomes several, each of neighbours among the terms.

Precondition: a graph of all devices. Postcondition: the same sums of the same elements; each group has a FINISH of its
own, sent as soon as its terms are there, from the last group to the first (`small_first.py`).

    SHARD(CAT(a, b, c, d), cut along 0)    ==>    CAT(FINISH(CAT(a, b), cut along 0), FINISH(CAT(c, d), cut along 0))

The gradient of parameters that are cut, as an optimiser joins it: a row for each device, of its part of every
parameter. What is computed together lies in pieces of all rows, so `cut_collectives`, to which a part is one piece of
memory, could not cut it to any use. How many groups there are follows from the size and the link alone, as there.

Not cut are sums and gathers of one value each: one kernel makes all of it, or waits for all of it (a product reads its
whole weight). Those of many layers are collectives of their own in any case, each beside the other layers' kernels.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, groupby
from math import prod
from typing import NamedTuple

from manygrad.multi.placement import Partial, Shard
from manygrad.multi.rules import placement
from manygrad.multi.world import Link
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.args import FinishArg
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, rewrite_once
from manygrad.tensor.uop.track import made_from


class Due(NamedTuple):
    """A sum of joined terms that is due, and what is wanted of it."""

    joined: UOp
    arg: FinishArg


def cut_sums(sink: UOp, link: Link | None) -> UOp:
    if link is None or link.route == "shm":
        return sink
    order = sink.toposort()
    if not any(u.op in (Ops.SHARD, Ops.FINISH) and u.src[0].op is Ops.CAT for u in order):
        return sink
    readers = Counter(s for u in order for s in u.src)
    return rewrite_once(sink, _RULES, (readers, link))


def _cut(u: UOp, old: UOp, ctx: tuple[Counter[UOp], Link]) -> UOp | None:
    readers, link = ctx
    due = due_of(old)
    found = _in_groups(due, u.src[0], link) if due is not None and readers[due.joined] == 1 else None
    if found is not None:
        made_from(inherit(found, old), old)
    return found


def due_of(u: UOp) -> Due | None:
    """The joined terms on several devices that `u` cuts along another dim; None where it does nothing of the kind."""
    if u.op not in (Ops.SHARD, Ops.FINISH) or u.src[0].op is not Ops.CAT:
        return None
    joined = u.src[0]
    if type(joined.device) is not tuple or len(joined.device) == 1 or not isinstance(placement(joined), Partial):
        return None
    arg, want = u.arg, placement(u)
    if u.op is Ops.SHARD:
        if u.arg.devices != joined.device or not isinstance(want, Shard):
            return None
        arg = FinishArg(UOp(Ops.PARAM, joined.dtype, (), 0), want.axis, want.bounds)
    return Due(joined, arg) if arg.axis not in (None, joined.arg) else None


def _in_groups(due: Due, joined: UOp, link: Link) -> UOp | None:
    from manygrad.collectives.cost import count_of_parts  # (it loads the transports, which one worker does not use)

    assert type(joined.device) is tuple
    total, itemsize = prod(joined.shape), joined.dtype.itemsize
    count = count_of_parts(total * itemsize, len(joined.device), link, rounds=1)
    begins = accumulate((prod(s.shape) for s in joined.src), initial=0)
    groups = groupby(zip(joined.src, begins), lambda term: term[1] * count // max(total, 1))
    found = [tuple(s for s, _ in group) for _, group in groups]
    if len(found) == 1:
        return None
    sums = [
        inherit(
            UOp(Ops.FINISH, due.arg.value.dtype, (joined.replace(src=own) if len(own) > 1 else own[0],), due.arg),
            joined,
        )
        for own in found
    ]
    return UOp(Ops.CAT, due.arg.value.dtype, tuple(sums), joined.arg)


_RULES = PatternMatcher([(UPat((Ops.SHARD, Ops.FINISH), "u"), _cut)])
