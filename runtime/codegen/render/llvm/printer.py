"""Prints a lowered program as LLVM IR text, one instruction at a time.

The function is `void kernel(ptr buffers, ptr variables, i64 begin, i64 finish, ptr scratch)`; a kernel's own name
stands in the first line alone, so that equal code is equal text from there on. `scratch` begins with the index up to
which this thread has run it in this call (0: not yet). bfloat16 is held as its
bits in an i16; bool is i1 in registers and one byte in memory. Accumulators are stack slots that `sroa` makes
registers. Nothing is undefined here: division by zero gives 0, shifts by too much give 0 (or the sign), conversions
saturate.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import replace

from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram, Square
from manygrad.runtime.codegen.render.llvm.registers import Registers
from manygrad.runtime.codegen.render.llvm.text import ENTRY, literal, memory_type, scalar_type, splat, suffix, vector
from manygrad.runtime.codegen.render.llvm.wide_stores import with_wide_stores
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops

SIGNATURE = "ptr noalias %buffers, ptr noalias %variables, i64 %begin, i64 %finish, ptr noalias %scratch"
MATRIX_DOTS = {  # rows, columns
    (dtypes.bfloat16, dtypes.bfloat16): "llvm.x86.tdpbf16ps",
    (dtypes.int8, dtypes.uint8): "llvm.x86.tdpbsud",
    (dtypes.uint8, dtypes.int8): "llvm.x86.tdpbusd",
}
ZEROS_BYTES = 1024  # what an invalid load reads instead


class LLVMPrinter(Registers):
    def __init__(self, program: LoweredProgram, rounds_bfloat16: bool = False) -> None:
        super().__init__()
        self.rounds_bfloat16 = rounds_bfloat16
        self.program = replace(program, insts=with_wide_stores(program.insts))
        self.entry: list[str] = []  # stack slots
        self.open: list[tuple[str, Inst, str]] = []  # (label, LOOP or IF, label of the block before)
        self.streamed = {x.src[0] for x in program.insts if x.op is Low.STREAM}
        self.shapes: dict[tuple[tuple[int, int], ...], str] = {}  # of a matrix unit's registers -> their constant
        self.aligned: dict[Inst, str] = {}  # PARAM -> whether its address is a multiple of 64 bytes

    def run(self) -> str:
        for inst in self.program.insts:
            if (found := self.inst(inst)) is not None:
                self.names[inst] = found
        zeros = f"@zeros = private unnamed_addr constant [{ZEROS_BYTES} x i8] zeroinitializer, align 64"
        last = ["  fence seq_cst"] if self.aligned else []  # stores past the caches are not ordered otherwise
        if self.shapes:
            self.call("llvm.x86.tilerelease", "void")
        body = "\n".join(["entry:", *self.entry, *self.lines, *last, "  ret void"])
        return "\n".join([
            f"; {self.program.name}", zeros, *self.shapes.values(), *self.declared,
            f"define void @{ENTRY}({SIGNATURE}) #0 {{", body, "}",
            'attributes #0 = { nounwind "no-trapping-math"="true" "prefer-vector-width"="512" '
            '"min-legal-vector-width"="512" }', "",
        ])  # fmt: skip

    # *** instructions ***

    def inst(self, x: Inst) -> str | None:
        """Prints an instruction; the name of its value, if it has one."""
        names = self.names
        t = vector(scalar_type(x.dtype), x.lanes) if x.dtype is not dtypes.void else "void"
        src = [names[s] for s in x.src if s in names]
        found = PRINT.get(x.op)
        return self.alu(x, t, src) if found is None else found(self, x, t, src)

    def splat_of(self, x: Inst, t: str, one: str) -> str:
        first = self.let(f"insertelement {t} poison, {scalar_type(x.dtype)} {one}, i64 0")
        return self.let(f"shufflevector {t} {first}, {t} poison, <{x.lanes} x i32> zeroinitializer")

    def shuffle(self, x: Inst) -> str:
        order = ", ".join(f"i32 {i}" for i in x.arg)
        return self.let(f"shufflevector {self.typed(x.src[0])}, {self.typed(x.src[1])}, <{x.lanes} x i32> <{order}>")

    def multiply_add(self, x: Inst, t: str) -> str:
        a, b, c = (self.typed(s) for s in x.src)
        return self.call(f"llvm.fma.{suffix(scalar_type(x.dtype), x.lanes)}", t, a, b, c)

    def prefetch(self, x: Inst) -> None:
        at = self.address(self.names[x.src[0]], x.src[1], x.arg, memory_type(x.src[0].dtype))
        self.call("llvm.prefetch.p0", "void", f"ptr {at}", "i32 0", "i32 3", "i32 1")

    def argument(self, x: Inst) -> str:
        """Arguments of the kernel: memory, variables, and the part of the parallel loop."""
        match x.op:
            case Low.PARAM:
                at = self.let(f"getelementptr ptr, ptr %buffers, i64 {x.arg}")
                pointer = self.let(f"load ptr, ptr {at}, align 8")
                if x in self.streamed:
                    whole = self.let(f"ptrtoint ptr {pointer} to i64")
                    rest = self.let(f"and i64 {whole}, 63")
                    self.aligned[x] = self.let(f"icmp eq i64 {rest}, 0")
                return pointer
            case Low.SCRATCH:
                return self.let(f"getelementptr i8, ptr %scratch, i64 {x.arg}")
            case Low.VAR:
                at = self.let(f"getelementptr i64, ptr %variables, i64 {x.arg}")
                return self.let(f"load i64, ptr {at}, align 8")
            case Low.BEGIN:
                return "%begin"
        return "%finish"

    def accumulator(self, x: Inst, t: str, src: list[str]) -> str | None:
        match x.op:
            case Low.ACC:
                slot = "%" + self.fresh("acc")
                self.entry.append(f"  {slot} = alloca {t}, align 64")
                self.line(f"store {t} {src[0]}, ptr {slot}, align 64")
                return slot
            case Low.GET:
                return self.let(f"load {t}, ptr {src[0]}, align 64")
        self.line(f"store {self.typed(x.src[1])}, ptr {src[0]}, align 64")
        return None

    def branch(self, x: Inst, src: list[str]) -> None:
        match x.op:
            case Low.IF:
                label = self.fresh("if")
                self.line(f"br i1 {src[0]}, label %{label}.then, label %{label}.else")
                self.open.append((label, x, "then"))
                self.start(f"{label}.then")
            case Low.ELSE:
                label, begin, _ = self.open.pop()
                self.line(f"br label %{label}.end")
                self.start(f"{label}.else")
                self.open.append((label, begin, "else"))
            case Low.END:
                self.end()

    def matrix(self, x: Inst) -> None:
        match x.op:
            case Low.MATRIX_SHAPES:
                self.shape_matrices(x)
            case Low.MATRIX_ZERO:
                self.call("llvm.x86.tilezero", "void", f"i8 {x.arg}")
            case Low.MATRIX_LOAD | Low.MATRIX_STORE:
                self.move_matrix(x)
            case Low.MATRIX_DOT:
                *registers, rows, columns = x.arg
                self.call(MATRIX_DOTS[rows, columns], "void", *(f"i8 {r}" for r in registers))

    def half(self, x: Inst, vec: str) -> str:
        e, n = scalar_type(x.dtype), x.lanes
        wide = f"<{2 * n} x {e}>"
        if n == 1:
            return self.let(f"extractelement {wide} {vec}, i64 {x.arg}")
        order = ", ".join(f"i32 {x.arg * n + i}" for i in range(n))
        return self.let(f"shufflevector {wide} {vec}, {wide} poison, <{n} x i32> <{order}>")

    def loop(self, x: Inst) -> str:
        label, before = self.fresh("loop"), self.label
        begin, end = (self.names[s] for s in x.src)
        if x.src[0].op is Low.CONST and x.src[1].op is Low.CONST and x.src[0].arg < x.src[1].arg:
            self.line(f"br label %{label}")
        else:
            some = self.let(f"icmp slt i64 {begin}, {end}")
            self.line(f"br i1 {some}, label %{label}, label %{label}.end")
        self.start(label)
        self.line(f"%{label}.i = phi i64 [ {begin}, %{before} ], [ %{label}.next, %{label}.latch ]")
        self.open.append((label, x, before))
        return f"%{label}.i"

    def end(self) -> None:
        label, begin, state = self.open.pop()
        if begin.op is Low.IF:
            self.line(f"br label %{label}.end")
            if state == "then":
                self.start(f"{label}.else")
                self.line(f"br label %{label}.end")
            self.start(f"{label}.end")
            return
        self.line(f"br label %{label}.latch")
        self.start(f"{label}.latch")
        self.line(f"%{label}.next = add nuw nsw i64 %{label}.i, {begin.arg}")
        more = self.let(f"icmp slt i64 %{label}.next, {self.names[begin.src[1]]}")
        self.line(f"br i1 {more}, label %{label}, label %{label}.end")
        self.start(f"{label}.end")

    # *** memory ***

    def alignment(self, x: Inst) -> int:
        """Bytes of which the address of an access is known to be a multiple."""
        return x.src[0].dtype.itemsize

    def address(self, pointer: str, offset: Inst, constant: int, element: str) -> str:
        at = (
            self.let(f"getelementptr inbounds {element}, ptr {pointer}, {self.typed(offset)}")
            if _moves(offset)
            else pointer
        )
        if constant == 0:
            return at
        return self.let(f"getelementptr inbounds {element}, ptr {at}, i64 {constant}")

    def load(self, x: Inst) -> str:
        pointer, offset = x.src[0], x.src[1]
        guard = x.src[2] if len(x.src) == 3 else None
        e, n = memory_type(x.dtype), x.lanes
        t, align = vector(e, n), self.alignment(x)
        element = memory_type(pointer.dtype)
        if offset.lanes > 1:
            at = self.address(self.names[pointer], offset, x.arg, element)
            mask = self.names[guard] if guard is not None else splat("true", "i1", n)
            zero = splat("0" if e.startswith("i") else literal(0.0, x.dtype), e, n)
            found = self.call(
                f"llvm.masked.gather.{suffix(e, n)}.v{n}p0",
                t,
                f"<{n} x ptr> {at}",
                f"i32 {align}",
                f"<{n} x i1> {mask}",
                f"{t} {zero}",
            )
        elif guard is not None and guard.lanes > 1:
            at = self.address(self.names[pointer], offset, x.arg, element)
            zero = splat("0" if e.startswith("i") else literal(0.0, x.dtype), e, n)
            found = self.call(
                f"llvm.masked.load.{suffix(e, n)}.p0",
                t,
                f"ptr {at}",
                f"i32 {align}",
                f"<{n} x i1> {self.names[guard]}",
                f"{t} {zero}",
            )
        else:
            at = self.address(self.names[pointer], offset, x.arg, element)
            if guard is not None:
                assert n * x.dtype.itemsize <= ZEROS_BYTES
                at = self.let(f"select i1 {self.names[guard]}, ptr {at}, ptr @zeros")
            found = self.let(f"load {t}, ptr {at}, align {align}")
        if x.dtype.is_bool:
            return self.let(f"icmp ne {t} {found}, {splat('0', e, n)}")
        return found

    # *** matrices (AMX) ***

    def shape_matrices(self, x: Inst) -> None:
        if x.arg not in self.shapes:
            name = f"@shapes.{len(self.shapes)}"
            nbytes, rows = [0] * 16, [0] * 16
            for register, (count, width) in enumerate(x.arg):
                nbytes[register], rows[register] = width, count
            held = bytes([1, *[0] * 15]) + struct.pack("<16H", *nbytes) + bytes(rows)
            text = ", ".join(f"i8 {b}" for b in held)
            self.shapes[x.arg] = f"{name} = private unnamed_addr constant [64 x i8] [{text}], align 64"
        self.call("llvm.x86.ldtilecfg", "void", f"ptr @shapes.{list(self.shapes).index(x.arg)}")

    def move_matrix(self, x: Inst) -> None:
        pointer, offset, *steps = x.src
        square: Square = x.arg
        at = self.address(self.names[pointer], offset, square.constant, memory_type(pointer.dtype))
        name = "llvm.x86.tileloadd64" if x.op is Low.MATRIX_LOAD else "llvm.x86.tilestored64"
        nbytes = str(square.step * pointer.dtype.itemsize)
        for step in steps:
            nbytes = self.let(f"mul i64 {self.names[step]}, {pointer.dtype.itemsize}")
        self.call(name, "void", f"i8 {square.register}", f"ptr {at}", f"i64 {nbytes}")

    def store(self, x: Inst) -> None:
        pointer, offset, value = x.src[0], x.src[1], x.src[2]
        guard = x.src[3] if len(x.src) == 4 else None
        e, n = memory_type(x.dtype if x.dtype is not dtypes.void else value.dtype), value.lanes
        t, align = vector(e, n), self.alignment(x)
        text = self.names[value]
        if value.dtype.is_bool:
            text = self.let(f"zext {vector('i1', n)} {text} to {t}")
        at = self.address(self.names[pointer], offset, x.arg, memory_type(pointer.dtype))
        if offset.lanes > 1:
            mask = self.names[guard] if guard is not None else splat("true", "i1", n)
            self.call(
                f"llvm.masked.scatter.{suffix(e, n)}.v{n}p0",
                "void",
                f"{t} {text}",
                f"<{n} x ptr> {at}",
                f"i32 {align}",
                f"<{n} x i1> {mask}",
            )
        elif guard is not None and guard.op is Low.FIRST and guard.arg == 1:
            # (a masked store of one known lane is a plain one; LLVM 22 forgets a
            # truncation of its value: 8 bytes for an i32)
            one = self.let(f"extractelement {t} {text}, i64 0")
            self.line(f"store {e} {one}, ptr {at}, align {align}")
        elif guard is not None and guard.lanes > 1:
            self.call(
                f"llvm.masked.store.{suffix(e, n)}.p0",
                "void",
                f"{t} {text}",
                f"ptr {at}",
                f"i32 {align}",
                f"<{n} x i1> {self.names[guard]}",
            )
        elif guard is not None:
            label = self.fresh("store")
            self.line(f"br i1 {self.names[guard]}, label %{label}, label %{label}.end")
            self.start(label)
            self.line(f"store {t} {text}, ptr {at}, align {align}")
            self.line(f"br label %{label}.end")
            self.start(f"{label}.end")
        else:
            self.line(f"store {t} {text}, ptr {at}, align {align}")

    def stream(self, x: Inst) -> None:
        """Past the caches where the buffer begins at a cache line, else as any store."""
        pointer, offset, value = x.src
        e, n, align = memory_type(value.dtype), value.lanes, value.lanes * value.dtype.itemsize
        if value.dtype.is_bool or align not in (16, 32, 64):
            self.store(x)
            return
        at = self.address(self.names[pointer], offset, x.arg, e)
        text, label = f"store {vector(e, n)} {self.names[value]}, ptr {at}, align", self.fresh("stream")
        self.line(f"br i1 {self.aligned[pointer]}, label %{label}, label %{label}.plain")
        self.start(label)
        self.line(f"{text} {align}, !nontemporal !{{i32 1}}")
        self.line(f"br label %{label}.end")
        self.start(f"{label}.plain")
        self.line(f"{text} {value.dtype.itemsize}")
        self.line(f"br label %{label}.end")
        self.start(f"{label}.end")


def _moves(offset: Inst) -> bool:
    return not (offset.op in (Low.CONST, Low.HERE) and offset.arg == 0 and offset.lanes == 1)


def _each(t: str, values: Iterable[int | str]) -> str:
    """A constant vector."""
    return "<" + ", ".join([f"{t} {v}" for v in values]) + ">"


Print = Callable[[LLVMPrinter, Inst, str, list[str]], str | None]

# how an instruction is printed, from its type and its sources' names; arithmetic is not in it
PRINT: dict[Ops | Low, Print] = {
    **dict.fromkeys(
        (Low.CONST, Low.HERE),
        lambda p, x, t, src: splat(literal(x.arg, x.dtype), scalar_type(x.dtype), x.lanes),
    ),
    Low.IOTA: lambda p, x, t, src: _each("i64", range(x.lanes)),
    Low.TABLE: lambda p, x, t, src: _each("i64", x.arg),
    Low.FIRST: lambda p, x, t, src: _each("i1", ("true" if i < x.arg else "false" for i in range(x.lanes))),
    Low.SPLAT: lambda p, x, t, src: p.splat_of(x, t, src[0]),
    Low.SHUFFLE: lambda p, x, t, src: p.shuffle(x),
    Low.HALVES: lambda p, x, t, src: p.half(x, src[0]),
    Low.EXTRACT: lambda p, x, t, src: p.let(f"extractelement {p.typed(x.src[0])}, i64 {x.arg}"),
    Low.ANY: lambda p, x, t, src: p.call(f"llvm.vector.reduce.or.v{x.src[0].lanes}i1", "i1", p.typed(x.src[0])),
    Low.FMA: lambda p, x, t, src: p.multiply_add(x, t),
    **dict.fromkeys(
        (Low.SCALE, Low.WITHIN, Low.LOOKUP, Low.SUM_WORDS), lambda p, x, t, src: p.in_registers(x, x.lanes, src)
    ),
    **dict.fromkeys((Low.DOT, Low.DOT_WORDS), lambda p, x, t, src: p.add_dots(x, *src)),
    Low.ROUND: lambda p, x, t, src: p.call(
        f"llvm.roundeven.{suffix(scalar_type(x.dtype), x.lanes)}", t, f"{t} {src[0]}"
    ),
    Low.LOAD: lambda p, x, t, src: p.load(x),
    Low.STORE: lambda p, x, t, src: p.store(x),
    Low.STREAM: lambda p, x, t, src: p.stream(x),
    Low.PREFETCH: lambda p, x, t, src: p.prefetch(x),
    **dict.fromkeys(
        (Low.MATRIX_SHAPES, Low.MATRIX_ZERO, Low.MATRIX_LOAD, Low.MATRIX_STORE, Low.MATRIX_DOT),
        lambda p, x, t, src: p.matrix(x),
    ),
    **dict.fromkeys((Low.PARAM, Low.SCRATCH, Low.VAR, Low.BEGIN, Low.FINISH), lambda p, x, t, src: p.argument(x)),
    **dict.fromkeys((Low.ACC, Low.GET, Low.SET), lambda p, x, t, src: p.accumulator(x, t, src)),
    Low.LOOP: lambda p, x, t, src: p.loop(x),
    **dict.fromkeys((Low.IF, Low.ELSE, Low.END), lambda p, x, t, src: p.branch(x, src)),
}


def render(program: LoweredProgram, rounds_bfloat16: bool = False) -> str:
    """The LLVM IR of a program. `rounds_bfloat16`: for a processor that has an instruction for it."""
    return LLVMPrinter(program, rounds_bfloat16).run()
