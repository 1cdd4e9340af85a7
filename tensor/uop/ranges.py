"""ranges_of: the loops that an expression of a kernel depends on."""

from __future__ import annotations

from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.table import inferred
from manygrad.tensor.uop.uop import UOp


@inferred
def ranges_of(u: UOp) -> frozenset[UOp]:
    """The RANGEs that the value of `u` changes with: those below it, less the ones reduced away."""
    if u.op is Ops.RANGE:
        return frozenset((u,))
    if u.op is Ops.REDUCE:
        return ranges_of(u.src[0]) - frozenset(u.src[1:])
    return frozenset().union(*map(ranges_of, u.src))
