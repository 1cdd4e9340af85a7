"""The elements that the reductions of a kernel go over: where another kernel's go over the same, one pass serves
both.

s[i] = sum(x[i, k], k)  and  d[i] = sum(x[i, j] * y[i, j], j)      both go over x[i, #0]
"""

from __future__ import annotations

from dataclasses import dataclass

from manygrad.schedule.facts.nodes import reductions
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.table import memo


@dataclass(frozen=True)
class Domain:
    """The iteration domain of the REDUCEs of a kernel, and in `read` what each reads anew in each iteration, as
    (argument, place along numbered ranges)."""

    sizes: tuple[UOp, ...]
    widths: frozenset[int]  # of its floats
    place: tuple[UOp, ...]  # that is stored to
    read: frozenset[tuple[int, tuple[UOp, ...]]]


@memo
def domain_of(ast: UOp) -> Domain | None:
    """None for a kernel without reductions, with some of different sizes, or with a contraction."""
    reduces = reductions(ast)
    store = ast.src[0]
    if not reduces or len({tuple(r.src[0] for r in u.src[1:]) for u in reduces}) > 1:
        return None
    read: set[tuple[int, tuple[UOp, ...]]] = set()
    for u in reduces:
        around = frozenset(store.src[2:]) | frozenset(u.src[1:])
        anew = [x for x in u.src[0].toposort() if x.op is Ops.INDEX and around <= ranges_of(x.src[1])]
        if not anew:
            return None
        numbered = {r: r.replace(arg=r.arg._replace(id=-1 - i)) for i, r in enumerate(u.src[1:])}
        read.update((x.src[0].arg, substitute(x, numbered).src[1:]) for x in anew)
    widths = frozenset(u.dtype.itemsize for u in ast.below() if u.dtype.is_float)
    return Domain(tuple(r.src[0] for r in reduces[0].src[1:]), widths, store.src[0].src[1:], frozenset(read))
