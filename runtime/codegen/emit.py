"""Emission of lowered instructions into nested blocks.

An instruction goes into the outermost open block in which its sources are known, and an equal one is emitted once: so
loop-invariant code moves out and common subexpressions are shared while the code is being made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops

INDEX = dtypes.index


class Block:
    """An open block: what was emitted in it, and what is known there."""

    def __init__(self, begin: Inst | None = None) -> None:
        self.begin = begin
        self.insts: list[Inst] = []
        self.known: dict[Any, Inst] = {}  # (op, dtype, lanes, src, arg) -> the same instruction
        self.values: dict[Any, Inst] = {}  # (expression, position) -> its value


class Emitter:
    def __init__(self) -> None:
        self.blocks: list[Block] = [Block()]
        self.reads_from = (
            0  # the block that loads are not moved out of: only under its condition is there something to read
        )

    def emit(
        self,
        op: Ops | Low,
        dtype: DType,
        src: tuple[Inst, ...] = (),
        arg: Any = None,
        lanes: int = 1,
        here: bool = False,
    ) -> Inst:
        """The instruction, in the outermost block where its sources are known; `here`: a new one in this block."""
        depth = len(self.blocks) - 1 if here else max((s.depth for s in src), default=0)
        if op is Low.LOAD:
            depth = max(depth, self.reads_from)
        block = self.blocks[depth]
        key = (op, dtype, lanes, src, _key(arg))
        if not here and (found := block.known.get(key)) is not None:
            return found
        inst = Inst(op, dtype, lanes, src, arg, depth)
        block.insts.append(inst)
        if not here:
            block.known[key] = inst
        return inst

    def open(self, begin: Inst | None = None) -> None:
        self.blocks.append(Block(begin))

    def close(self) -> None:
        block = self.blocks.pop()
        into = self.blocks[-1].insts
        if block.begin is not None:
            into.append(block.begin)
        into.extend(block.insts)
        if block.begin is not None:
            into.append(Inst(Low.END, dtypes.void, 1, (), None, len(self.blocks) - 1))

    def branch(self, condition: Inst, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """One or the other; what either moves out stands before both."""
        begin = Inst(Low.IF, dtypes.void, 1, (condition,), None, len(self.blocks))
        self.open(begin)
        then()
        first = self.blocks.pop().insts
        other = Inst(Low.ELSE, dtypes.void, 1, (), None, len(self.blocks))
        self.open(other)
        otherwise()
        second = self.blocks.pop().insts
        end = Inst(Low.END, dtypes.void, 1, (), None, len(self.blocks) - 1)
        self.blocks[-1].insts.extend([begin, *first, other, *second, end])

    def const(self, value: Any, dtype: DType = INDEX, lanes: int = 1) -> Inst:
        return self.emit(Low.CONST, dtype, (), value, lanes)

    def add(self, a: Inst, b: Inst) -> Inst:
        if b.op is Low.CONST and b.arg == 0:
            return a
        if a.op is Low.CONST and a.arg == 0:
            return b
        return self.emit(Ops.ADD, INDEX, (a, b))

    def splat(self, x: Inst, lanes: int) -> Inst:
        if x.lanes == lanes:
            return x
        if x.op is Low.CONST:
            return self.emit(Low.CONST, x.dtype, (), x.arg, lanes)
        return self.emit(Low.SPLAT, x.dtype, (x,), None, lanes)

    def alu(self, op: Ops | Low, dtype: DType, *src: Inst, arg: Any = None) -> Inst:
        """`op` on values, scalars broadcast where there is a vector."""
        lanes = max(s.lanes for s in src)
        return self.emit(op, dtype, tuple(self.splat(s, lanes) for s in src), arg, lanes)


def _key(arg: Any) -> Any:
    return (type(arg), arg.hex()) if type(arg) is float else (type(arg), arg)
