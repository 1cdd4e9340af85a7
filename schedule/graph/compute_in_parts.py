"""compute_in_parts: what is done to each element of joined values is done to the parts, before they are joined.

Precondition: simplified per-device graph. Postcondition: the same values; a CAT that one elementwise op alone reads,
beside numbers, is not stored as it is: its parts' kernels, which write it in any case, write the op's result.

    RELU(CAT(a, b))    ==>  CAT(RELU(a), RELU(b))
    MUL(CAT(a, b), 2)  ==>  CAT(MUL(a, 2), MUL(b, 2))

This saves writing and reading the joined value once more. Left as they are: parts that a reduction makes, whose kernels
keep the loops of its dims (`join.py`), and results that take more memory than what was joined.
"""

from __future__ import annotations

from collections import Counter

from manygrad.schedule.facts.join import made_by_reduction
from manygrad.schedule.graph.simplify import broadcast, constant
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, rewrite_once


def compute_in_parts(sink: UOp) -> UOp:
    order = sink.toposort()
    if not any(u.op in GroupOp.ELEMENTWISE and _in_parts(u) for u in order):
        return sink
    readers = Counter(s for u in order for s in u.src)
    return rewrite_once(sink, _RULES, readers)


def _compute(u: UOp, old: UOp, ctx: Counter[UOp]) -> UOp | None:
    return _in_parts(u) if all(ctx[s] == 1 for s, new in zip(old.src, u.src) if new.op is Ops.CAT) else None


def _in_parts(u: UOp) -> UOp | None:
    """CAT of `u` of each part, where `u` reads one CAT and numbers."""
    joined = [s for s in u.src if s.op is Ops.CAT]
    others = [s for s in u.src if s.op is not Ops.CAT]
    if len(joined) != 1 or any(constant(s) is None for s in others) or u.dtype.itemsize > joined[0].dtype.itemsize:
        return None
    cat = joined[0]
    if any(made_by_reduction(part) for part in cat.src):
        return None

    def of(part: UOp) -> UOp:
        src = tuple(part if s is cat else broadcast(UOp.const(s.dtype, constant(s)), part.shape) for s in u.src)
        return inherit(u.replace(src=src), u)

    return inherit(UOp(Ops.CAT, u.dtype, tuple(of(part) for part in cat.src), cat.arg), u)


_RULES = PatternMatcher([(UPat(GroupOp.ELEMENTWISE, "u"), _compute)])
