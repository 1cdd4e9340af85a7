"""ranges_of: the loops that an expression of a kernel depends on."""

from __future__ import annotations

from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp, lacking


def ranges_of(u: UOp) -> frozenset[UOp]:
    """The RANGEs that the value of `u` changes with: those below it, less the ones reduced away."""
    found = u._cache.get("ranges")
    if found is None:
        for x in lacking(u, "ranges"):
            if x.op is Ops.RANGE:
                x._cache["ranges"] = frozenset((x,))
            elif x.op is Ops.REDUCE:
                x._cache["ranges"] = x.src[0]._cache["ranges"] - frozenset(x.src[1:])
            else:
                x._cache["ranges"] = frozenset().union(*[s._cache["ranges"] for s in x.src])
        found = u._cache["ranges"]
    return found
