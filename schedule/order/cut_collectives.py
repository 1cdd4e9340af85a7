"""cut_collectives: a long all-reduce between hosts becomes several, each of a part, from the last part to the first.

Precondition: items in any order. Postcondition: the same sums of the same elements; each part reads only what it sums,
so it starts as soon as that is computed, and travels while the rest is.

    all_reduce(out, in) of 4n    ==>    all_reduce(out[3n:], in[3n:]), ..., all_reduce(out[:n], in[:n])

The parameters of a model lie in their order, and so do their gradients, which are computed from the last layer to the
first. How many parts there are follows from the size, the number of workers and the link alone, which are the same on
every worker. What is in memory before the program starts has nothing to wait for and stays whole. What is scattered is
cut before, where its terms are joined (`cut_sums.py`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from manygrad.multi.world import Link
from manygrad.schedule.facts.items import Item
from manygrad.tensor.source import LINE
from manygrad.tensor.uop import Ops, UOp, ViewArg
from manygrad.tensor.uop.args import AllReduceArg, terms_dtype
from manygrad.tensor.uop.track import made_from


def cut_collectives(items: list[Item], link: Link | None) -> list[Item]:
    return [part for item in items for part in _parts(item, link)]


def _parts(item: Item, link: Link | None) -> list[Item]:
    arg = item.what.arg
    if link is None or not isinstance(arg, AllReduceArg) or arg.members.stored:
        return [item]
    from manygrad.collectives.cost import parts_of  # (it loads the transports, which a worker alone has no use for)

    bounds = parts_of(arg.size, terms_dtype(item.what).itemsize, len(arg.members.devices), link)
    if len(bounds) == 2:
        return [item]
    ranges = list(pairwise(bounds))[::-1]
    return [_part(item, arg, begin, end, i) for i, (begin, end) in enumerate(ranges)]


def _part(item: Item, arg: AllReduceArg, begin: int, end: int, number: int) -> Item:
    members = replace(arg.members, counts=(end - begin,) * len(arg.members.mine), part=number)
    what = item.what.replace(arg=arg._replace(size=end - begin, members=members))
    made_from(what, item.what, line=item.line)
    return replace(item, what=what, args=[_view(a, begin, end) for a in item.args], key=object())


def _view(buffer: UOp, begin: int, end: int) -> UOp:
    """Elements `begin` to `end` of an argument."""
    base, offset = (buffer.src[0], buffer.arg.offset) if buffer.op is Ops.VIEW else (buffer, 0)
    view = UOp(Ops.VIEW, buffer.dtype, (base,), ViewArg(offset + begin, (end - begin,)))
    if (line := LINE.get(buffer)) is not None:
        LINE.setdefault(view, line)
    return view
