"""Packing: one tile of an operand is written to local memory."""

from __future__ import annotations

from dataclasses import replace

from manygrad.runtime.codegen.affine import Position
from manygrad.runtime.codegen.emit.dot_operands import dot_operand
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.local import packed_at
from manygrad.runtime.codegen.emit.masks import unless_masked
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
        skipped = masks(e.kernel, [stage.value], frozenset(stage.ranges))
        for outer in e.positions(frozenset(stage.ranges)):
            with unless_masked(e, skipped, outer) as reached:
                for inner in e.positions(frozenset(stage.pitches)) if reached else ():
                    _pack_vector(e, stage, {**inner, **outer}, borrowed)


def _pack_vector(e: Emission, stage: Stage, position: Position, borrowed: bool) -> None:
    pointer, offset, constant, lanes = packed_at(e, stage, position)
    u = stage.value
    found = value(e, u, position) if stage.grouped is None else dot_operand(e, u, stage.grouped, position)
    mask = ragged_mask(e, position) if borrowed else None
    guard = () if mask is None else (mask,)
    e.emit(Low.STORE, dtypes.void, (pointer, offset, e.splat(found, lanes), *guard), constant, lanes, here=True)
