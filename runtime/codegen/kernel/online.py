"""Sums of exponentials below a maximum, made in one pass with the maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018).

before:  m = REDUCE(MAX, x[i, k], k);  s = REDUCE(ADD, exp(x[i, j] - m), j)
after:   LOOP j: { n = max(m, x[i, j]); s = s * exp(m - n) + exp(x[i, j] - n); m = n }

Here: what such a pair looks like. The lowering is in `emit/online.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.kernel.transcendental import exp
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class Pair:
    maximum: UOp
    total: UOp
    below: UOp  # SUB(x, the maximum, or what equals it where it is finite), of which `total` adds up the exponentials


def online_pairs(sig: Signature) -> list[Pair]:
    return [
        p
        for w in sig.reduces
        for u in sig.reduces
        if len(w.src) == len(u.src) == 2 and (p := online_pair(sig, w.src[1], u.src[1])) is not None
    ]


def online_pair(sig: Signature, r: UOp, x: UOp) -> Pair | None:
    """The sum over `r` of exponentials below the maximum over `x`; None: these are something else."""
    maxima, totals = ([v for v in sig.reduces if s in v.src[1:]] for s in (x, r))
    if len(maxima) != 1 or len(totals) != 1:
        return None
    u, w = maxima[0], totals[0]
    if (u.arg, w.arg) != (Ops.MAX, Ops.ADD) or u.src[1:] != (x,) or w.src[1:] != (r,):
        return None
    if (
        r.src[0] is not x.src[0]
        or r.src[0].op is not Ops.CONST
        or not u.dtype.is_float
        or u.dtype is not w.dtype
        or ranges_of(u) != ranges_of(w)
    ):
        return None
    if [v for v in sig.reduces if v in w.src[0].toposort()] != [u] or any(
        v in u.src[0].toposort() for v in sig.reduces
    ):
        return None
    below = _exponent(w.src[0])
    if (
        below is None
        or below.op is not Ops.SUB
        or r in ranges_of(below.src[1])
        or below.src[0] is not _moved(u.src[0], x, r)
    ):
        return None
    return Pair(u, w, below) if _finite_value(below.src[1], u) else None


def _exponent(v: UOp) -> UOp | None:
    """`t` where `v` is exp(t), also written out."""
    if v.op is Ops.EXP:
        return v.src[0]
    return next(
        (t for t in v.toposort() if t.op is Ops.SUB and t.dtype is v.dtype and v in (exp(t, True), exp(t, False))), None
    )


def _moved(v: UOp, x: UOp, r: UOp) -> UOp:
    """`v` along `r` in place of `x`."""
    same = {x: r}
    for u in v.toposort():
        if u is not x and x in ranges_of(u):
            same[u] = u.replace(src=tuple(same.get(s, s) for s in u.src))
    return same.get(v, v)


def _finite_value(v: UOp, u: UOp) -> bool:
    """Whether `v` is `u` where that is finite: it is `u`, or chosen by comparisons of it with itself and infinities
    alone."""
    if v is u:
        return True
    if v.op is not Ops.WHERE or v.src[1] is not u:
        return False
    known: dict[UOp, bool] = {}
    for c in v.src[0].toposort(lambda s: s is not u):
        if (
            c.op in (Ops.CMPNE, Ops.CMPEQ)
            and c.src[0] is u
            and (c.src[1] is u or (c.src[1].op is Ops.CONST and c.src[1].arg in (_INF, -_INF)))
        ):
            known[c] = (c.src[1] is u) == (c.op is Ops.CMPEQ)
        elif c.op in _LOGIC and all(s in known for s in c.src):
            known[c] = _LOGIC[c.op](*(known[s] for s in c.src))
    return known.get(v.src[0], False)


_INF = float("inf")
_LOGIC: dict[Ops, Callable[..., bool]] = {
    Ops.NOT: lambda a: not a,
    Ops.AND: lambda a, b: a and b,
    Ops.OR: lambda a, b: a or b,
}
