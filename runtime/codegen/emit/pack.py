"""Packing: one tile of an operand is written to local memory."""

from __future__ import annotations

from dataclasses import replace

from manygrad.runtime.codegen.analysis.affine import Position
from manygrad.runtime.codegen.emit.dot_operands import dot_operand, dot_operand_parts, joined_parts, vectors_along
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.local import packed_at
from manygrad.runtime.codegen.emit.masks import unless_masked
from manygrad.runtime.codegen.emit.memory import transpose
from manygrad.runtime.codegen.emit.values import ragged_mask, value
from manygrad.runtime.codegen.loops.local import Stage
from manygrad.runtime.codegen.loops.tree import Pack
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import dtypes


def pack(e: Emission, node: Pack) -> None:
    stage, at = node.stage, e.scope
    with e.within(replace(at, ragged={**at.ragged, stage.loop: None}) if node.borrowed else at):
        if stage.turned:
            (_pack_rows_along if node.along else _pack_rows)(e, stage)
            return
        for outer in e.positions(frozenset(stage.ranges)):
            with unless_masked(e, node.masks, outer) as reached:
                for inner in e.positions(frozenset(stage.pitches)) if reached else ():
                    _pack_vector(e, stage, {**inner, **outer}, node.borrowed)


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
            found = [_packed(e, stage, {m: begin, k: at}) for at in part]
            guard = () if len(part) == n else (e.emit(Low.FIRST, dtypes.bool, (), len(part), n),)
            for number, columns in enumerate(zip(*found)):
                vectors = [e.splat(x, n) for x in columns] + [e.const(0, dtypes.int32, n)] * (n - len(part))
                for row, turned in enumerate(transpose(e, vectors)[: e.scope.tile[m] - begin]):
                    pointer, offset, constant, _ = packed_at(e, stage, {m: begin + row, k: part[0]})
                    src = (pointer, offset, turned, *guard)
                    e.emit(Low.STORE, dtypes.void, src, constant + number * stage.part, n, here=True)


def _pack_rows_along(e: Emission, stage: Stage) -> None:
    """The same, of what lies along the reduction and is packed in parts: row by row, vectors along the reduction."""
    m, (k,) = stage.loop, stage.ranges
    n = e.scope.tile[k] // stage.group
    for row in range(e.scope.tile[m]):
        with vectors_along(e, k, n, whole=True):
            halves = [e.splat(value(e, stage.value, {m: row, k: begin}), n) for begin in (0, n)]
        pointer, offset, constant, _ = packed_at(e, stage, {m: row, k: 0})
        for number, found in enumerate(joined_parts(e, stage.parts, *halves)):
            src = (pointer, offset, found)
            e.emit(Low.STORE, dtypes.void, src, constant + number * stage.part, n, here=True)


def _packed(e: Emission, stage: Stage, position: Position) -> list[Inst]:
    """Elements that are packed of the value at a position: of a group along the reduction, of each of its parts."""
    u, k = stage.value, stage.grouped
    if k is None:
        return [value(e, u, position)]
    if u.dtype is dtypes.float32:
        return dot_operand_parts(e, u, k, position)
    return [dot_operand(e, u, k, position)]


def _pack_vector(e: Emission, stage: Stage, position: Position, borrowed: bool) -> None:
    pointer, offset, constant, lanes = packed_at(e, stage, position)
    mask = ragged_mask(e, position) if borrowed else None
    guard = () if mask is None else (mask,)
    for number, found in enumerate(_packed(e, stage, position)):
        src = (pointer, offset, e.splat(found, lanes), *guard)
        e.emit(Low.STORE, dtypes.void, src, constant + number * stage.part, lanes, here=True)
