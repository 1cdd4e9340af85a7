"""Stores of narrow vectors that lie side by side become one of a whole register.

A vector of lanes is as wide as the widest type of a kernel, so one of float32 that is rounded to bfloat16 is stored in
halves of a register: each a write of half a cache line, and an instruction to make it narrow.

before:  STORE p[i + 0] = a.bfloat16x16; STORE p[i + 16] = b.bfloat16x16
after:   STORE p[i + 0] = (a, b).bfloat16x32
"""

from __future__ import annotations

from collections.abc import Sequence

from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops

# what ends a run of stores: another block, or memory that is read or written by something else
BARRIERS = frozenset({
    Low.LOOP, Low.IF, Low.ELSE, Low.END, Low.BARRIER, Low.EXCHANGE, Low.STREAM, Low.MATRIX_LOAD, Low.MATRIX_STORE,
})  # fmt: skip


def with_wide_stores(insts: Sequence[Inst]) -> tuple[Inst, ...]:
    """The same instructions, with fewer stores. One is moved down to its neighbour past loads of other arguments: no
    iteration of a loop reads what another one writes."""
    register = max((x.lanes * x.dtype.itemsize for x in insts if x.lanes > 1 and not x.dtype.is_bool), default=0)
    out: list[Inst] = []
    run: list[Inst] = []  # the stores so far that the next one may join
    gone: set[Inst] = set()
    for x in insts:
        if x.op is Low.STORE and _is_narrow(x, register):
            run = [*run, x] if run and _follows(run[-1], x) else [x]
            out.append(x)
            while len(run) > 1 and _fits(run[-2], run[-1], register):
                *run, first, last = run
                made = _together(first, last)
                gone |= {first, last}
                out += made
                run.append(made[-1])
            continue
        if run and (x.op in BARRIERS or x.op is Low.STORE or (x.op is Low.LOAD and x.src[0] is run[-1].src[0])):
            run = []
        out.append(x)
    return tuple(x for x in out if x not in gone)


def _is_narrow(x: Inst, register: int) -> bool:
    """Whether a store is of a part of a register, to an argument, and of all lanes, one after the other."""
    pointer, offset, value = x.src[:3]
    plain = len(x.src) == 3 and offset.lanes == 1 and x.dtype is dtypes.void and not value.dtype.is_bool
    same = pointer.op is Low.PARAM and pointer.dtype.itemsize == value.dtype.itemsize
    return plain and same and 1 < value.lanes * value.dtype.itemsize < register and value.lanes > 1


def _follows(before: Inst, x: Inst) -> bool:
    value = before.src[2]
    same = before.src[:2] == x.src[:2] and value.dtype is x.src[2].dtype
    return same and before.arg + value.lanes == x.arg


def _fits(first: Inst, last: Inst, register: int) -> bool:
    a, b = first.src[2], last.src[2]
    return a.lanes == b.lanes and 2 * a.lanes * a.dtype.itemsize <= register


def _together(first: Inst, last: Inst) -> list[Inst]:
    a, b = first.src[2], last.src[2]
    made = [_side_by_side(a, b)]
    if a.op is b.op is Ops.CAST and a.dtype is dtypes.bfloat16 and a.src[0].dtype is b.src[0].dtype:  # (takes less)
        joined = _side_by_side(a.src[0], b.src[0])
        made = [joined, Inst(Ops.CAST, a.dtype, joined.lanes, (joined,), a.arg, last.depth)]
    return [*made, Inst(Low.STORE, dtypes.void, first.lanes, (*first.src[:2], made[-1]), first.arg, last.depth)]


def _side_by_side(a: Inst, b: Inst) -> Inst:
    return Inst(Low.SHUFFLE, a.dtype, 2 * a.lanes, (a, b), tuple(range(2 * a.lanes)), max(a.depth, b.depth))
