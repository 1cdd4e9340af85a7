"""Which reductions stay in the kernel that uses them: those of a row, broadcast back over the same row.

    y = x / EXPAND(REDUCE(ADD, x, last dim))      one kernel: for each row its sum, then its elements

The code generator computes a reduction in the outermost loop that it needs, so a kernel over (rows, columns) makes it
once a row, reads the row from memory once and again from the cache. Softmax, layer and RMS norm and their like are then
one kernel of one pass over memory, instead of one pass for each reduction and one for the result.

A row is the trailing dims, at most ROW elements, so that it stays in the cache. The decision looks at the row alone,
never at how many there are: a batch has the same kernels, and bits, on one device and on many.
"""

from __future__ import annotations

from collections.abc import Container
from math import prod

from manygrad.tensor.uop import GroupOp, Ops, UOp

ROW = 16384  # elements
Row = tuple[tuple[int, ...], tuple[int, ...]]  # (reduced axes, shape before)
MIXED: Row = ((), ())


class Rows:
    """Facts about every node while stores are decided, sources first."""

    def __init__(self) -> None:
        self.statistic: dict[UOp, Row] = {}  # elementwise made of reductions of one kind of row, not yet broadcast
        self.open: dict[UOp, Row] = {}  # holds a fused reduction: the rows that its kernel's loops must run over

    def row_of(self, u: UOp) -> Row | None:
        """The row that a REDUCE sums up, if it is one that can stay fused."""
        shape, axes = u.src[0].shape, tuple(sorted(u.arg.axes))
        if (
            u.arg.blocks is not None
            or axes != tuple(range(len(shape) - len(axes), len(shape)))
            or not all(isinstance(d, int) for d in shape)
        ):
            return None
        return (axes, shape) if prod(shape[a] for a in axes) <= ROW else None

    def fuses_reduce(self, u: UOp) -> bool:
        """Whether the REDUCE `u` of a value with fused reductions runs over just their rows."""
        return self.open.get(u.src[0]) is not None and self.open[u.src[0]] == self.row_of(u)

    def fuses_expand(self, u: UOp) -> bool:
        """Whether the EXPAND `u` gives a row's reduction back to the row."""
        row = self.statistic.get(u.src[0])
        return row is not None and u.shape == row[1] and all(u.src[0].shape[a] == 1 for a in row[0])

    def learn(self, u: UOp, stored: Container[UOp]) -> None:
        """Called once the sources of `u` are settled."""
        if u.op is Ops.REDUCE:
            row = self.row_of(u)
            if row is not None:
                self.statistic[u] = row
            return
        if u.op is Ops.EXPAND:
            if self.fuses_expand(u) and u.src[0] not in stored:
                self.open[u] = self.statistic[u.src[0]]
            return
        if u.op not in GroupOp.ELEMENTWISE:
            return
        for known in (self.statistic, self.open):
            found = {known[s] for s in u.src if s in known and s not in stored}
            if found:
                known[u] = found.pop() if len(found) == 1 else MIXED

    def statistics(self, u: UOp, stored: Container[UOp]) -> list[UOp]:
        """The statistics that an elementwise value of fused reductions is made of, each before it is broadcast."""
        inside = u.toposort(lambda x: x in self.open and x not in stored and x.op in GroupOp.ELEMENTWISE)
        return [x.src[0] for x in inside if x.op is Ops.EXPAND and x in self.open]

    def close(self, u: UOp, stored: Container[UOp]) -> None:
        """Called once the statistics of `u` are stored: it holds no reduction any more."""
        for x in u.toposort(lambda x: x in self.open and x not in stored):
            self.open.pop(x, None)

    def must_store(self, u: UOp, stored: Container[UOp]) -> list[UOp]:
        """Sources of `u` whose fused reductions its loops would make again and again."""
        held = [s for s in u.src if s in self.open and s not in stored]
        if u.op in GroupOp.ELEMENTWISE:
            return held if len({self.open[s] for s in held}) > 1 else []
        return held if u.op in GroupOp.MOVEMENT or u.op is Ops.GATHER else []
