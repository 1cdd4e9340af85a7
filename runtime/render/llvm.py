"""Prints a lowered program as LLVM IR text, one instruction at a time.

The function is `void kernel(ptr buffers, ptr variables, i64 begin, i64 finish, ptr scratch)`; a kernel's own name stands in the first line
alone, so that equal code is equal text from there on. `scratch` begins with the index up to which this thread has run it in this call
(0: not yet). bfloat16 is held as its
bits in an i16; bool is i1 in registers and one byte in memory. Accumulators are stack slots that `sroa` makes registers.
Nothing is undefined here: division by zero gives 0, shifts by too much give 0 (or the sign), conversions saturate.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad.runtime.codegen.lowered import Inst, Low, Program
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops

ENTRY = "kernel"
SIGNATURE = "ptr noalias %buffers, ptr noalias %variables, i64 %begin, i64 %finish, ptr noalias %scratch"
ZEROS_BYTES = 1024  # what an invalid load reads instead
DOTS = {
    (dtypes.uint8, dtypes.int8): "llvm.x86.avx512.vpdpbusd.{bits}",
    (dtypes.int8, dtypes.int8): "llvm.aarch64.neon.sdot.v4i32.v16i8",
    (dtypes.uint8, dtypes.uint8): "llvm.aarch64.neon.udot.v4i32.v16i8",
}
_FLOATS = {2: "half", 4: "float", 8: "double"}


def scalar_type(d: DType) -> str:
    if d.is_float:
        return "i16" if d is dtypes.bfloat16 else "i8" if d.is_fp8 else _FLOATS[d.itemsize]
    return "i1" if d.is_bool else f"i{d.itemsize * 8}"


def memory_type(d: DType) -> str:
    return "i8" if d.is_bool else scalar_type(d)


def vector(t: str, lanes: int) -> str:
    return t if lanes == 1 else f"<{lanes} x {t}>"


def suffix(t: str, lanes: int) -> str:
    """The type in an intrinsic's name."""
    short = {"half": "f16", "float": "f32", "double": "f64"}.get(t, t)
    return short if lanes == 1 else f"v{lanes}{short}"


def literal(value: Any, d: DType) -> str:
    if d is dtypes.bfloat16:
        return str(int(np.asarray(value, dtype=np.float64).astype(d.np).view(np.uint16)))
    if d.is_fp8:
        return str(int(np.asarray(value, dtype=np.float64).astype(d.np).view(np.uint8)))
    if d is dtypes.float16:
        return f"0xH{int(np.float16(value).view(np.uint16)):04X}"
    if d.is_float:
        value = float(np.float32(value)) if d.itemsize == 4 else float(value)
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    return ("true" if value else "false") if d.is_bool else str(int(value))


def splat(text: str, t: str, lanes: int) -> str:
    return text if lanes == 1 else "<" + ", ".join([f"{t} {text}"] * lanes) + ">"


