"""Merges neighbouring ranges whose joint index is all that is used, drops ranges of one iteration, and shares those of
reductions.

before:  RANGE i 32, RANGE j 1024; every offset has i*1024*s + j*s
after:   RANGE j 32768; every offset has j*s
"""

from __future__ import annotations

import itertools

from manygrad.runtime.codegen.analysis.affine import Affine, TileAnalysis
from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import rebuild
from manygrad.tensor.uop.uop import UOp

ZERO = UOp.const(dtypes.index, 0)


def replace_ranges(ast: UOp, changes: dict[UOp, UOp | None]) -> UOp:
    """Replaces ranges; one that becomes None is an index 0 and leaves the lists of loops."""

    def change(u: UOp) -> UOp | None:
        if u in changes:
            return changes[u] or ZERO
        if u.op is Ops.STORE:
            return u.replace(src=(*u.src[:2], *(r for r in u.src[2:] if r.op is Ops.RANGE)))
        if u.op is Ops.REDUCE:
            ranges = tuple(r for r in u.src[1:] if r.op is Ops.RANGE)
            return u.replace(src=(u.src[0], *ranges)) if ranges else u.src[0]
        return None

    return rebuild(ast, change)


def drop_single_iterations(ast: UOp) -> UOp:
    """RANGE of size 1 -> 0"""
    single = {
        u: None for u in signature(ast).nodes if u.op is Ops.RANGE and u.src[0].op is Ops.CONST and u.src[0].arg == 1
    }
    return replace_ranges(ast, dict(single)) if single else ast


class _Uses:
    """Where ranges are used: as affine terms of offsets (with their coefficients), or otherwise."""

    def __init__(self, ast: UOp) -> None:
        sig = signature(ast)
        analysis = TileAnalysis({}, None, 1)
        self.offsets: list[dict[UOp, int]] = []
        self.fixed: set[UOp] = set()  # ranges that are used in another way
        self.lists = {s.src[2:] for s in sig.stores} | {u.src[1:] for u in sig.reduces}
        inside: set[UOp] = set()
        for u in sig.nodes:
            if u.op is Ops.INDEX:
                form = analysis.affine(u.src[1], {})
                assert isinstance(form, Affine)
                terms = {}
                for atom, c in form.terms:
                    if atom.expr.op is Ops.RANGE:
                        terms[atom.expr] = c
                    else:
                        self.fixed |= ranges_of(atom.expr)
                self.offsets.append(terms)
                if len(u.src) == 3:
                    self.fixed |= ranges_of(u.src[2])
                inside.add(u)
        # values that use an index otherwise than through memory
        values = UOp(Ops.SINK, dtypes.void, tuple(s.src[1] for s in sig.stores)).toposort(
            lambda u: u not in inside and u.op is not Ops.RANGE
        )
        for u in values:
            if u.op in (Ops.REDUCE, Ops.INDEX, Ops.LOAD, Ops.SINK):
                continue
            for s in u.src:
                if s.dtype is dtypes.index:
                    self.fixed |= ranges_of(s)
        for ranges in self.lists:
            for r in ranges:
                self.fixed |= ranges_of(r.src[0])

    def mergeable(self, i: UOp, j: UOp) -> bool:
        """`i` directly outside `j`, together everywhere, and always as i * size(j) + j."""
        if {i, j} & self.fixed or i.src[0].op is not Ops.CONST or j.src[0].op is not Ops.CONST:
            return False
        size = j.src[0].arg
        if any(t.get(i, 0) != t.get(j, 0) * size for t in self.offsets):
            return False
        for ranges in self.lists:
            if (i in ranges) != (j in ranges) or (i in ranges and ranges.index(j) != ranges.index(i) + 1):
                return False
        return True


def merge_ranges(ast: UOp) -> UOp:
    """Merges until no neighbours can be."""
    while True:
        uses = _Uses(ast)
        pair = next(
            (
                (i, j)
                for ranges in sorted(uses.lists, key=len)
                for i, j in itertools.pairwise(ranges)
                if uses.mergeable(i, j)
            ),
            None,
        )
        if pair is None:
            return ast
        i, j = pair
        joint = j.replace(src=(UOp.const(dtypes.index, i.src[0].arg * j.src[0].arg),))
        ast = replace_ranges(ast, {i: None, j: joint})


def share_ranges(ast: UOp) -> UOp:
    """REDUCEs over one size that read the same data, and can run at the same time, run over the same ranges: in one
    pass.

    before:  REDUCE(exp(x[i, k] - m), k), REDUCE(y[i, l] * exp(x[i, l] - m), l)
    after:   REDUCE(exp(x[i, k] - m), k), REDUCE(y[i, k] * exp(x[i, k] - m), k)
    """
    for a, b in itertools.combinations(signature(ast).reduces, 2):
        changes = dict(zip(b.src[1:], a.src[1:]))
        if _run_together(ast, a, b) and _loads(a.src[0], a.src[1:]) & _loads(
            replace_ranges(b.src[0], dict(changes)), a.src[1:]
        ):
            return share_ranges(replace_ranges(ast, dict(changes)))
    return ast


def _run_together(ast: UOp, a: UOp, b: UOp) -> bool:
    """Equal sizes, the same loops around; one waits for no REDUCE that the other does not wait for, and not for the
    other; and no other REDUCE over the ranges of `b`."""
    if [r.src[0] for r in a.src[1:]] != [r.src[0] for r in b.src[1:]] or ranges_of(a) != ranges_of(b):
        return False
    first, second = ({v for v in u.src[0].toposort() if v.op is Ops.REDUCE} for u in (a, b))
    alone = not any(r in u.src[1:] for u in signature(ast).reduces if u is not b for r in b.src[1:])
    return alone and (first <= second or second <= first) and a not in second and b not in first


def _loads(value: UOp, ranges: tuple[UOp, ...]) -> set[UOp]:
    return {u for u in value.toposort() if u.op is Ops.LOAD and frozenset(ranges) <= ranges_of(u)}


def collapse(ast: UOp) -> UOp:
    """The kernel with as few ranges as its accesses allow."""
    return share_ranges(merge_ranges(drop_single_iterations(ast)))
