"""Sums of values that zeros are padded to, each where the others have zeros: one value made of parts, each written
where it belongs.

    ADD(PAD(a, (0, m)), PAD(b, (n, 0)))  ==>  CAT(a, b)      a has n elements along that axis, b has m

They are the gradients of what a `chunk` or a `split` cuts up. Only parts made by reductions are joined so: these are
stored in any case, then each by its own kernel into the whole, and the sum is no kernel of its own.
"""

from __future__ import annotations

from typing import Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import GroupOp, Ops, UOp

_TURNED = frozenset({Ops.RESHAPE, Ops.PERMUTE})
_WITHIN = GroupOp.ELEMENTWISE | GroupOp.MOVEMENT - {Ops.EXPAND}


def join_padded(u: UOp) -> UOp | None:
    """ADD of PADs that lie side by side, and together cover one axis -> CAT."""
    if u.src[0].op is not Ops.PAD and u.src[1].op is not Ops.PAD:
        return None
    parts: list[UOp] = []
    todo = [u]
    while todo:
        x = todo.pop()
        if x.op is Ops.ADD:
            todo += x.src
        elif x.op is Ops.PAD:
            parts.append(x)
        else:
            return None
    axes = {i for x in parts for i, around in enumerate(x.arg) if around != (0, 0)}
    if len(axes) != 1:
        return None
    axis = axes.pop()
    parts.sort(key=lambda x: _first(x, axis))
    at = 0
    for x in parts:
        if _first(x, axis) != at or not isinstance(n := x.src[0].shape[axis], int):
            return None
        at += n
    whole = at == u.shape[axis] and all(made_by_reduction(x.src[0]) for x in parts)
    return UOp(Ops.CAT, u.dtype, tuple(x.src[0] for x in parts), axis) if whole else None


def _first(pad: UOp, axis: int) -> Any:
    return pad.arg[axis][0]


def made_by_reduction(u: UOp) -> bool:
    """Whether each element of `u` takes a reduction of its own."""
    seen, todo = {u}, [u]
    while todo:
        x = todo.pop()
        if x.op is Ops.REDUCE:
            return True
        if x.op in _WITHIN:
            new = [s for s in x.src if s not in seen]
            seen.update(new)
            todo += new
    return False


def store_part(target: UOp, value: UOp) -> UOp:
    """STORE(target, value); a reduction's kernel keeps the loops of its own dims, what turns them turns the target
    instead."""
    if made_by_reduction(value):
        while value.op in _TURNED and _ints(value.src[0].shape):
            x = value.src[0]
            if value.op is Ops.RESHAPE:
                target = UOp(Ops.RESHAPE, target.dtype, (target,), x.shape)
            else:
                target = UOp(
                    Ops.PERMUTE, target.dtype, (target,), tuple(value.arg.index(i) for i in range(len(value.arg)))
                )
            value = x
    return inherit(UOp(Ops.STORE, dtypes.void, (target, value)), value)


def _ints(shape: tuple[Any, ...]) -> bool:
    return all(isinstance(d, int) for d in shape)
