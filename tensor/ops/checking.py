"""Indices that are looked at where they are used: one that is out of range is an IndexError when a value is read next.

Positions are not known when the graph is built. A check is one small reduction beside the kernel that uses the index,
and none where the graph says that the index is in range. `_gather` and `_scatter_at` do not check: an index out of
range reads 0 and writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.engine import default_device, engine
from manygrad.tensor.source import LINE, user_line
from manygrad.tensor.uop import CheckArg, Ops, UOp
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.symbolic import as_index, vmax

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def checked(index: Tensor, what: str, size: Any, of: Tensor, low: int | None = 0, spared: int | None = None) -> Tensor:
    """`index`, found out of range unless low <= i < size (or i is `spared`);
    `low` None: negative ones count from the end.

    `what` says in the error what an element is: "embedding: row". `of` is what is indexed: a constant index is looked
    at where that is. A symbolic size counts with its largest value.
    """
    if not index.dtype.is_int or not index.numel():
        return index
    n = size if isinstance(size, int) else vmax(as_index(size))
    low = -n if low is None else low
    first, last = bounds(index.uop)
    if low <= first and last < n:
        return index
    line = user_line()
    word = engine().word_of(what, low, n, line, index.uop.device or of.uop.device or default_device())
    node = UOp(Ops.CHECK, index.dtype, (index.uop, word), CheckArg(low, n, spared))
    LINE.setdefault(node, line)
    return index._new(node)
