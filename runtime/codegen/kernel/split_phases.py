"""Splits loops by the phase that decides what a reduction reads: pixels of either parity have taps of their own in the
gradient of a convolution with stride 2.

before:  LOOP x 8: REDUCE k 3: LOAD(.., valid (x + k + 1) % 2 < 1)
after:   LOOP p 2: LOOP x' 4: REDUCE k 3: LOAD(.., valid (p + k + 1) % 2 < 1)        where x was 2 * x' + p

Then whole tiles of x' agree on what is read, and the rest can be skipped (`opts/skip.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.analysis.describe import Signature, conjuncts, signature
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.args import RangeArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, rewrite_once
from manygrad.tensor.uop.symbolic import simplified
from manygrad.tensor.uop.uop import UOp


def phased_loops(sig: Signature) -> dict[UOp, int]:
    """Loop -> period of the conditions under which reductions read. None of a kernel that stores in order."""
    if any(s.arg is not None for s in sig.stores):
        return {}
    found: dict[UOp, int] = {}
    analysis = TileAnalysis({}, None, 1)
    sizes = frozenset(x for r in sig.loops for x in ranges_of(r.src[0]))
    loads = [v for u in sig.reduces for v in u.src[0].toposort() if v.op is Ops.INDEX and len(v.src) == 3]
    for condition in dict.fromkeys(
        c for v in loads for c in conjuncts(v.src[2])
    ):  # in order: new ids are part of the code's key
        for u in condition.toposort():
            if u.op is not Ops.MOD or u.src[1].op is not Ops.CONST or (a := analysis.affine(u.src[0], {})) is None:
                continue
            period = u.src[1].arg
            terms = {x.expr: c for x, c in a.terms}
            for r in sig.loops:
                size = r.src[0].arg if r.src[0].op is Ops.CONST else 1
                if abs(terms.get(r, 0)) == 1 and size % period == 0 and size > period > 1 and r not in sizes:
                    found.setdefault(r, period)
    return found


def split_phases(ast: UOp) -> UOp:
    """The kernel with those loops split in two."""
    sig = signature(ast)
    phased = phased_loops(sig)
    if not phased:
        return ast
    number = max(u.arg.id for u in sig.nodes if u.op is Ops.RANGE)
    const = lambda n: UOp.const(dtypes.index, n)  # noqa: E731
    parts: dict[UOp, tuple[UOp, UOp]] = {}
    for i, (r, period) in enumerate(phased.items()):
        phase = UOp(Ops.RANGE, dtypes.index, (const(period),), RangeArg(number + 1 + i, "loop"))
        parts[r] = (phase, r.replace(src=(const(r.src[0].arg // period),)))
    at = {r: rest.alu(Ops.MUL, const(phased[r])).alu(Ops.ADD, phase) for r, (phase, rest) in parts.items()}
    return rewrite_once(ast, _RULES, (parts, at), simplified)


def _at_phase(u: UOp, ctx: tuple[Mapping[UOp, tuple[UOp, UOp]], Mapping[UOp, UOp]]) -> UOp | None:
    return ctx[1].get(u)


def _loops_of_both(
    u: UOp, old: UOp, done: Mapping[UOp, UOp], ctx: tuple[Mapping[UOp, tuple[UOp, UOp]], Mapping[UOp, UOp]]
) -> UOp:
    """STORE that ends both loops instead of the one."""
    return u.replace(src=(*u.src[:2], *(x for r in old.src[2:] for x in ctx[0].get(r, (done[r],)))))


_RULES = PatternMatcher([(UPat(Ops.RANGE, "u"), _at_phase), (UPat(Ops.STORE, "u"), _loops_of_both)])
