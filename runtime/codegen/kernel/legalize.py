"""Rewrites what no machine has: arithmetic on half types, and transcendentals.

before:  ADD.bfloat16(a, b)                          EXP.float32(x)
after:   CAST.bfloat16(ADD.float32(CAST(a), CAST(b)))  a polynomial

Halves are computed in float32 and rounded after every operation, as NumPy and PyTorch do.

Optimisations are chosen for the kernel after it, but weigh operations as they were written: an exponential as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from manygrad.runtime.codegen.kernel.power import power
from manygrad.runtime.codegen.kernel.transcendental import exp, log, sin
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.rewrite import rebuild
from manygrad.tensor.uop.uop import UOp

f32 = dtypes.float32
Written = Mapping[UOp, UOp]  # what stands in place of an operation -> that operation, its sources legalized
EXPANSIONS: dict[Ops, Callable[..., UOp]] = {
    Ops.EXP: exp,
    Ops.LOG: lambda x, scales: log(x),
    Ops.SIN: lambda x, scales: sin(x),
    Ops.POW: power,
}


class Legalized(NamedTuple):
    ast: UOp
    written: Written


def widen_halves(u: UOp) -> UOp | None:
    """ALU(half...) -> ALU(float32...)"""
    if u.op is Ops.REDUCE and u.dtype.is_half:
        return UOp(Ops.REDUCE, f32, (u.src[0].cast(f32), *u.src[1:]), u.arg)
    if u.op not in GroupOp.ALU or u.op is Ops.WHERE or not u.src[0].dtype.is_half:
        return None
    return UOp(u.op, f32 if u.dtype.is_half else u.dtype, tuple(s.cast(f32) for s in u.src), u.arg)


def expand_transcendentals(u: UOp, scales: bool) -> UOp | None:
    """EXP, LOG, SIN, POW of float32 or float64 -> arithmetic"""
    expansion = EXPANSIONS.get(u.op)
    return expansion(*u.src, scales) if expansion is not None and u.dtype in (f32, dtypes.float64) else None


def legalize(ast: UOp, scales: bool = False) -> Legalized:
    """The kernel in operations that the renderer has; `scales`: also look-ups in registers and x * 2**n in one
    (AVX-512)."""
    written: dict[UOp, UOp] = {}

    def change(u: UOp) -> UOp | None:
        wide = widen_halves(u)
        expanded = expand_transcendentals(u if wide is None else wide, scales)
        new = wide if expanded is None else expanded
        if new is None:
            return None
        rounded = new.cast(u.dtype)
        written[rounded] = u
        if u.op is Ops.REDUCE:
            written[new] = u
        return rounded

    return Legalized(rebuild(ast, change), written)


def as_written(root: UOp, written: Written, enter: Callable[[UOp], bool] = lambda u: True) -> list[UOp]:
    """All nodes below and including a legalized one, sources first, as they were before. `enter(u)` false: do not look
    below `u`."""
    done: dict[UOp, None] = {}
    stack = [written.get(root, root)]
    while stack:
        u = stack[-1]
        waiting = [x for s in (u.src if enter(u) else ()) if (x := written.get(s, s)) not in done]
        if waiting:
            stack += waiting[::-1]
        else:
            done[stack.pop()] = None
    return list(done)
