"""lower_checks: an index that is looked at becomes the index, and beside what reads it a small reduction.

    CHECK(i, word; (low, size, spared))  ==>  i,  and in the SINK  STORE(word, max(word, largest of code(i)))

code(i) is 0 for low <= i < size and for `spared`, else 2 i + 2, or 1 - 2 i for an i below `low`: the word keeps the
worst index until somebody reads a value (`runtime/faults.py`). Nothing waits for it: what reads the index is fused and
scheduled as without the check.
"""

from __future__ import annotations

from manygrad.schedule.graph.simplify import broadcast
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.source import inherit
from manygrad.tensor.uop import CheckArg, Ops, ReduceArg, UOp
from manygrad.tensor.uop.rewrite import PatternMatcher, UPat, graph_rewrite

FAR = 1  # the code of an index of which twice is no int64

pm_unchecked = PatternMatcher([(UPat(Ops.CHECK, "u"), lambda u: u.src[0])])  # CHECK(i, word) -> i


def lower_checks(sink: UOp) -> UOp:
    checks = [u for u in sink.toposort() if u.op is Ops.CHECK]
    if not checks:
        return sink
    words: dict[UOp, UOp] = {}
    for u in checks:
        index, word = u.src
        if 0 in index.shape:
            continue
        before = words.get(word, word)  # (one line may check several indices)
        worst = UOp(Ops.MAX, dtypes.int64, (before, worst_of(index, u.arg)))
        words[word] = UOp(Ops.AFTER, dtypes.int64, (before, inherit(UOp(Ops.STORE, dtypes.void, (before, worst)), u)))
    return graph_rewrite(sink.replace(src=(*sink.src, *words.values())), pm_unchecked)


def worst_of(index: UOp, allowed: CheckArg) -> UOp:
    """The largest code of an index, of shape (1,)."""
    wide = dtypes.int64
    x = index if index.dtype is wide else UOp(Ops.CAST, wide, (index,))

    def const(value: int) -> UOp:
        return broadcast(UOp.const(wide, value), x.shape)

    def out_of_range(code: UOp) -> UOp:
        return (
            UOp(Ops.MAX, wide, (code, const(FAR))) if index.dtype.itemsize == 8 else code
        )  # twice the index may not be an int64

    twice = UOp(Ops.ADD, wide, (x, x))
    below = UOp(Ops.CMPLT, dtypes.bool, (x, const(allowed.size)))
    code = UOp(Ops.WHERE, wide, (below, const(0), out_of_range(UOp(Ops.ADD, wide, (twice, const(2))))))
    if index.dtype.min < allowed.low:
        negative = UOp(Ops.CMPLT, dtypes.bool, (x, const(allowed.low)))
        code = UOp(Ops.WHERE, wide, (negative, out_of_range(UOp(Ops.SUB, wide, (const(1), twice))), code))
    if allowed.spared is not None:
        code = UOp(Ops.WHERE, wide, (UOp(Ops.CMPEQ, dtypes.bool, (x, const(allowed.spared))), const(0), code))
    if code.shape:
        code = UOp(Ops.REDUCE, wide, (code,), ReduceArg(Ops.MAX, tuple(range(len(code.shape)))))
    return UOp(Ops.RESHAPE, wide, (code,), (1,))


def index_of(code: int) -> str:
    """The index behind a code that is not 0."""
    return "beyond 2**62" if code == FAR else str(code // 2 - 1 if code % 2 == 0 else -(code // 2))
