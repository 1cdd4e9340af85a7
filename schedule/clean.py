"""clean: markers that only gradients need are gone.

Precondition: the user's graph. Postcondition: no DETACH or CUSTOM is left.

    DETACH(x)               ==>  x
    CUSTOM(out, ...inputs)  ==>  out
"""

from __future__ import annotations

from manygrad.tensor.uop import Ops, PatternMatcher, UOp, UPat, graph_rewrite

pm_clean = PatternMatcher(
    [
        (UPat(Ops.DETACH, "u"), lambda u: u.src[0]),  # DETACH(x) -> x
        (UPat(Ops.CUSTOM, "u"), lambda u: u.src[0]),  # CUSTOM(out, ...inputs) -> out
    ]
)


def clean(sink: UOp) -> UOp:
    return graph_rewrite(sink, pm_clean) if any(u.op in (Ops.DETACH, Ops.CUSTOM) for u in sink.toposort()) else sink
