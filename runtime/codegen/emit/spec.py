"""Spec of a list of instructions, whatever it computes.

`verify` walks it once and raises AssertionError, which names the rule and the instruction. That a value may be used
where it is used, `Emission.find` checks while the list is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops

POINTERS = (Low.PARAM, Low.SCRATCH, Low.SHARED)
ACCESSES = {Low.LOAD: 2, Low.STORE: 3, Low.STREAM: 3}  # sources without a condition


def _has_condition(x: Inst) -> bool:
    """Whether an access has one, or none, for all of its lanes or for each."""
    given = x.src[ACCESSES[x.op] :]  # type: ignore[index]
    return not given or (len(given) == 1 and given[0].dtype.is_bool and given[0].lanes in (1, x.lanes))


def _is_place(x: Inst) -> bool:
    """Whether an access has a pointer and an offset, one for all lanes or one for each."""
    pointer, offset = x.src[:2]
    return pointer.op in POINTERS and offset.dtype is dtypes.index and offset.lanes in (1, x.lanes)


InstructionRule = tuple[str, tuple[Ops | Low, ...], Callable[[Inst], bool]]
RULES: list[InstructionRule] = [
    ("a loop has a begin and an end, and steps", (Low.LOOP,), lambda x: len(x.src) == 2 and x.arg >= 1),
    ("a loop's bounds are single indices", (Low.LOOP,), lambda x: all(_is_index(s) for s in x.src)),
    ("a branch has one condition", (Low.IF,), lambda x: [(s.dtype.is_bool, s.lanes) for s in x.src] == [(True, 1)]),
    ("an access has a pointer and an offset", tuple(ACCESSES), _is_place),
    ("an access has one condition at most", tuple(ACCESSES), _has_condition),
    ("what is stored has the lanes of its store", (Low.STORE, Low.STREAM), lambda x: x.src[2].lanes == x.lanes),
    ("a copy is from an argument to shared memory", (Low.COPY,), lambda x: _copies(x)),
    ("what is read and set is a variable", (Low.GET, Low.SET), lambda x: x.src[0].op is Low.ACC),
    ("a variable has the lanes of what it is set to", (Low.SET,), lambda x: x.src[1].lanes == x.src[0].lanes),
    ("a variable has the type of what it is set to", (Low.SET,), lambda x: x.src[1].dtype is x.src[0].dtype),
    ("a mask of so many lanes has some of them", (Low.FIRST,), lambda x: 0 < x.arg <= x.lanes),
    ("a table has a number for each lane", (Low.TABLE,), lambda x: len(x.arg) == x.lanes),
    ("a comparison is true or false", tuple(GroupOp.COMPARE), lambda x: x.dtype.is_bool),
    (
        "values that meet have the same lanes",
        (*(GroupOp.ELEMENTWISE - {Ops.BITCAST}), Low.FMA),
        lambda x: all(s.lanes == x.lanes for s in x.src),
    ),
    ("bits stay as many as they are", (Ops.BITCAST,), lambda x: _bits(x) == _bits(x.src[0])),
    (
        "values that meet have the same type",
        (Ops.ADD, Ops.MUL, Ops.SUB, Ops.MAX, Ops.FDIV, *GroupOp.COMPARE, Low.FMA),
        lambda x: len({s.dtype for s in x.src}) == 1,
    ),
]


def _copies(x: Inst) -> bool:
    to, at, source, offset, *inside = x.src
    whole = all(s.dtype.is_bool and s.lanes == 1 for s in inside) and x.lanes * x.dtype.itemsize in (4, 8, 16)
    return (to.op, source.op) == (Low.SHARED, Low.PARAM) and _is_index(at) and _is_index(offset) and whole


def _bits(x: Inst) -> int:
    return x.lanes * x.dtype.itemsize


def _is_index(x: Inst) -> bool:
    return x.dtype is dtypes.index and x.lanes == 1


@cache
def _rules_of(op: Ops | Low) -> list[tuple[str, Callable[[Inst], bool]]]:
    return [(name, holds) for name, ops, holds in RULES if op in ops]


def verify(program: LoweredProgram) -> None:
    known: list[set[Inst]] = [set()]  # of each open block, what stands before in it
    for x in program.insts:
        if x.op in (Low.ELSE, Low.END):
            if len(known) == 1:
                raise AssertionError(f"{program.name}: a block ends that has begun: {x}")
            known.pop()
        for s in x.src:
            if not any(s in block for block in known):
                raise AssertionError(f"{program.name}: what is used stands before, in an open block: {s} in {x}")
        for name, holds in _rules_of(x.op):
            if not holds(x):
                raise AssertionError(f"{program.name}: {name}: {x} of {list(x.src)}")
        if x.op is Low.LOOP or x.op is Low.IF or x.op is Low.ELSE:
            known.append({x})
        elif x.op is not Low.END:
            known[-1].add(x)
    if len(known) != 1:
        raise AssertionError(f"{program.name}: a block ends that has begun: {len(known) - 1} are open at the end")
