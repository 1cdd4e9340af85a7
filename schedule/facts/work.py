"""work: how many operations an element of a fused value takes, which fusion weighs against reading it from memory."""

from __future__ import annotations

from collections.abc import Container

from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import is_buffer

CHEAP = 4  # weighted ops that are rather done twice than stored
GATHERED = 8  # weighted ops that are rather done for each element gathered than once and stored
EXPENSIVE = 30  # weighted ops; more is not computed twice
WEIGHT = {
    Ops.EXP: 8,
    Ops.LOG: 8,
    Ops.SIN: 10,
    Ops.POW: 40,
    Ops.SQRT: 4,
    Ops.RECIP: 3,
    Ops.FDIV: 3,
    Ops.IDIV: 6,
    Ops.MOD: 6,
}
NUMBERS = frozenset({Ops.CONST, Ops.IOTA, Ops.DEFINE_VAR})  # take no memory
LOWERED = GroupOp.COLLECTIVE | {Ops.COPY}  # stand in a CALL, as what is called
_LEAVES = NUMBERS | {Ops.AFTER, Ops.BARRIER, Ops.VIEW, Ops.BUFFER, Ops.PARAM}


def is_leaf(u: UOp) -> bool:
    """Memory or a number: nothing to fuse below it."""
    return u.op in _LEAVES or (not u.src and u.op in LOWERED) or (u.op is Ops.MSELECT and is_buffer(u))


def work(u: UOp, stored: Container[UOp], limit: int, above: UOp | None = None) -> int:
    """Weighted ops that an element of `u` takes from what is stored and from `above`, each once however many read it.

    Counting ends above `limit`, so that it costs no more than a few dozen nodes.
    """
    total = 0
    seen = {u, above}
    todo = [u]
    while todo and total <= limit:
        x = todo.pop()
        if x in stored or is_leaf(x):
            continue
        if x.op in GroupOp.ALU:
            total += WEIGHT.get(x.op, 1)
        for s in x.src:
            if s not in seen:
                seen.add(s)
                todo.append(s)
    return total
