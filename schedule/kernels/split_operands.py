"""split_operands: operands of a contraction that lie in one buffer are arguments of their own.

Precondition: items, each kernel a SINK. Postcondition: the same accesses; the two factors of a product that is summed
up are read by different PARAMs, for how an operand is packed is decided by argument.

    sum(qkv[i, k] * qkv[j, k + d], k) of (qkv)  ==>  sum(a[i, k] * b[j, k + d], k) of (qkv, qkv)
"""

from __future__ import annotations

from dataclasses import replace

from manygrad.schedule.facts.items import Item
from manygrad.schedule.facts.nodes import reductions
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.track import made_from


def split_operands(items: list[Item]) -> list[Item]:
    return [_of_kernel(item) if item.what.op is Ops.SINK else item for item in items]


def _of_kernel(item: Item) -> Item:
    moved: dict[UOp, UOp] = {}
    args = list(item.args)
    for u in reductions(item.what):
        if u.src[0].op is not Ops.MUL:
            continue
        a, b = (x.src[0] if x.op is Ops.CAST else x for x in u.src[0].src)
        if (
            a.op is Ops.LOAD
            and b.op is Ops.LOAD
            and a.src[0].src[1:] != b.src[0].src[1:]
            and a.src[0].src[0] is b.src[0].src[0]
            and a.src[0].src[0].arg != 0
        ):
            param = a.src[0].src[0]
            moved[b.src[0]] = b.src[0].replace(src=(param.replace(arg=len(args)), *b.src[0].src[1:]))
            args.append(args[param.arg])
    if not moved:
        return item
    what = substitute(item.what, moved)
    made_from(what, item.what, line=item.line)
    return replace(item, what=what, args=args)
