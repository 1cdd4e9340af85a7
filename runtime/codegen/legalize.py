"""Rewrites what no machine has: arithmetic on half types, and transcendentals.

before:  ADD.bfloat16(a, b)                          EXP.float32(x)
after:   CAST.bfloat16(ADD.float32(CAST(a), CAST(b)))  a polynomial

Halves are computed in float32 and rounded after every operation, as NumPy and PyTorch do.
"""

from __future__ import annotations

from manygrad.runtime.codegen.rewrite import rebuild
from manygrad.runtime.codegen.transcendental import EXPANSIONS
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.uop import UOp

f32 = dtypes.float32


def widen_halves(u: UOp) -> UOp | None:
    """ALU(half...) -> CAST(ALU(float32...))"""
    if u.op is Ops.REDUCE and u.dtype.is_half:
        return UOp(Ops.REDUCE, f32, (u.src[0].cast(f32), *u.src[1:]), u.arg).cast(u.dtype)
    if u.op not in GroupOp.ALU or u.op is Ops.WHERE or not u.src[0].dtype.is_half:
        return None
    wide = UOp(u.op, f32 if u.dtype.is_half else u.dtype, tuple(s.cast(f32) for s in u.src), u.arg)
    return wide.cast(u.dtype)


def expand_transcendentals(u: UOp, scales: bool) -> UOp | None:
    """EXP, LOG, SIN of float32 or float64 -> arithmetic"""
    expansion = EXPANSIONS.get(u.op)
    return expansion(u.src[0], scales) if expansion is not None and u.dtype in (f32, dtypes.float64) else None


def legalize(ast: UOp, scales: bool = False) -> UOp:
    """The kernel in operations that the renderer has; `scales`: also look-ups in registers and x * 2**n in one
    (AVX-512)."""
    return rebuild(rebuild(ast, widen_halves), lambda u: expand_transcendentals(u, scales))
