"""Asynchronous copies of what a group shares, as it lies in the argument."""

from __future__ import annotations

from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.fragments import chunk_offset
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.memory import place_of
from manygrad.runtime.codegen.emit.shared import copied_to, memory_of
from manygrad.runtime.codegen.loops.local import GroupStage
from manygrad.runtime.codegen.loops.tree import CopyPart
from manygrad.runtime.codegen.lowered import Low


def copy_part(e: Emission, n: CopyPart) -> None:
    """The open tiles, which are one run of elements."""
    stage = n.stage
    pointer, offset, constant = place_of(e, stage.source)
    to = copied_to(e, stage, n.to) if isinstance(stage, GroupStage) else chunk_offset(e, stage, n.to)
    inside = (instruction(e, n.inside),) if n.inside.number is None else ()
    src = (memory_of(e, stage), to, pointer, offset, *inside)
    e.emit(Low.COPY, stage.value.dtype, src, constant, e.scope.lanes, here=True)