class Printer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines: list[str] = []
        self.entry: list[str] = []  # stack slots
        self.declared: dict[str, None] = {}
        self.names: dict[Inst, str] = {}
        self.open: list[tuple[str, Inst, str]] = []  # (label, LOOP or IF, label of the block before)
        self.streamed = {x.src[0] for x in program.insts if x.op is Low.STREAM}
        self.aligned: dict[Inst, str] = {}  # PARAM -> whether its address is a multiple of 64 bytes
        self.count = 0
        self.label = "entry"

    # *** printing ***

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def let(self, text: str) -> str:
        name = "%" + self.fresh()
        self.lines.append(f"  {name} = {text}")
        return name

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def start(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.label = label

    def call(self, name: str, result: str, *args: str) -> str:
        """Calls an intrinsic; `args` are typed operands."""
        types = ", ".join(_type_of(a) for a in args)
        self.declared[f"declare {result} @{name}({types})"] = None
        text = f"call {result} @{name}({', '.join(args)})"
        if result == "void":
            self.line(text)
            return ""
        return self.let(text)

    def run(self) -> str:
        for inst in self.program.insts:
            found = self.inst(inst)
            if found is not None:
                self.names[inst] = found
        zeros = f"@zeros = private unnamed_addr constant [{ZEROS_BYTES} x i8] zeroinitializer, align 64"
        last = ["  fence seq_cst"] if self.aligned else []  # stores past the caches are not ordered otherwise
        body = "\n".join(["entry:", *self.entry, *self.lines, *last, "  ret void"])
        return "\n".join([
            f"; {self.program.name}", zeros, *self.declared,
            f"define void @{ENTRY}({SIGNATURE}) #0 {{", body, "}",
            'attributes #0 = { nounwind "no-trapping-math"="true" "prefer-vector-width"="512" "min-legal-vector-width"="512" }', "",
        ])  # fmt: skip

    # *** instructions ***

    def inst(self, x: Inst) -> str | None:
        t = vector(scalar_type(x.dtype), x.lanes) if x.dtype is not dtypes.void else "void"
        src = [self.names[s] for s in x.src if s in self.names]
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
            case Low.FINISH:
                return "%finish"
            case Low.CONST | Low.HERE:
                return splat(literal(x.arg, x.dtype), scalar_type(x.dtype), x.lanes)
            case Low.IOTA:
                return "<" + ", ".join(f"i64 {i}" for i in range(x.lanes)) + ">"
            case Low.TABLE:
                return "<" + ", ".join(f"i64 {i}" for i in x.arg) + ">"
            case Low.FIRST:
                return "<" + ", ".join(f"i1 {'true' if i < x.arg else 'false'}" for i in range(x.lanes)) + ">"
            case Low.SPLAT:
                e = scalar_type(x.dtype)
                one = self.let(f"insertelement {t} poison, {e} {src[0]}, i64 0")
                return self.let(f"shufflevector {t} {one}, {t} poison, <{x.lanes} x i32> zeroinitializer")
            case Low.SHUFFLE:
                order = ", ".join(f"i32 {i}" for i in x.arg)
                return self.let(
                    f"shufflevector {self.typed(x.src[0])}, {self.typed(x.src[1])}, <{x.lanes} x i32> <{order}>"
                )
            case Low.HALVES:
                return self.half(x, src[0])
            case Low.EXTRACT:
                return self.let(f"extractelement {self.typed(x.src[0])}, i64 {x.arg}")
            case Low.ANY:
                return self.call(f"llvm.vector.reduce.or.v{x.src[0].lanes}i1", "i1", self.typed(x.src[0]))
            case Low.FMA:
                return self.call(
                    f"llvm.fma.{suffix(scalar_type(x.dtype), x.lanes)}", t, *(self.typed(s) for s in x.src)
                )
            case Low.SCALE | Low.WITHIN | Low.LOOKUP | Low.DOT:
                return self.in_registers(x, x.lanes, list(src))
            case Low.ROUND:
                return self.call(f"llvm.roundeven.{suffix(scalar_type(x.dtype), x.lanes)}", t, f"{t} {src[0]}")
            case Low.LOAD:
                return self.load(x)
            case Low.STORE:
                self.store(x)
                return None
            case Low.STREAM:
                self.stream(x)
                return None
            case Low.PREFETCH:
                at = self.address(self.names[x.src[0]], x.src[1], x.arg, memory_type(x.src[0].dtype))
                self.call("llvm.prefetch.p0", "void", f"ptr {at}", "i32 0", "i32 3", "i32 1")
                return None
            case Low.ACC:
                slot = "%" + self.fresh("acc")
                self.entry.append(f"  {slot} = alloca {t}, align 64")
                self.line(f"store {t} {src[0]}, ptr {slot}, align 64")
                return slot
            case Low.GET:
                return self.let(f"load {t}, ptr {src[0]}, align 64")
            case Low.SET:
                self.line(f"store {self.typed(x.src[1])}, ptr {src[0]}, align 64")
                return None
            case Low.LOOP:
                return self.loop(x)
            case Low.IF:
                label = self.fresh("if")
                self.line(f"br i1 {src[0]}, label %{label}.then, label %{label}.else")
                self.open.append((label, x, "then"))
                self.start(f"{label}.then")
                return None
            case Low.ELSE:
                label, begin, _ = self.open.pop()
                self.line(f"br label %{label}.end")
                self.start(f"{label}.else")
                self.open.append((label, begin, "else"))
                return None
            case Low.END:
                self.end()
                return None
        assert isinstance(x.op, Ops)
        return self.alu(x, t, src)

    def typed(self, x: Inst) -> str:
        return f"{vector(scalar_type(x.dtype), x.lanes)} {self.names[x]}"

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
        t, align = vector(e, n), pointer.dtype.itemsize
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

    def store(self, x: Inst) -> None:
        pointer, offset, value = x.src[0], x.src[1], x.src[2]
        guard = x.src[3] if len(x.src) == 4 else None
        e, n = memory_type(x.dtype if x.dtype is not dtypes.void else value.dtype), value.lanes
        t, align = vector(e, n), pointer.dtype.itemsize
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
            # (a masked store of one known lane is a plain one; LLVM 22 forgets a truncation of its value: 8 bytes for an i32)
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

    # *** arithmetic ***

    def alu(self, x: Inst, t: str, src: list[str]) -> str:
        assert isinstance(x.op, Ops)
        d, n = x.src[0].dtype, x.lanes
        st = vector(scalar_type(d), n)
        e = scalar_type(d)
        num = lambda v: splat(literal(v, d), e, n)  # noqa: E731
        match x.op:
            case Ops.CAST:
                return self.cast(src[0], d, x.dtype, n)
            case Ops.BITCAST:
                if d.is_bool:
                    return self.let(f"zext {st} {src[0]} to {t}")
                if x.dtype.is_bool:
                    return self.let(f"icmp ne {st} {src[0]}, {num(0)}")
                st = vector(e, x.src[0].lanes)  # (which need not be as many)
                return src[0] if st == t else self.let(f"bitcast {st} {src[0]} to {t}")
            case Ops.WHERE:
                return self.let(f"select {self.typed(x.src[0])}, {self.typed(x.src[1])}, {self.typed(x.src[2])}")
        if x.op in GroupOp.COMPARE:
            if d.is_float:
                code = {Ops.CMPLT: "olt", Ops.CMPEQ: "oeq", Ops.CMPNE: "une"}[x.op]
                return self.let(f"fcmp {code} {st} {src[0]}, {src[1]}")
            order = {Ops.CMPLT: "ult" if d.is_unsigned or d.is_bool else "slt", Ops.CMPEQ: "eq", Ops.CMPNE: "ne"}[x.op]
            return self.let(f"icmp {order} {st} {src[0]}, {src[1]}")
        if d.is_float:
            return self.float_alu(x, t, src)
        if d.is_bool:
            logic = {Ops.ADD: "or", Ops.MAX: "or", Ops.OR: "or", Ops.MUL: "and", Ops.AND: "and", Ops.XOR: "xor", Ops.SUB: "xor",
                     Ops.NOT: "not", Ops.NEG: "not", Ops.TRUNC: "same"}.get(x.op)  # fmt: skip
            if logic is None:
                raise NotImplementedError(f"{x.op.name} on bool")
            if logic == "same":
                return src[0]
            return self.let(f"xor {t} {src[0]}, {num(True)}" if logic == "not" else f"{logic} {t} {src[0]}, {src[1]}")
        return self.int_alu(x, t, src, num)

    def float_alu(self, x: Inst, t: str, src: list[str]) -> str:
        d, n, e = x.dtype, x.lanes, scalar_type(x.dtype)
        assert isinstance(x.op, Ops)
        assert not d.is_half, f"{x.op.name} on {d}: halves are computed in float32"
        plain = {Ops.ADD: "fadd", Ops.SUB: "fsub", Ops.MUL: "fmul", Ops.FDIV: "fdiv"}.get(x.op)
        if plain is not None:
            return self.let(f"{plain} {t} {src[0]}, {src[1]}")
        match x.op:
            case Ops.NEG:
                return self.let(f"fneg {t} {src[0]}")
            case Ops.RECIP:
                return self.let(f"fdiv {t} {splat(literal(1.0, d), e, n)}, {src[0]}")
            case Ops.SQRT | Ops.TRUNC:
                return self.call(f"llvm.{x.op.name.lower()}.{suffix(e, n)}", t, f"{t} {src[0]}")
            case Ops.MAX:  # the greater; NaN where either is
                a, b = src if x.src[1].op is not Low.CONST else (src[1], src[0])
                greater = self.let(f"fcmp ogt {t} {a}, {b}")
                best = self.let(f"select {vector('i1', n)} {greater}, {t} {a}, {t} {b}")
                if Low.CONST in (x.src[0].op, x.src[1].op):
                    return best
                nan = self.let(f"fcmp uno {t} {a}, {a}")
                return self.let(f"select {vector('i1', n)} {nan}, {t} {a}, {t} {best}")
        raise NotImplementedError(f"{x.op.name} on {d}")

    def int_alu(self, x: Inst, t: str, src: list[str], num: Any) -> str:
        d, n = x.dtype, x.lanes
        assert isinstance(x.op, Ops)
        signed = not d.is_unsigned
        plain = {Ops.ADD: "add", Ops.SUB: "sub", Ops.MUL: "mul", Ops.AND: "and", Ops.OR: "or", Ops.XOR: "xor"}.get(x.op)
        if plain is not None:
            nsw = " nsw" if d is dtypes.index and plain in ("add", "sub", "mul") else ""
            return self.let(f"{plain}{nsw} {t} {src[0]}, {src[1]}")
        match x.op:
            case Ops.NEG:
                return self.let(f"sub {t} {num(0)}, {src[0]}")
            case Ops.NOT:
                return self.let(f"xor {t} {src[0]}, {num(-1) if signed else num(d.max)}")
            case Ops.TRUNC:
                return src[0]
            case Ops.MAX:
                return self.call(
                    f"llvm.{'s' if signed else 'u'}max.{suffix(scalar_type(d), n)}", t, f"{t} {src[0]}", f"{t} {src[1]}"
                )
            case Ops.SHL | Ops.SHR:
                return self.shift(x, t, src, num)
            case Ops.IDIV | Ops.MOD:
                return self.divide(x, t, src, num)
        raise NotImplementedError(f"{x.op.name} on {d}")

    def shift(self, x: Inst, t: str, src: list[str], num: Any) -> str:
        d, by = x.dtype, x.src[1]
        bits = d.itemsize * 8
        code = "shl" if x.op is Ops.SHL else "lshr" if d.is_unsigned else "ashr"
        if by.op is Low.CONST and 0 <= by.arg < bits:
            return self.let(f"{code} {t} {src[0]}, {src[1]}")
        fits = self.let(f"icmp ult {t} {src[1]}, {num(bits)}")
        mask = vector("i1", x.lanes)
        if code == "ashr":
            by_safe = self.let(f"select {mask} {fits}, {t} {src[1]}, {t} {num(bits - 1)}")
            return self.let(f"ashr {t} {src[0]}, {by_safe}")
        by_safe = self.let(f"select {mask} {fits}, {t} {src[1]}, {t} {num(0)}")
        found = self.let(f"{code} {t} {src[0]}, {by_safe}")
        return self.let(f"select {mask} {fits}, {t} {found}, {t} {num(0)}")

    def divide(self, x: Inst, t: str, src: list[str], num: Any) -> str:
        d, by, n = x.dtype, x.src[1], x.lanes
        a, b = src
        quotient = x.op is Ops.IDIV
        mask = vector("i1", n)
        if d.is_unsigned or (d is dtypes.index and x.arg and by.op is Low.CONST and by.arg > 0):
            safe = b if by.op is Low.CONST and by.arg != 0 else None
            if safe is None:
                zero = self.let(f"icmp eq {t} {b}, {num(0)}")
                safe = self.let(f"select {mask} {zero}, {t} {num(1)}, {t} {b}")
            found = self.let(f"{'udiv' if quotient else 'urem'} {t} {a}, {safe}")
            return (
                found
                if by.op is Low.CONST and by.arg != 0
                else self.let(f"select {mask} {zero}, {t} {num(0)}, {t} {found}")
            )
        if by.op is Low.CONST and by.arg not in (0, -1):
            safe, special = b, False
        else:  # x / 0 is 0, and MIN / -1 must not trap: take 1 instead, then put things right
            one = self.let(f"add {t} {b}, {num(1)}")
            odd = self.let(f"icmp ult {t} {one}, {num(2)}")  # b is 0 or -1
            safe, special = self.let(f"select {mask} {odd}, {t} {num(1)}, {t} {b}"), True
        q = self.let(f"sdiv {t} {a}, {safe}")
        back = self.let(f"mul {t} {q}, {safe}")
        r = self.let(f"sub {t} {a}, {back}")
        if d is dtypes.index and not x.arg:  # floor
            nonzero = self.let(f"icmp ne {t} {r}, {num(0)}")
            signs = self.let(f"xor {t} {r}, {safe}")
            opposite = self.let(f"icmp slt {t} {signs}, {num(0)}")
            fix = self.let(f"and {mask} {nonzero}, {opposite}")
            less = self.let(f"sub {t} {q}, {num(1)}")
            more = self.let(f"add {t} {r}, {safe}")
            q = self.let(f"select {mask} {fix}, {t} {less}, {t} {q}")
            r = self.let(f"select {mask} {fix}, {t} {more}, {t} {r}")
        if not special:
            return q if quotient else r
        if not quotient:
            return self.let(f"select {mask} {odd}, {t} {num(0)}, {t} {r}")
        negated = self.let(f"sub {t} {num(0)}, {a}")
        zero = self.let(f"icmp eq {t} {b}, {num(0)}")
        other = self.let(f"select {mask} {zero}, {t} {num(0)}, {t} {negated}")
        return self.let(f"select {mask} {odd}, {t} {other}, {t} {q}")

    # *** instructions that take whole registers ***

    def in_registers(self, x: Inst, n: int, values: list[str]) -> str:
        """Fewer lanes than fill the smallest register are filled up, more than the largest one takes go in pieces."""
        e, size = scalar_type(x.dtype), x.dtype.itemsize
        most = (x.arg.vector_bytes if x.op is Low.DOT else 64) // size
        least = (64 if x.op is Low.LOOKUP else 16) // size
        given = f"<{n} x {e}>"
        if n > most:
            halves = []
            for i in range(2):
                order = ", ".join(f"i32 {i * n // 2 + k}" for k in range(n // 2))
                parts = [self.let(f"shufflevector {given} {v}, {given} poison, <{n // 2} x i32> <{order}>") for v in values]
                halves.append(self.in_registers(x, n // 2, parts))
            order = ", ".join(f"i32 {k}" for k in range(n))
            t = f"<{n // 2} x {e}>"
            return self.let(f"shufflevector {t} {halves[0]}, {t} {halves[1]}, <{n} x i32> <{order}>")
        wide = max(n, least)
        t = f"<{wide} x {e}>"
        if n == 1:
            values = [self.let(f"insertelement {t} zeroinitializer, {e} {v}, i64 0") for v in values]
        elif n < wide:
            order = ", ".join(f"i32 {min(k, n)}" for k in range(wide))
            values = [self.let(f"shufflevector {given} {v}, {given} zeroinitializer, <{wide} x i32> <{order}>") for v in values]
        make: Callable[..., str] = self.lookup if x.op is Low.LOOKUP else self.dot if x.op is Low.DOT else self.scale_or_within
        found = make(x, wide, *values)
        if n == 1:
            return self.let(f"extractelement {t} {found}, i64 0")
        if n == wide:
            return found
        order = ", ".join(f"i32 {k}" for k in range(n))
        return self.let(f"shufflevector {t} {found}, {t} poison, <{n} x i32> <{order}>")

    def scale_or_within(self, x: Inst, lanes: int, a: str, b: str) -> str:
        bits, t = lanes * x.dtype.itemsize * 8, f"<{lanes} x {scalar_type(x.dtype)}>"
        name = f"llvm.x86.avx512.mask.{'scalef' if x.op is Low.SCALE else 'range'}.{'ps' if x.dtype.itemsize == 4 else 'pd'}.{bits}"
        least_magnitude = ["i32 2"] if x.op is Low.WITHIN else []
        rounding = ["i32 4"] if bits == 512 else []  # as the current mode says
        mask = "i8" if lanes <= 8 else "i16"
        return self.call(name, t, f"{t} {a}", f"{t} {b}", *least_magnitude, f"{t} zeroinitializer", f"{mask} -1", *rounding)

    def lookup(self, x: Inst, lanes: int, a: str) -> str:
        """In a table of two registers."""
        t, index = f"<{lanes} x float>", self.let(f"bitcast <{lanes} x float> {a} to <{lanes} x i32>")
        lower, upper = (", ".join(f"float {literal(v, x.dtype)}" for v in x.arg[i : i + 16]) for i in (0, 16))
        return self.call("llvm.x86.avx512.vpermi2var.ps.512", t, f"{t} <{lower}>", f"<16 x i32> {index}", f"{t} <{upper}>")

    def dot(self, x: Inst, lanes: int, a: str, b: str, c: str) -> str:
        """The products of the four bytes in each int32 of `a` and `b`, added to `c`."""
        t, bytes_ = f"<{lanes} x i32>", f"<{4 * lanes} x i8>"
        a, b = (self.let(f"bitcast {t} {v} to {bytes_}") for v in (a, b))
        return self.call(DOTS[x.arg.left, x.arg.right].format(bits=32 * lanes), t, f"{t} {c}", f"{bytes_} {a}", f"{bytes_} {b}")

    # *** conversions ***

    def cast(self, text: str, a: DType, b: DType, n: int) -> str:
        """Conversion of `n` lanes from type `a` to `b`."""
        if a is b or (a.itemsize == b.itemsize and a.is_int and b.is_int):
            return text
        if a is dtypes.bfloat16:
            if b.is_bool:
                magnitude = self.let(f"shl {vector('i16', n)} {text}, {splat('1', 'i16', n)}")
                return self.let(f"icmp ne {vector('i16', n)} {magnitude}, {splat('0', 'i16', n)}")
            wide = self.let(f"zext {vector('i16', n)} {text} to {vector('i32', n)}")
            bits = self.let(f"shl {vector('i32', n)} {wide}, {splat('16', 'i32', n)}")
            return self.cast(
                self.let(f"bitcast {vector('i32', n)} {bits} to {vector('float', n)}"), dtypes.float32, b, n
            )
        ta, tb = vector(scalar_type(a), n), vector(scalar_type(b), n)
        if b.is_bool:
            zero = splat(literal(0, a), scalar_type(a), n)
            return self.let(f"fcmp une {ta} {text}, {zero}" if a.is_float else f"icmp ne {ta} {text}, {zero}")
        if a.is_float and b.is_float:
            if b is dtypes.float16 and a is dtypes.float64:
                return self.cast(self.round_to_odd(text, n), dtypes.float32, b, n)
            if b is dtypes.bfloat16:
                return (
                    self.to_bfloat16(text, n)
                    if a is dtypes.float32
                    else self.cast(self.cast(text, a, dtypes.float32, n), dtypes.float32, b, n)
                )
            return self.let(f"{'fpext' if b.itemsize > a.itemsize else 'fptrunc'} {ta} {text} to {tb}")
        if b.is_float:
            if b.is_half:
                return self.cast(self.cast(text, a, dtypes.float32, n), dtypes.float32, b, n)
            return self.let(f"{'uitofp' if a.is_unsigned or a.is_bool else 'sitofp'} {ta} {text} to {tb}")
        if a.is_float:
            if a.is_half:
                return self.cast(self.cast(text, a, dtypes.float32, n), dtypes.float32, b, n)
            name = (
                f"llvm.fpto{'u' if b.is_unsigned else 's'}i.sat.{suffix(scalar_type(b), n)}.{suffix(scalar_type(a), n)}"
            )
            return self.call(name, tb, f"{ta} {text}")
        if b.itemsize * 8 < (1 if a.is_bool else a.itemsize * 8):
            return self.let(f"trunc {ta} {text} to {tb}")
        return self.let(f"{'zext' if a.is_unsigned or a.is_bool else 'sext'} {ta} {text} to {tb}")

    def to_bfloat16(self, text: str, n: int) -> str:
        """Round to nearest even on the bits; NaN stays a (quiet) NaN."""
        f, i = vector("float", n), vector("i32", n)
        c = lambda v: splat(str(v), "i32", n)  # noqa: E731
        bits = self.let(f"bitcast {f} {text} to {i}")
        high = self.let(f"lshr {i} {bits}, {c(16)}")
        even = self.let(f"and {i} {high}, {c(1)}")
        bias = self.let(f"add {i} {even}, {c(0x7FFF)}")
        rounded = self.let(f"add {i} {bits}, {bias}")
        quiet = self.let(f"or {i} {bits}, {c(0x400000)}")
        nan = self.let(f"fcmp uno {f} {text}, {text}")
        chosen = self.let(f"select {vector('i1', n)} {nan}, {i} {quiet}, {i} {rounded}")
        shifted = self.let(f"lshr {i} {chosen}, {c(16)}")
        return self.let(f"trunc {i} {shifted} to {vector('i16', n)}")

    def round_to_odd(self, text: str, n: int) -> str:
        """float64 -> float32 such that rounding once more gives the float16 nearest to the float64, as in NumPy.

        (bfloat16 is rounded by way of float32, as in PyTorch and ml_dtypes.)
        """
        d, f, i, m = vector("double", n), vector("float", n), vector("i32", n), vector("i1", n)
        c = lambda v: splat(str(v), "i32", n)  # noqa: E731
        near = self.let(f"fptrunc {d} {text} to {f}")
        back = self.let(f"fpext {f} {near} to {d}")
        inexact = self.let(f"fcmp one {d} {back}, {text}")
        size_back, size = (self.call(f"llvm.fabs.{suffix('double', n)}", d, f"{d} {v}") for v in (back, text))
        above = self.let(f"fcmp ogt {d} {size_back}, {size}")
        bits = self.let(f"bitcast {f} {near} to {i}")
        down = self.let(f"sub {i} {bits}, {c(1)}")
        towards_zero = self.let(f"select {m} {above}, {i} {down}, {i} {bits}")
        odd = self.let(f"or {i} {towards_zero}, {c(1)}")
        chosen = self.let(f"select {m} {inexact}, {i} {odd}, {i} {bits}")
        return self.let(f"bitcast {i} {chosen} to {f}")


def _moves(offset: Inst) -> bool:
    return not (offset.op in (Low.CONST, Low.HERE) and offset.arg == 0 and offset.lanes == 1)


def _type_of(typed: str) -> str:
    """`<16 x float> %v3` -> `<16 x float>`"""
    return typed[: typed.index(">") + 1] if typed.startswith("<") else typed.split(" ", 1)[0]


def render(program: Program) -> str:
    """The LLVM IR of a program."""
    return Printer(program).run()
