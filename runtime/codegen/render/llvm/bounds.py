"""LLVM IR with every access checked against the size of its buffer (CHECK_OOB=1). `runtime/devices/compile/bounds.py`
says how a kernel learns the sizes and where it reports.

before:  LOAD(p, i)                    STORE(p, i, v, mask)
after:   i < 0 or i >= size -> report, return;  the same for every lane of the mask that is set
"""

from __future__ import annotations

from manygrad.runtime.codegen.lowered import Inst, Low, LoweredProgram, Square
from manygrad.runtime.codegen.render.llvm.printer import LLVMPrinter
from manygrad.runtime.codegen.render.llvm.text import splat, vector
from manygrad.tensor.dtype import DType

FAULT = """define internal void @fault(ptr %record, i64 %access, i64 %slot, i64 %index, i64 %size) noinline cold {
  %pair = cmpxchg ptr %record, i64 0, i64 %access acq_rel monotonic
  %first = extractvalue {i64, i1} %pair, 1
  br i1 %first, label %write, label %done
write:
  %p1 = getelementptr i64, ptr %record, i64 1
  store i64 %slot, ptr %p1
  %p2 = getelementptr i64, ptr %record, i64 2
  store i64 %index, ptr %p2
  %p3 = getelementptr i64, ptr %record, i64 3
  store i64 %size, ptr %p3
  br label %done
done:
  ret void
}
"""
FAR = str(2**63 - 1)


class AccessChecks(LLVMPrinter):
    """What a printer adds to each access. Who inherits says where sizes and the record come from."""

    sizes: dict[Inst, str]  # PARAM -> elements

    def size_in_bytes(self, x: Inst) -> str:
        """The size of the buffer of PARAM `x`."""
        raise NotImplementedError

    def record(self) -> str:
        """The address of the record."""
        raise NotImplementedError

    def run(self) -> str:
        self.sizes = {}
        return super().run() + FAULT

    def inst(self, x: Inst) -> str | None:
        if x.op is Low.LOAD:
            self.check_all(x, x.dtype, x.src[2] if len(x.src) == 3 else None, x.lanes, 1)
        elif x.op in (Low.STORE, Low.STREAM):
            self.check_all(x, x.src[2].dtype, x.src[3] if len(x.src) == 4 else None, x.src[2].lanes, 2)
        elif x.op in (Low.MATRIX_LOAD, Low.MATRIX_STORE):
            square: Square = x.arg
            access, last = 1 if x.op is Low.MATRIX_LOAD else 2, square.constant + square.width - 1
            more = str(square.step * (square.rows - 1))
            for step in x.src[2:]:
                more = self.let(f"mul i64 {self.names[step]}, {square.rows - 1}")
            self.check(x.src[0], x.src[1], None, 1, access, square.constant)
            self.check(x.src[0], x.src[1], None, 1, access, last, more=more)
        found = super().inst(x)
        if x.op is Low.PARAM:
            self.sizes[x] = self.let(f"udiv i64 {self.size_in_bytes(x)}, {x.dtype.itemsize}")
        return found

    def check_all(self, x: Inst, dtype: DType, guard: Inst | None, lanes: int, access: int) -> None:
        """The access of `x`, of values of type `dtype`: groups of bytes are 4 elements."""
        each_of = dtype.itemsize // x.src[0].dtype.itemsize
        self.check(x.src[0], x.src[1], guard, lanes, access, x.arg + each_of - 1, each_of)

    def check(
        self,
        pointer: Inst,
        offset: Inst,
        guard: Inst | None,
        lanes: int,
        access: int,
        last: int,
        each_of: int = 1,
        more: str = "0",
    ) -> None:
        """The element `last` (of one lane, and `more`) beyond `offset`, and those that are `each_of` further for each
        lane."""
        if pointer.op is Low.PARAM:
            slot, size = pointer.arg, self.sizes[pointer]
        else:
            slot, nbytes = -1, self.program.scratch_bytes
            if pointer.op is Low.SHARED:
                slot, nbytes = -2, self.program.shared_bytes
            size = str((nbytes - pointer.arg) // pointer.dtype.itemsize)
        if lanes == 1:
            index = self.let(f"add i64 {self.names[offset]}, {last}")
            index = index if more == "0" else self.let(f"add i64 {index}, {more}")
            bad = self.let(f"icmp uge i64 {index}, {size}")
            if guard is not None:
                bad = self.let(f"and i1 {bad}, {self.names[guard]}")
        else:
            t, m = f"<{lanes} x i64>", f"<{lanes} x i1>"
            if offset.lanes > 1:
                indices = self.let(f"add {t} {self.names[offset]}, {splat(str(last), 'i64', lanes)}")
            else:
                ramp = "<" + ", ".join(f"i64 {last + each_of * i}" for i in range(lanes)) + ">"
                indices = self.let(f"add {t} {self.broadcast(self.names[offset], 'i64', lanes)}, {ramp}")
            each = self.let(f"icmp uge {t} {indices}, {self.broadcast(size, 'i64', lanes)}")
            if guard is not None:
                mask = self.names[guard] if guard.lanes > 1 else self.broadcast(self.names[guard], "i1", lanes)
                each = self.let(f"and {m} {each}, {mask}")
            bad = self.call(f"llvm.vector.reduce.or.v{lanes}i1", "i1", f"{m} {each}")
        label = self.fresh("check")
        self.line(f"br i1 {bad}, label %{label}.fault, label %{label}.ok")
        self.start(f"{label}.fault")
        if lanes > 1:  # the least index of a lane at fault
            only = self.let(f"select {m} {each}, {t} {indices}, {t} {splat(FAR, 'i64', lanes)}")
            index = self.call(f"llvm.vector.reduce.smin.v{lanes}i64", "i64", f"{t} {only}")
        self.line(f"call void @fault(ptr {self.record()}, i64 {access}, i64 {slot}, i64 {index}, i64 {size})")
        self.line("ret void")
        self.start(f"{label}.ok")

    def broadcast(self, text: str, t: str, lanes: int) -> str:
        """A scalar in all lanes."""
        if not text.startswith("%"):
            return splat(text, t, lanes)
        wide = vector(t, lanes)
        one = self.let(f"insertelement {wide} poison, {t} {text}, i64 0")
        return self.let(f"shufflevector {wide} {one}, {wide} poison, <{lanes} x i32> zeroinitializer")


class CheckedLLVMPrinter(AccessChecks):
    """Sizes and the record stand behind the buffers (`runtime/devices/compile/bounds.py`)."""

    def size_in_bytes(self, x: Inst) -> str:
        at = self.let(f"getelementptr i64, ptr %buffers, i64 {self.program.slots + x.arg}")
        return self.let(f"load i64, ptr {at}, align 8")

    def record(self) -> str:
        at = self.let(f"getelementptr ptr, ptr %buffers, i64 {2 * self.program.slots}")
        return self.let(f"load ptr, ptr {at}, align 8")


def render_checked(program: LoweredProgram, rounds_bfloat16: bool = False) -> str:
    """The LLVM IR of a program that checks its accesses."""
    return CheckedLLVMPrinter(program, rounds_bfloat16).run()
