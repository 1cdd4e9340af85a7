"""clean: markers that only gradients need are gone, and those of sums over devices where there is one.

Precondition: the user's graph. Postcondition: no DETACH or CUSTOM is left, WIRE only on several devices.

    DETACH(x)               ==>  x
    CUSTOM(out, ...inputs)  ==>  out
    WIRE(x) on one device   ==>  x
"""

from __future__ import annotations

from manygrad.tensor.uop import Ops, PatternMatcher, UOp, UPat, graph_rewrite

pm_clean = PatternMatcher(
    [
        (UPat(Ops.DETACH, "u"), lambda u: u.src[0]),  # DETACH(x) -> x
        (UPat(Ops.CUSTOM, "u"), lambda u: u.src[0]),  # CUSTOM(out, ...inputs) -> out
        (UPat(Ops.WIRE, "u"), lambda u: None if isinstance(u.device, tuple) else u.src[0]),  # WIRE(x) -> x
    ]
)
MARKERS = (Ops.DETACH, Ops.CUSTOM, Ops.WIRE)


def clean(sink: UOp) -> UOp:
    return graph_rewrite(sink, pm_clean) if any(u.op in MARKERS for u in sink.toposort()) else sink
