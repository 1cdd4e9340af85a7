"""Kernels whose stores may meet at one address: what they may not change of the order in which these run.

A kernel that adds to what it stores to, or of whose values for one address the last one stays (`STORE` with an arg),
runs in order what may meet at one address: only a loop whose iterations provably do not is vectorized, cut over the
threads, or moved past others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from manygrad.runtime.codegen.analysis.affine import Atom, TileAnalysis
from manygrad.runtime.codegen.analysis.describe import Signature, conjuncts, size_max
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


def out_of_order(sig: Signature, nest: LoopNest) -> str | None:
    """Why the nest would store to one address in another order."""
    if all(s.arg is None for s in sig.stores):
        return None
    if nest.block:
        return "a kernel that stores in order has no blocks"
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
    are multiples of what `r` spans (whatever they are, and if they change with `r`). Or each stores to rows of its own
    alone: its condition says so, of a position that moves by more than all others."""
    analysis = TileAnalysis({}, None, 1)
    a = analysis.affine(index.src[1], {})
    if a is None:
        return False
    inside = _limits(analysis, index)
    step = next((c for x, c in a.terms if x.expr is r), 0)
    if step:
        smaller = [(x, c) for x, c in a.terms if x.expr is not r and c % (step * size_max(r))]
        return step > 0 and _span(smaller, inside) < step
    return any(
        c > _span([y for y in a.terms if y[0] is not x], inside) and _is_parted(analysis, index, x.expr, r)
        for x, c in a.terms
    )


def _span(terms: Iterable[tuple[Atom, int]], inside: Mapping[UOp, tuple[int, int]]) -> int:
    """How far apart places are that differ in these terms alone, at most."""
    limits = ((c, inside.get(x.expr, bounds(x.expr))) for x, c in terms)
    return sum(abs(c) * (high - low) for c, (low, high) in limits)


def _is_parted(analysis: TileAnalysis, index: UOp, row: UOp, r: UOp) -> bool:
    """Whether the condition has `row` in n * r ... n * r + n - 1 for some n."""
    below = dict[int, int]()  # n -> the least b of row < n * r + b
    above = dict[int, int]()  # n -> the greatest a of row >= n * r + a
    for terms, rest in _tests(analysis, index):
        found = {x.expr: c for x, c in terms}
        if found.keys() != {row, r} or abs(found[row]) != 1 or found[row] * found[r] >= 0:
            continue
        n = abs(found[r])
        if found[row] == 1:  # row - n * r + rest < 0
            below[n] = min(-rest, below.get(n, -rest))
        else:  # n * r - row + rest < 0
            above[n] = max(rest + 1, above.get(n, rest + 1))
    return any(n in above and below[n] - above[n] <= n for n in below)


def _tests(analysis: TileAnalysis, index: UOp) -> Iterator[tuple[tuple[tuple[Atom, int], ...], int]]:
    """What the condition of an INDEX says of numbers: (terms, rest), their sum is negative."""
    for test in conjuncts(index.src[2]) if len(index.src) == 3 else []:
        if test.op is Ops.CMPLT and all(s.dtype.is_int for s in test.src):
            a, b = (analysis.affine(s, {}) for s in test.src)
            if a is not None and b is not None:
                yield (*a.terms, *((x, -c) for x, c in b.terms)), a.constant - b.constant


def _limits(analysis: TileAnalysis, index: UOp) -> dict[UOp, tuple[int, int]]:
    """expression -> (least, greatest) that the condition of an INDEX leaves of it, for conditions on one expression (a
    position that is data)."""
    found: dict[UOp, tuple[int, int]] = {}
    for terms, rest in _tests(analysis, index):
        if len(terms) != 1:
            continue
        ((atom, c),) = terms  # c * atom + rest < 0
        low, high = found.get(atom.expr, bounds(atom.expr))
        found[atom.expr] = (low, min(high, (-rest - 1) // c)) if c > 0 else (max(low, rest // -c + 1), high)
    return found
