"""What a gradient computes again reads memory, and only once the gradient that arrives is there.

`later(x, g)` is a value `x` in memory behind a BARRIER: what is made from it is another node than what was made from
`x` before, so it is computed again and nothing of the first time is kept for it.
"""

from __future__ import annotations

from manygrad.tensor.uop import GroupOp, Ops, UOp


def stored(u: UOp) -> UOp:
    """`u` in memory: as it is if it stands there, else CONTIGUOUS; views stay views."""
    if u.op in GroupOp.VIEW:
        return u.replace(src=(stored(u.src[0]),))
    return (
        u
        if u.op in (Ops.BUFFER, Ops.AFTER, Ops.CONTIGUOUS, Ops.CONST, Ops.BARRIER)
        else UOp(Ops.CONTIGUOUS, u.dtype, (u,))
    )


def behind(u: UOp, dependency: UOp) -> UOp:
    """A stored `u`, to be read once `dependency` can be computed."""
    return (
        u.replace(src=(behind(u.src[0], dependency),))
        if u.op in GroupOp.VIEW
        else UOp(Ops.BARRIER, u.dtype, (u, dependency))
    )


def later(u: UOp, dependency: UOp) -> UOp:
    return behind(stored(u), dependency)
