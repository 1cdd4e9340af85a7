"""Conditions under which a tile reads anything: blocks that run where they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from manygrad.runtime.codegen.analysis.affine import Affine, Position
from manygrad.runtime.codegen.analysis.describe import conjuncts
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.values import find, remember, value
from manygrad.runtime.codegen.loops.reduce import compared
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@contextmanager
def unless_masked(e: Emission, masks: tuple[UOp, ...], at: dict[UOp, int]) -> Iterator[bool]:
    """A block that runs where those conditions hold on which the whole tile agrees; gives False where none would
    run."""
    needed: dict[UOp, Inst | None] = {}
    for c in compared(masks):
        found = {decided(e, c, {**p, **at}) for p in e.positions(ranges_of(c) - at.keys())}
        one = found.pop() if len(found) == 1 else None
        if one is False:
            yield False
            return
        if one is not None:
            needed[c] = None if one is True else value(e, c, at)
    condition = e.conjunction(*needed.values())
    if condition is None:
        yield True
        return
    e.open(Low.IF, (condition,))
    with e.conditions():  # what is known now is not asked again
        for c in needed:
            for p in e.positions(ranges_of(c) - at.keys()):
                remember(e, c, {**p, **at}, e.const(True, dtypes.bool))
        for m in masks:
            for p in e.positions(ranges_of(m) - at.keys()):
                left = e.conjunction(*(value(e, c, {**p, **at}) for c in conjuncts(m)))
                remember(e, m, {**p, **at}, left or e.const(True, dtypes.bool))
        yield True
    e.close()


def decided(e: Emission, c: UOp, position: Position) -> Affine | bool | None:
    """As `compare` of the analysis; what is known in an open block counts."""
    known = find(e, c, position)
    return bool(known.arg) if known is not None and known.op is Low.CONST else e.scope.analysis.compare(c, position)


def apart(e: Emission, masks: tuple[UOp, ...], at: dict[UOp, int]) -> list[dict[UOp, int]]:
    """The tile positions which the conditions tell apart, those first at which all of them are decided now."""
    conditions = compared(masks)
    ranges = frozenset(r for c in conditions for r in ranges_of(c) if r is not e.scope.vectorized) - at.keys()
    asked = lambda p: any(isinstance(decided(e, c, {**p, **at}), Affine) for c in conditions)  # noqa: E731
    return sorted(e.positions(ranges), key=asked)
