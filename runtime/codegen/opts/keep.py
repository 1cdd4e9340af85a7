"""Values that a row's reduction computes of each element, kept for where the same is computed again.

before:  s = REDUCE(ADD, exp(x[i, k] - m), k);  y[i, j] = exp(x[i, j] - m) / s
after:   LOOP k: { e = exp(x[i, k] - m); local[k] = e; s += e };  LOOP j: y[i, j] = local[j] / s

One expression along two ranges of one size. Only what takes KEPT_WORK operations (`cost.py`) is kept.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.cost import KEPT_WORK, OPERATIONS
from manygrad.runtime.codegen.kernel.legalize import Written, as_written
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

PAD = 64  # elements: a row's last vector may reach beyond it


def kept_values(sig: Signature, r: UOp, again: UOp, written: Written = MappingProxyType({})) -> dict[UOp, UOp]:
    """Expression along `again` -> the same one along `r`, under a REDUCE over `r` alone: the largest there are.
    `written`: see `legalize`; with it operations are counted as they were written."""
    owners = [w for w in sig.reduces if w.src[1:] == (r,)]
    if not owners or again is r or r.src[0] is not again.src[0] or r.src[0].op is not Ops.CONST:
        return {}
    around = frozenset.intersection(*(ranges_of(w) for w in owners)) & frozenset(sig.loops)
    first = {
        u
        for w in owners
        for u in w.src[0].toposort()
        if u.op in _COMPUTED and u.dtype is not dtypes.index and r in ranges_of(u) and ranges_of(u) <= around | {r}
    }
    same: dict[UOp, UOp] = {}
    for v in sig.nodes:
        if v is again:
            same[v] = r
        elif again in ranges_of(v) and v.op is not Ops.STORE:
            same[v] = v.replace(src=tuple(same.get(s, s) for s in v.src))
    found = {v: u for v, u in same.items() if u in first}
    inside = {s for v in sig.nodes if v in found for s in v.src if s in found}
    largest = {v for v in found if v not in inside} | {
        s for v in sig.nodes if v not in found for s in v.src if s in found
    }
    # (in the kernel's order: rows lie in memory so)
    return {v: found[v] for v in sig.nodes if v in largest and _work(v, again, written) >= KEPT_WORK}


_COMPUTED = GroupOp.ELEMENTWISE | {Ops.CUSTOM}


def _work(v: UOp, again: UOp, written: Written) -> int:
    """Operations an element, those on indices and what does not change with `again` left out."""
    rounded = v.op is Ops.CAST and v.src[0] in written  # a half, widened for what reads it
    below = as_written(v.src[0] if rounded else v, written, lambda u: u.op not in (Ops.LOAD, Ops.REDUCE))
    return sum(
        OPERATIONS.get(u.op, 1)
        for u in below
        if u.op in _COMPUTED and u.dtype is not dtypes.index and again in ranges_of(u)
    )


def pitch(r: UOp) -> int:
    """Elements of a kept row in local memory."""
    return -(-int(r.src[0].arg) // PAD) * PAD


def kept_rows(u: UOp, r: UOp, nest: LoopNest) -> tuple[tuple[UOp, int], ...]:
    """(loop, its tile) of the tile positions, each of which has a row of its own."""
    return tuple((x, nest.tile.get(x, 1)) for x in nest.loops if x in ranges_of(u) and x is not r)


def kept_bytes(u: UOp, r: UOp, nest: LoopNest) -> int:
    return math.prod(n for _, n in kept_rows(u, r, nest)) * pitch(r) * u.dtype.itemsize
