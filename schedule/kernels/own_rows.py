"""own_rows: on a device of thousands of threads a kernel that stores in order is cut by rows of what it stores to.

Precondition: items, each kernel a SINK. Postcondition: the same stores, to each address in the same order. A kernel
that adds up what it stores stays as it is: each part would do so.

Such a kernel (the gradient of an embedding) goes over all its rows one after the other, as two of them may be for one
place; only what lies side by side in a row can have threads of its own. Here each thread goes over all of them, and
stores what is for its own part of the target's rows:

    for j: for c:  T[i[j], c] += v[j, c]
==> for p: for j: for c:  T[i[j], c] += v[j, c]  if p * n <= i[j] < (p + 1) * n
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from manygrad.schedule.facts.buffers import nbytes_of
from manygrad.schedule.facts.devices import is_wide
from manygrad.schedule.facts.items import Item
from manygrad.schedule.facts.nodes import reductions
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.args import RangeArg
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.track import made_from

MOST_PARTS = 64  # then going over all rows takes longer than the stores of one part
LEAST_ROWS = 64  # to store, for which it pays


def own_rows(items: list[Item]) -> list[Item]:
    return [_of_kernel(i) if i.what.op is Ops.SINK and i.args and is_wide(i.args[0].device) else i for i in items]


def _of_kernel(item: Item) -> Item:
    if len(item.what.src) != 1 or (store := item.what.src[0]).arg is None or reductions(item.what):
        return item  # (each part would make the sums again)
    loops = store.src[2:]
    if any(r.src[0].op is not Ops.CONST for r in loops):
        return item
    place = store.src[0]
    target = item.args[place.src[0].arg]
    row, stride = _row(place.src[1])
    if row is None:
        return item
    rows = -(-nbytes_of(target) // target.dtype.itemsize // stride)
    size = -(-rows // MOST_PARTS)
    parts = -(-rows // size)
    if parts < 2 or prod(r.src[0].arg for r in loops if r in ranges_of(row)) < LEAST_ROWS:
        return item
    # (the new loop is the outermost one, so all others count on)
    later = {r: r.replace(arg=r.arg._replace(id=r.arg.id + 1)) for r in ranges_of(store) | set(loops)}
    store = substitute(store, later)
    part = UOp(Ops.RANGE, dtypes.index, (sym.as_index(parts),), RangeArg(0, "loop"))
    place, mine = store.src[0], _is_in(substitute(row, later), part, size)
    condition = UOp(Ops.AND, dtypes.bool, (place.src[2], mine)) if len(place.src) == 3 else mine
    place = place.replace(src=(*place.src[:2], condition))
    what = item.what.replace(src=(store.replace(src=(place, store.src[1], part, *store.src[2:])),))
    made_from(what, item.what, line=item.line)
    return replace(item, what=what)


def _row(offset: UOp) -> tuple[UOp | None, int]:
    """The one position of an offset that is data, and how far apart its rows are: further than the rest reaches."""
    terms, begin = sym.linear(offset)
    data = [(u, step) for u, step in terms.items() if u.op is not Ops.RANGE]
    inside = sum(abs(step) * (r.src[0].arg - 1) for r, step in terms.items() if r.op is Ops.RANGE)
    if len(data) != 1 or data[0][1] <= inside or begin < 0:  # (rows are counted from the target's first on)
        return None, 0
    return data[0]


def _is_in(row: UOp, part: UOp, size: int) -> UOp:
    """part * size <= row < (part + 1) * size."""
    begin = part * size
    return UOp(
        Ops.AND,
        dtypes.bool,
        (
            UOp(Ops.CMPLT, dtypes.bool, (row, begin + size)),
            UOp(Ops.CMPLT, dtypes.bool, (begin + -1, row)),
        ),
    )
