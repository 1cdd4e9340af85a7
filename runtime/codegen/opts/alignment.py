"""Where the vectors of a kernel's stores begin, and whether they may begin elsewhere (`loops/rows.py`, `choose/`)."""

from __future__ import annotations

from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.cost import LEAST_ROW_VECTORS
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


def whole_vectors(store: UOp, vectorized: UOp, lanes: int) -> bool:
    """Whether every vector stored along `vectorized` begins at a multiple of its length."""
    analysis = TileAnalysis({vectorized: lanes}, vectorized, lanes)
    a = analysis.affine(store.src[0].src[1], {})
    return a is not None and a.stride == 1 and a.constant % lanes == 0 and analysis.alignment(a.terms) % lanes == 0


def begins_anywhere(sig: Signature, nest: LoopNest) -> bool:
    """Whether vectors may begin at any element of the rows that the kernel stores."""
    vectorized = nest.vectorized
    if (
        vectorized is None
        or vectorized is not nest.loops[-1]
        or vectorized in nest.loops[: nest.parallel]
        or nest.block
        or nest.staged
    ):
        return False
    if vectorized.src[0].op is not Ops.CONST or vectorized.src[0].arg < LEAST_ROW_VECTORS * nest.lanes:
        return False
    if any(vectorized in ranges_of(u) for u in sig.reduces) or len({s.src[0].src[1] for s in sig.stores}) > 1:
        return False
    analysis = TileAnalysis({vectorized: 1}, vectorized, nest.lanes)
    accesses = [u.src[0] for u in sig.nodes if u.op in (Ops.LOAD, Ops.STORE) and vectorized in ranges_of(u.src[0])]
    forms = [analysis.affine(index.src[1], {}) for index in accesses]
    return all(len(index.src) == 2 for index in accesses) and all(
        a is not None and not a.table and a.stride == 1 for a in forms
    )
