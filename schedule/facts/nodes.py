"""Lists of a kernel's nodes, found once: the decisions what runs together ask for them again and again."""

from __future__ import annotations

from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.table import memo


@memo
def indices(kernel: UOp) -> list[UOp]:
    return [u for u in kernel.below() if u.op is Ops.INDEX]


@memo
def reductions(kernel: UOp) -> list[UOp]:
    return [u for u in kernel.below() if u.op is Ops.REDUCE]
