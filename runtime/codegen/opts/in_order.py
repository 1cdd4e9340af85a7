"""Kernels whose stores may meet at one address: what they may not change of the order in which these run.

A kernel that adds to what it stores to, or of whose values for one address the last one stays (`STORE` with an arg),
runs in order what may meet at one address: only a loop whose iterations provably do not is vectorized, cut over the
threads, or moved past others.
"""

from __future__ import annotations

from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.analysis.describe import Signature, conjuncts, size_max
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def out_of_order(sig: Signature, nest: LoopNest) -> str | None:
    """Why the nest would store to one address in another order."""
    if all(s.arg is None for s in sig.stores):
        return None
    if nest.parallel > 1 or nest.block:
        return "a kernel that stores in order is cut along one loop at most"
    ordered = [r for r in nest.loops if not all(injective(s.src[0], r) for s in sig.stores)]
    for r in ordered:
        may_meet = f"iterations of loop {r.arg.id} may store to one address, so"
        if r is nest.vectorized or r in nest.loops[: nest.parallel]:
            return f"{may_meet} they run in order"
        if nest.tile_of(r) > 1 and r is not ordered[-1]:
            return f"{may_meet} one is done before the next: it has no tiles"
    if ordered != [r for r in sig.loops if r in ordered]:
        return f"loops {[r.arg.id for r in ordered]} may store to one address, so they stay in their order"
    return None


def injective(index: UOp, r: UOp) -> bool:
    """Different iterations of `r` never meet at one address: it moves by more than all smaller terms span, the others
    are multiples of what `r` spans (whatever they are, and if they change with `r`)."""
    analysis = TileAnalysis({}, None, 1)
    a = analysis.affine(index.src[1], {})
    step = next((c for x, c in a.terms if x.expr is r), 0) if a is not None else 0
    if a is None or step <= 0:
        return False
    inside = _limits(analysis, index)
    span = 0
    for x, c in a.terms:
        if x.expr is not r and c % (step * size_max(r)):
            low, high = inside.get(x.expr, bounds(x.expr))
            span += abs(c) * (high - low)
    return span < step


def _limits(analysis: TileAnalysis, index: UOp) -> dict[UOp, tuple[int, int]]:
    """expression -> (least, greatest) that the condition of an INDEX leaves of it, for conditions on one expression (a
    position that is data)."""
    found: dict[UOp, tuple[int, int]] = {}
    for test in conjuncts(index.src[2]) if len(index.src) == 3 else []:
        if test.op is not Ops.CMPLT or not all(s.dtype.is_int for s in test.src):
            continue
        a, b = (analysis.affine(s, {}) for s in test.src)
        if a is None or b is None or len(terms := (*a.terms, *((x, -c) for x, c in b.terms))) != 1:
            continue
        (atom, c), rest = terms[0], a.constant - b.constant  # c * atom + rest < 0
        low, high = found.get(atom.expr, bounds(atom.expr))
        found[atom.expr] = (low, min(high, (-rest - 1) // c)) if c > 0 else (max(low, rest // -c + 1), high)
    return found
