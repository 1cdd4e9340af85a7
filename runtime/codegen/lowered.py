"""The lowered form of a kernel: a linear list of typed instructions with explicit vector widths.

A renderer prints it one to one. Blocks are bracketed (LOOP ... END, IF ... ELSE ... END); everything else is a value or
an effect. Arithmetic keeps the names of `Ops`; what only machines know stands in `Low`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from manygrad.tensor.dtype import DType
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

EXCHANGE_BYTES = 8  # of a value in shared memory, where work items exchange them through it
SCRATCH_BYTES = 64 << 20  # address space of a thread's scratch memory; only what a kernel touches is ever backed


class Low(Enum):
    __hash__ = object.__hash__  # (as that of `Ops`)

    PARAM = auto()  # pointer of kernel argument arg
    SCRATCH = auto()  # pointer into the thread's scratch memory; arg byte offset
    VAR = auto()  # integer argument number arg
    BEGIN = auto()  # first and
    FINISH = auto()  # one after the last index of this call's part of the parallel loop
    # only where the machine has groups (`Machine.group_items`):
    ITEM = auto()  # place of this work item along dimension arg of its group; arg None: its number in the group
    SHARED = auto()  # pointer into the memory that a group shares; arg byte offset
    BARRIER = auto()  # all work items of the group are here, and what they wrote to shared memory is seen
    # only where work items go on meanwhile (`Machine.copies_ahead`):
    COPY = auto()  # src (pointer, offset, pointer, offset[, condition]); arg constant added to the second offset: so
    # many elements are copied from the second place to the first, of shared memory; zeros where the condition is false
    COMMIT = auto()  # the copies since the last one are a set
    AWAIT = auto()  # all of this work item's sets are done but the last arg
    EXCHANGE = auto()  # src (value,): that of the work item whose place along dimension 0 differs in the bit arg;
    # all work items of the group are here
    CONST = auto()  # arg; lanes > 1: all the same
    HERE = auto()  # the index arg, as the origin of a tile: what depends on it stays in its block
    LOOP = auto()  # src (begin, end); arg step; its value is the index
    IF = auto()  # src (condition,)
    ELSE = auto()
    END = auto()
    ACC = auto()  # a variable, set to src[0] here; lanes
    GET = auto()  # src (ACC,)
    SET = auto()  # src (ACC, value)
    LOAD = (
        auto()
    )  # src (pointer, offset[, condition or mask]); arg constant added to the offset; both count the pointer's elements
    STORE = auto()  # src (pointer, offset, value[, condition or mask]); arg as LOAD
    STREAM = auto()  # a STORE of a vector past the caches; its address is aligned if the pointer is
    PREFETCH = auto()  # src (pointer, offset); arg as LOAD: a hint, no access
    SPLAT = auto()  # src (scalar,)
    IOTA = auto()  # 0, 1, ..., lanes-1
    TABLE = auto()  # arg: the value of every lane
    FIRST = auto()  # arg n: mask of the first n lanes
    SHUFFLE = auto()  # src (a, b) vectors; arg which elements of a and b together, in order
    HALVES = auto()  # src (vector,); arg 0 or 1: its lower or upper half
    EXTRACT = auto()  # src (vector,); arg lane
    ANY = auto()  # src (mask,): whether any lane is true
    ROUND = auto()  # a float to the nearest integer, ties to even
    FMA = auto()  # src (a, b, c): a * b + c, rounded once
    # src (a, b, c), a and b of int32: to each lane of c the products of what the four bytes in a and in b hold; arg
    # the Dot: their types
    DOT = auto()
    # as DOT, for a Dot of `words`; but a lane of c holds two int16, to each of which two of the four products are added
    DOT_WORDS = auto()
    SUM_WORDS = auto()  # src (a,): the sum of the two int16 that each lane holds: int32
    # only where the machine has a matrix unit (`Dot.rows`); registers of it have numbers, and change nothing else:
    MATRIX_SHAPES = auto()  # arg: of each register (rows, bytes of a row); all of them are 0 then
    MATRIX_ZERO = auto()  # arg: a register
    MATRIX_LOAD = auto()  # src (pointer, offset), or (pointer, offset, step); arg a Square
    MATRIX_STORE = auto()  # src (pointer, offset)
    # arg (sums, rows, columns, type of rows, of columns): registers; that of columns has a row for each group of a lane
    MATRIX_DOT = auto()
    # only where it has one whose operands lie in the registers of a warp (`Dot.columns`); all threads of the warp are
    # here. src (a, b, c, d): a and b are two rows of this thread's, c a column, of four iterations each (two of
    # float32, which are rounded to 10 bits after the point, ties away from zero); added to the
    # four sums d of the thread: two of a row, then two of the other; arg the Dot
    WARP_DOT = auto()
    # only where the machine has it (`Machine.scales`):
    SCALE = auto()  # src (a, n): a * 2**floor(n), rounded once
    WITHIN = auto()  # src (a, b): a where |a| <= b, else b with the sign of a; b where a is NaN
    LOOKUP = auto()  # src (a,): the number of arg, a table of 32, that the lowest bits of a are


class Square(NamedTuple):
    """Memory of a matrix unit's register, from the pointer's element `constant` on: `rows` of `width` elements, `step`
    elements apart (0 where an instruction says it)."""

    register: int
    constant: int
    step: int
    rows: int
    width: int


@dataclass(eq=False, slots=True)
class Inst:
    """`depth`: the number of the block it stands in, counted from the function's own, 0."""

    op: Ops | Low
    dtype: DType
    lanes: int
    src: tuple[Inst, ...]
    arg: Any
    depth: int

    def __repr__(self) -> str:
        wide = f"x{self.lanes}" if self.lanes > 1 else ""
        return f"{self.op.name}.{self.dtype.name}{wide}" + (f"[{self.arg}]" if self.arg is not None else "")


@dataclass(frozen=True)
class LoweredProgram:
    """A lowered kernel. It runs indices [begin, end) of the parallel loop, of `count(...)` in all."""

    name: str
    insts: tuple[Inst, ...]
    variables: tuple[UOp, ...]
    slots: int
    parallel: tuple[tuple[UOp, int], ...]  # (size, step) of the loops that make up the parallel one; (): run once
    scratch_bytes: int = 0
    group: tuple[int, ...] = ()  # work items of a group along its dimensions; (): none, an index is one thread's
    shared_bytes: int = 0


def show(program: LoweredProgram) -> str:
    """The program as readable text, one instruction a line."""
    names: dict[Inst, str] = {}
    lines, indent = [f"{program.name}: parallel {[(str(n.arg), s) for n, s in program.parallel]}"], 1
    for inst in program.insts:
        if inst.op in (Low.ELSE, Low.END):
            indent -= 1
        names[inst] = f"%{len(names)}"
        lines.append(f"{'  ' * indent}{names[inst]} = {inst!r}({', '.join(names.get(s, '?') for s in inst.src)})")
        if inst.op in (Low.LOOP, Low.IF, Low.ELSE):
            indent += 1
    return "\n".join(lines)
