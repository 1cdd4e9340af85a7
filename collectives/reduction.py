"""The kernel that reduces several sources into one, elementwise: an AST as the schedule makes them, which the device's
own code generation compiles.

    d[i] = (s0[i] + s1[i]) + (s2[i] + s3[i])

The order is the balanced tree over the sources. Half types are widened to float32 and the sum is rounded once. For bool
ADD and MAX are or, MUL is and. What else is computed of the sum (`finish`) is computed here. Every source is read once,
every destination is written once.
"""

from __future__ import annotations

from collections.abc import Sequence

from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes
from manygrad.tensor.uop import Ops, RangeArg, UOp
from manygrad.tensor.uop.rewrite import substitute

GROUP = 16  # sources of one kernel; more are reduced in groups of so many, which are subtrees of the same tree
OPS = {"add": Ops.ADD, "mul": Ops.MUL, "max": Ops.MAX}
_OF_BOOLS = {"add": Ops.OR, "mul": Ops.AND, "max": Ops.OR}


def op_for(op: str, dtype: DType) -> Ops:
    """The op that reduces values of a type."""
    return _OF_BOOLS[op] if dtype.is_bool else OPS[op]


def reduction(
    op: str, length: int, target: DType, sources: Sequence[DType], finish: UOp | None = None, copies: int = 0
) -> UOp:
    """PARAM 0, and so many `copies` after it, become the reduction of the PARAMs after them, of `length` elements each,
    rounded to `target`; or `finish` of it, an expression over PARAM 0. `TypeError` for types that are not summed in one
    type."""
    widest = {accumulate_dtype(d) for d in (target, *sources)}
    if len(widest) != 1:
        raise TypeError(f"cannot reduce {[d.name for d in sources]} into {target.name}")
    wide = widest.pop()
    count = UOp.const(dtypes.index, length)
    loops = (UOp(Ops.RANGE, dtypes.index, (count,), RangeArg(0, "loop")),) if length > 1 else ()
    at = loops[0] if loops else UOp.const(dtypes.index, 0)

    def place(slot: int, d: DType) -> UOp:
        return UOp(Ops.INDEX, d, (UOp(Ops.PARAM, d, (), slot), at))

    values = [_cast(UOp(Ops.LOAD, d, (place(i, d),)), wide) for i, d in enumerate(sources, 1 + copies)]
    total = _cast(_tree(op_for(op, wide), values), target)
    if finish is not None:
        total = substitute(finish, {UOp(Ops.PARAM, target, (), 0): total})
    stores = [UOp(Ops.STORE, dtypes.void, (place(i, total.dtype), total, *loops)) for i in range(1 + copies)]
    return UOp(Ops.SINK, dtypes.void, tuple(stores))


def _tree(op: Ops, values: Sequence[UOp]) -> UOp:
    """Split at the largest power of two below their number."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return UOp(op, values[0].dtype, (_tree(op, values[:half]), _tree(op, values[half:])))


def _cast(u: UOp, d: DType) -> UOp:
    return u if u.dtype is d else UOp(Ops.CAST, d, (u,))
