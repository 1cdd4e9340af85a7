"""Packing: one tile of an operand is written to local memory."""

from __future__ import annotations

from dataclasses import replace

from manygrad.runtime.codegen.affine import Position
from manygrad.runtime.codegen.emit.dot_operands import dot_operand
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.local import packed_at
from manygrad.runtime.codegen.emit.masks import unless_masked
from manygrad.runtime.codegen.emit.memory import transpose
from manygrad.runtime.codegen.emit.values import ragged_mask, value
from manygrad.runtime.codegen.loops.local import Stage
from manygrad.runtime.codegen.loops.reduce import masks
from manygrad.runtime.codegen.lowered import Low
from manygrad.tensor.dtype import dtypes


def pack(e: Emission, stage: Stage) -> None:
    at = e.scope
    borrowed = at.lane is stage.loop and at.lane is not e.nest.lane
    # (a tile need not fill borrowed vectors)
    with e.within(replace(at, ragged={**at.ragged, stage.loop: None}) if borrowed else at):
        if stage.turned:
            _pack_rows(e, stage)
            return
        skipped = masks(e.kernel, [stage.value], frozenset(stage.ranges))
        for outer in e.positions(frozenset(stage.ranges)):
            with unless_masked(e, skipped, outer) as reached:
                for inner in e.positions(frozenset(stage.pitches)) if reached else ():
                    _pack_vector(e, stage, {**inner, **outer}, borrowed)


def _pack_rows(e: Emission, stage: Stage) -> None:
    """For a matrix unit: groups along the reduction in vectors along the rows are turned, in squares, and stored row by
    row.

    before:  [a[k, m], a[k+1, m]], [a[k, m+1], a[k+1, m+1]] ..      for each second k
    after:   [a[k, m], a[k+1, m]], [a[k+2, m], a[k+3, m]] ..        for each m
    """
    m, k, n = stage.loop, stage.grouped, e.scope.lanes
    assert k is not None and n & (n - 1) == 0
    groups = [at[k] for at in e.positions(frozenset({k}))] or [0]
    for first in e.positions(frozenset({m})):
        begin = first.get(m, 0)
        for i in range(0, len(groups), n):
            part = groups[i : i + n]
            vectors = [e.splat(dot_operand(e, stage.value, k, {m: begin, k: at}), n) for at in part]
            vectors += [e.const(0, dtypes.int32, n)] * (n - len(part))
            guard = () if len(part) == n else (e.emit(Low.FIRST, dtypes.bool, (), len(part), n),)
            for row, found in enumerate(transpose(e, vectors)[: e.scope.tile[m] - begin]):
                pointer, offset, constant, _ = packed_at(e, stage, {m: begin + row, k: part[0]})
                e.emit(Low.STORE, dtypes.void, (pointer, offset, found, *guard), constant, n, here=True)


def _pack_vector(e: Emission, stage: Stage, position: Position, borrowed: bool) -> None:
    pointer, offset, constant, lanes = packed_at(e, stage, position)
    u = stage.value
    found = value(e, u, position) if stage.grouped is None else dot_operand(e, u, stage.grouped, position)
    mask = ragged_mask(e, position) if borrowed else None
    guard = () if mask is None else (mask,)
    e.emit(Low.STORE, dtypes.void, (pointer, offset, e.splat(found, lanes), *guard), constant, lanes, here=True)
