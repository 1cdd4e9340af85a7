"""Integers and conditions that stand in a loop tree: where loops begin and end, which tile is the last.

They are made of constants, sizes, the counters of loops around, and a few words for what only a running kernel knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, NamedTuple

from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


class Of(Enum):
    """Kinds of a beginning of an Index."""

    CONST = "a number"
    COUNTER = "the counter of a loop around"
    SIZE = "the size of a range"
    ORIGIN = "the first iteration of a range's open tile"
    BEGIN = "the first index of this call's part of the parallel loop"
    FINISH = "the one after the last"
    HELD = "up to which index this thread has run the kernel before: it holds what was packed for that"
    ITEM = "the number of this work item in its group"
    MEMBER = "its place along the first dimension: among the work items that make the group's sums"
    LINE = "the first element of a row at the beginning of a cache line"
    HERE = "its source, which stays in this block with all that depends on it"


@dataclass(frozen=True)
class Index:
    op: Ops | Of
    src: tuple[Index, ...] = ()
    arg: Any = None

    @property
    def number(self) -> int | None:
        """Its value where that is known."""
        return self.arg if self.op is Of.CONST else self.src[0].number if self.op is Of.HERE else None

    @property
    def is_condition(self) -> bool:
        return self.op in CONDITIONS or (self.op in (Ops.OR, Ops.AND) and self.src[0].is_condition)


class RowOf(NamedTuple):
    """The arg of a LINE: which row, and of which range its elements are."""

    range: UOp
    row: tuple[tuple[UOp, int], ...]  # where it is in the open tiles of the other loops


CONDITIONS = frozenset((Ops.CMPLT, Ops.CMPEQ, Ops.CMPNE))
BEGIN, FINISH, HELD, ITEM, MEMBER = map(Index, (Of.BEGIN, Of.FINISH, Of.HELD, Of.ITEM, Of.MEMBER))


class Numbering:
    """Numbers for the loops of one tree."""

    def __init__(self) -> None:
        self._numbers = count()

    def new(self) -> Index:
        return Index(Of.COUNTER, (), next(self._numbers))


def const(n: int) -> Index:
    return Index(Of.CONST, (), n)


def size(r: UOp) -> Index:
    return Index(Of.SIZE, (), r)


def origin(r: UOp) -> Index:
    return Index(Of.ORIGIN, (), r)


def here(x: Index) -> Index:
    return Index(Of.HERE, (x,))


def add(a: Index, b: Index) -> Index:
    if b.number == 0:
        return a
    return b if a.number == 0 else Index(Ops.ADD, (a, b))


def sub(a: Index, b: Index) -> Index:
    return Index(Ops.SUB, (a, b))


def mul(a: Index, n: int | Index) -> Index:
    return Index(Ops.MUL, (a, const(n) if isinstance(n, int) else n))


def div(a: Index, b: Index, positive: bool = True) -> Index:
    """`positive`: whether `a` is known not to be negative."""
    return Index(Ops.IDIV, (a, b), positive)


def mod(a: Index, b: Index) -> Index:
    return Index(Ops.MOD, (a, b), True)


def less(a: Index, b: Index) -> Index:
    return Index(Ops.CMPLT, (a, b))


def equal(a: Index, b: Index) -> Index:
    return Index(Ops.CMPEQ, (a, b))


def unequal(a: Index, b: Index) -> Index:
    return Index(Ops.CMPNE, (a, b))


def either(a: Index, b: Index) -> Index:
    """Also of the bits of integers."""
    return Index(Ops.OR, (a, b))


def both(a: Index, b: Index) -> Index:
    return Index(Ops.AND, (a, b))


FIRST_ITEM = equal(MEMBER, const(0))


def choose(condition: Index, a: Index, b: Index) -> Index:
    return Index(Ops.WHERE, (condition, a, b))
