"""Prints a lowered program as LLVM IR for NVIDIA GPUs (LLVM's NVPTX target, which makes PTX of it).

The kernel is `kernel(buffer, ..., variable, ..., total, per[, scratch])`. The parallel loop of `total` indices is cut
as on OPENCL: a thread runs `per` of them one after the other; a program with groups of its own has an index for each
block of threads, whose threads meet at barriers and exchange values within warps.

Values, blocks and arithmetic are those of the CPU's printer. Different are the arguments, memory that a block shares,
guarded loads (a branch: what is not read has no address), and how wide an access may be: PTX demands addresses that are
multiples of the access's size, so it is as wide as the offset is known to be a multiple, where the buffers themselves
begin at multiples of 16 bytes (`NVPTXTarget.aligned`; who starts the kernel looks).

before:  PARAM 0; ITEM; BARRIER                     EXCHANGE(x.float32, 4)
after:   addrspacecast ptr addrspace(1) %b0 to ptr  bitcast to i32; llvm.nvvm.shfl.sync.bfly.i32(mask, x, 4, 31)
         llvm.nvvm.read.ptx.sreg.tid.x
         llvm.nvvm.barrier.cta.sync.all(0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import gcd, prod
from typing import Any

from manygrad.runtime.codegen.lowered import EXCHANGE_BYTES, Inst, Low, LoweredProgram
from manygrad.runtime.codegen.render.llvm.bounds import AccessChecks
from manygrad.runtime.codegen.render.llvm.printer import LLVMPrinter
from manygrad.runtime.codegen.render.llvm.text import ENTRY, literal, memory_type, scalar_type, splat, suffix, vector
from manygrad.runtime.codegen.target import WARP
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops

WIDEST_BYTES = 16  # of one access
SCRATCH_ALIGNMENT = 128  # of each thread's part of global scratch memory
DIMS = "xyz"
MULTIPLES = frozenset(
    {Ops.MUL, Ops.ADD, Ops.SUB, Ops.IDIV, Ops.MOD, Ops.NEG, Ops.WHERE, Low.LOOP}
)  # known by what their sources are
OF_OTHERS = frozenset(  # instructions of other machines (`Machine.scales`, `dots`)
    x for x in Low if x.name.startswith(("MATRIX", "DOT")) or x in (Low.SCALE, Low.WITHIN, Low.LOOKUP, Low.SUM_WORDS)
)
FACTORS = {  # of matrix instructions: the type of a register, and what the instruction is called
    dtypes.float16: ("<2 x half>", "m16n8k16.row.col.f32.f32"),
    dtypes.bfloat16: ("i32", "m16n8k16.row.col.bf16"),
    dtypes.float32: ("i32", "m16n8k8.row.col.tf32"),
}
SCRATCH = "; bytes of scratch memory a thread: "  # the second line


@dataclass(frozen=True)
class NVPTXTarget:
    """The parameters of the code besides the program. `threads`: of a block, where the program has no groups of its
    own; `aligned`: whether all buffers begin at multiples of 16 bytes."""

    threads: int = 128
    aligned: bool = True


def threads_of(program: LoweredProgram, target: NVPTXTarget) -> tuple[int, ...]:
    """Threads of a block along its dimensions."""
    return program.group or (target.threads,)


def exchanged_bytes(program: LoweredProgram) -> int:
    """Bytes of shared memory through which threads of different warps exchange values."""
    runs = groupby(program.insts, lambda x: x.op is Low.EXCHANGE and x.arg >= WARP)
    values = max((sum(x.lanes for x in xs) for far, xs in runs if far), default=0)
    return EXCHANGE_BYTES * values * prod(program.group)


def scratch_of_thread(program: LoweredProgram) -> int:
    """Bytes of global scratch memory that each thread has."""
    return -(-program.scratch_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


class NVPTXPrinter(LLVMPrinter):
    """Large: what differs from the CPU's printer, for every kind of instruction."""

    is_checked = False  # whether each access is compared with its buffer's size

    def __init__(self, program: LoweredProgram, target: NVPTXTarget) -> None:
        super().__init__(program)
        self.target = target
        self.threads = threads_of(program, target)
        self.multiples: dict[Inst, int] = {}

    def run(self) -> str:
        self.prologue()
        for far, insts in groupby(self.program.insts, lambda x: x.op is Low.EXCHANGE and x.arg >= WARP):
            if far:
                self.exchange_through_memory(list(insts))
                continue
            for inst in insts:
                if (found := self.inst(inst)) is not None:
                    self.names[inst] = found
        shared, exchanged = self.program.shared_bytes, exchanged_bytes(self.program)
        body = "\n".join(["entry:", *self.entry, *self.lines, "  ret void"])
        threads = ",".join(str(n) for n in (*self.threads, 1, 1)[:3])
        return "\n".join([
            f"; {self.program.name}",
            f"{SCRATCH}{scratch_of_thread(self.program)}",
            *([f"@shared = internal addrspace(3) global [{shared} x i8] undef, align 128"] if shared else []),
            *([f"@exchanged = internal addrspace(3) global [{exchanged} x i8] undef, align 8"] if exchanged else []),
            *self.declared,
            f"define ptx_kernel void @{ENTRY}({', '.join(self.arguments())}) #0 {{", body, "}",
            f'attributes #0 = {{ nounwind "nvvm.reqntid"="{threads}" }}', "",
        ])  # fmt: skip

    def arguments(self) -> list[str]:
        buffers = [f"ptr addrspace(1) %b{i}" for i in range(self.program.slots)]
        variables = [f"i64 %n{i}" for i in range(len(self.program.variables))]
        scratch = ["ptr addrspace(1) %all.scratch"] if self.program.scratch_bytes else []
        return [*buffers, *variables, "i64 %total", "i64 %per", *scratch]

    def prologue(self) -> None:
        """Which indices of the parallel loop this thread runs, and where its scratch memory is."""
        block = self.register("ctaid.x")
        thread = self.number(None)
        first = block
        if not self.program.group:
            start = self.let(f"mul nuw nsw i64 {block}, {self.threads[0]}")
            first = self.let(f"add nuw nsw i64 {start}, {thread}")
        begin = self.let(f"mul nuw nsw i64 {first}, %per")
        end = self.let(f"add nuw nsw i64 {begin}, %per")
        finish = self.call("llvm.smin.i64", "i64", f"i64 {end}", "i64 %total")
        some = self.let(f"icmp slt i64 {begin}, {finish}")
        self.line(f"br i1 {some}, label %run, label %none")
        self.lines += ["none:", "  ret void"]
        self.start("run")
        self.begin, self.finish = begin, finish
        if size := scratch_of_thread(self.program):
            here = self.let(f"mul nuw nsw i64 {block}, {prod(self.threads)}")
            here = self.let(f"add nuw nsw i64 {here}, {thread}")
            here = self.let(f"mul nuw nsw i64 {here}, {size}")
            at = self.let(f"getelementptr i8, ptr addrspace(1) %all.scratch, i64 {here}")
            self.scratch = self.let(f"addrspacecast ptr addrspace(1) {at} to ptr")
            self.line(f"store i64 0, ptr {self.scratch}, align 8")

    # *** threads ***

    def register(self, name: str) -> str:
        return self.let(f"zext i32 {self.call(f'llvm.nvvm.read.ptx.sreg.{name}', 'i32')} to i64")

    def number(self, dim: int | None) -> str:
        """The place of this thread in its block along a dimension, or its number in it."""
        if dim is not None:
            return self.register(f"tid.{DIMS[dim]}")
        found = self.register(f"tid.{DIMS[len(self.threads) - 1]}")
        for i in reversed(range(len(self.threads) - 1)):
            above = self.let(f"mul nuw nsw i64 {found}, {self.threads[i]}")
            found = self.let(f"add nuw nsw i64 {above}, {self.register(f'tid.{DIMS[i]}')}")
        return found

    def exchange_through_memory(self, insts: Sequence[Inst]) -> None:
        """Values of threads of other warps: all at once, as a barrier takes its time."""
        threads, number = prod(self.threads), self.number(None)
        found = {x: list[str]() for x in insts}
        lanes = [(x, i) for x in insts for i in range(x.lanes)]
        places = {}
        for n, (x, i) in enumerate(lanes):
            e = "i8" if x.dtype.is_bool else scalar_type(x.dtype)
            one = self.names[x.src[0]]
            if x.lanes > 1:
                one = self.let(f"extractelement {self.typed(x.src[0])}, i64 {i}")
            if x.dtype.is_bool:
                one = self.let(f"zext i1 {one} to i8")
            base = f"ptr addrspacecast (ptr addrspace(3) @exchanged to ptr), i64 {n * threads}"
            places[x, i] = e, base
            self.line(f"store {e} {one}, ptr {self.let(f'getelementptr i64, {self.moved(base, number)}')}, align 8")
        self.barrier()
        for x, i in lanes:
            e, base = places[x, i]
            other = self.let(f"xor i64 {number}, {x.arg}")
            one = self.let(f"load {e}, ptr {self.let(f'getelementptr i64, {self.moved(base, other)}')}, align 8")
            found[x].append(self.let(f"icmp ne i8 {one}, 0") if x.dtype.is_bool else one)
        self.barrier()
        for x, values in found.items():
            self.names[x] = self.joined(x, values)

    def moved(self, base: str, number: str) -> str:
        """Pointer and index of a thread's place beyond `base`."""
        return f"ptr {self.let(f'getelementptr i64, {base}')}, i64 {number}"

    def joined(self, x: Inst, values: list[str]) -> str:
        if x.lanes == 1:
            return values[0]
        e, whole = scalar_type(x.dtype), "poison"
        for i, one in enumerate(values):
            whole = self.let(f"insertelement {vector(e, x.lanes)} {whole}, {e} {one}, i64 {i}")
        return whole

    def barrier(self) -> None:
        """(Not the aligned one: a branch of a few threads may lie before it.)"""
        self.call("llvm.nvvm.barrier.cta.sync.all", "void", "i32 0")

    def warp_mask(self) -> str:
        """Which threads of a warp there are: all, but in the last one of a block."""
        count = prod(self.threads)
        if count % WARP == 0:
            return "-1"
        first = self.let(f"and i64 {self.number(None)}, -{WARP}")
        left = self.let(f"sub i64 {count}, {first}")
        there = self.call("llvm.smin.i64", "i64", f"i64 {left}", f"i64 {WARP}")
        bits = self.let(f"shl i64 1, {there}")
        return self.let(f"trunc i64 {self.let(f'sub i64 {bits}, 1')} to i32")

    def exchange(self, x: Inst) -> str:
        """The value of the thread whose number differs in the bit x.arg: in words of 32 bits, lane by lane."""
        e, size, mask = scalar_type(x.dtype), 1 if x.dtype.is_bool else x.dtype.itemsize, self.warp_mask()
        own, found = self.names[x.src[0]], list[str]()
        for i in range(x.lanes):
            one = own if x.lanes == 1 else self.let(f"extractelement {vector(e, x.lanes)} {own}, i64 {i}")
            bits = f"i{1 if x.dtype.is_bool else 8 * size}"
            raw = one if e == bits else self.let(f"bitcast {e} {one} to {bits}")
            if size == 8:
                low = self.let(f"trunc i64 {raw} to i32")
                high = self.let(f"trunc i64 {self.let(f'lshr i64 {raw}, 32')} to i32")
                low, high = (self.let(f"zext i32 {self.shuffled(w, mask, x.arg)} to i64") for w in (low, high))
                raw = self.let(f"or i64 {low}, {self.let(f'shl i64 {high}, 32')}")
            else:
                word = raw if size == 4 else self.let(f"zext {bits} {raw} to i32")
                word = self.shuffled(word, mask, x.arg)
                raw = word if size == 4 else self.let(f"trunc i32 {word} to {bits}")
            found.append(raw if e == bits else self.let(f"bitcast {bits} {raw} to {e}"))
        return self.joined(x, found)

    def shuffled(self, word: str, mask: str, bit: int) -> str:
        name = "llvm.nvvm.shfl.sync.bfly.i32"
        return self.call(name, "i32", f"i32 {mask}", f"i32 {word}", f"i32 {bit}", f"i32 {WARP - 1}")

    def warp_dot(self, x: Inst) -> str:
        """mma.sync of 16 rows, 8 columns, 16 iterations, or 8 of tf32. A thread has two registers of each row, and of
        its column."""
        t, kind = FACTORS[x.src[0].dtype]
        upper, lower, column = (self.registers(a, t) for a in x.src[:3])
        own = [f"{t} {r}" for pair in zip(upper, lower) for r in pair] + [f"{t} {r}" for r in column]
        sums = [f"float {self.let(f'extractelement {self.typed(x.src[3])}, i64 {i}')}" for i in range(4)]
        result = "{ float, float, float, float }"
        found = self.call(f"llvm.nvvm.mma.{kind}", result, *own, *sums)
        return self.joined(x, [self.let(f"extractvalue {result} {found}, {i}") for i in range(4)])

    def registers(self, x: Inst, t: str) -> list[str]:
        """Values of 16 bits as registers of 32; float32 rounded to tf32."""
        if x.dtype is dtypes.float32:
            values = [self.let(f"extractelement {self.typed(x)}, i64 {i}") for i in range(x.lanes)]
            return [self.call("llvm.nvvm.f2tf32.rna", "i32", f"float {v}") for v in values]
        pairs = self.let(f"bitcast {self.typed(x)} to <{x.lanes // 2} x i32>")
        found = [self.let(f"extractelement <{x.lanes // 2} x i32> {pairs}, i64 {i}") for i in range(x.lanes // 2)]
        return found if t == "i32" else [self.let(f"bitcast i32 {r} to {t}") for r in found]

    # *** instructions ***

    def inst(self, x: Inst) -> str | None:
        if x.op in OF_OTHERS:
            raise NotImplementedError(f"{x.op.name} is an instruction of other machines (`Machine.scales`, `dots`)")
        match x.op:
            case Low.ITEM:
                return self.number(x.arg)
            case Low.SHARED:
                return self.let(f"getelementptr i8, ptr addrspacecast (ptr addrspace(3) @shared to ptr), i64 {x.arg}")
            case Low.BARRIER:
                self.barrier()
                return None
            case Low.EXCHANGE:
                return self.exchange(x)
            case Low.WARP_DOT:
                return self.warp_dot(x)
            case Low.COPY:
                self.copy(x)
                return None
            case Low.COMMIT:
                self.call("llvm.nvvm.cp.async.commit.group", "void")
                return None
            case Low.AWAIT:
                self.call("llvm.nvvm.cp.async.wait.group", "void", f"i32 {x.arg}")
                return None
            case Low.PREFETCH:
                return None
            case Low.STREAM:
                self.store(x)
                return None
        return super().inst(x)

    def argument(self, x: Inst) -> str:
        match x.op:
            case Low.PARAM:
                return self.let(f"addrspacecast ptr addrspace(1) %b{x.arg} to ptr")
            case Low.SCRATCH:
                return self.let(f"getelementptr i8, ptr {self.scratch}, i64 {x.arg}")
            case Low.VAR:
                return f"%n{x.arg}"
            case Low.BEGIN:
                return self.begin
        return self.finish

    def shift(self, x: Inst, t: str, src: list[str], num: Any) -> str:
        """(LLVM 22 takes a shift that is chosen to be 0 where it is too wide for the instruction, which looks at its
        lower 32 bits alone.)"""
        bits = x.dtype.itemsize * 8
        if (x.op is Ops.SHR and not x.dtype.is_unsigned) or x.src[1].op is Low.CONST:
            return super().shift(x, t, src, num)
        least = f"llvm.umin.{suffix(scalar_type(x.dtype), x.lanes)}"
        by = self.call(least, t, f"{t} {src[1]}", f"{t} {num(bits - 1)}")
        found = self.let(f"{'shl' if x.op is Ops.SHL else 'lshr'} {t} {src[0]}, {by}")
        fits = self.let(f"icmp ult {t} {src[1]}, {num(bits)}")
        return self.let(f"select {vector('i1', x.lanes)} {fits}, {t} {found}, {t} {num(0)}")

    # *** memory ***

    def load(self, x: Inst) -> str:
        """A guard is a branch. Of a vector with a mask, or with an offset for each lane, the lanes are loaded one by
        one (LLVM 22 ends the process for some masked loads of this target)."""
        offset, guard = x.src[1], x.src[2] if len(x.src) == 3 else None
        if guard is None and offset.lanes == 1:
            return super().load(x)
        e = scalar_type(x.dtype)
        zero = "false" if x.dtype.is_bool else literal(0, x.dtype)
        if offset.lanes == 1 and guard is not None and guard.lanes == 1:
            whole = Inst(x.op, x.dtype, x.lanes, x.src[:2], x.arg, x.depth)
            return self.guarded(
                self.names[guard],
                vector(e, x.lanes),
                splat(zero, e, x.lanes),
                partial(super().load, whole),
            )
        t, found = vector(e, x.lanes), "zeroinitializer"
        for i in range(x.lanes):
            if (condition := self.lane_condition(guard, i)) == "false":
                continue
            one = self.guarded(condition, e, zero, partial(self.loaded_lane, x, i))
            found = self.let(f"insertelement {t} {found}, {e} {one}, i64 {i}")
        return found

    def copy(self, x: Inst) -> None:
        """cp.async, of 16 bytes past the first-level cache; by way of registers where the addresses are not known to be
        multiples of its size, or accesses are checked."""
        to, at, source, offset, *inside = x.src
        loaded = Inst(Low.LOAD, x.dtype, x.lanes, (source, offset, *inside), x.arg, x.depth)
        stored = Inst(Low.STORE, dtypes.void, x.lanes, (to, at, loaded), 0, x.depth)
        nbytes = x.lanes * x.dtype.itemsize
        if self.is_checked or min(self.alignment(loaded), self.alignment(stored)) < nbytes:
            self.names[loaded] = str(self.inst(loaded))
            self.inst(stored)
            return
        places = [
            self.let(
                f"addrspacecast ptr {self.address(self.names[p], i, c, memory_type(x.dtype))} to ptr addrspace({n})"
            )
            for p, i, c, n in ((to, at, 0, 3), (source, offset, x.arg, 1))
        ]
        name = f"llvm.nvvm.cp.async.{'cg' if nbytes == WIDEST_BYTES else 'ca'}.shared.global.{nbytes}"
        own = [f"ptr addrspace({n}) {place}" for n, place in zip((3, 1), places)]
        if inside:
            own.append(f"i32 {self.let(f'select i1 {self.names[inside[0]]}, i32 {nbytes}, i32 0')}")
        self.call(f"{name}.s" if inside else name, "void", *own)

    def guarded(self, condition: str, t: str, zero: str, make: Callable[[], str]) -> str:
        """What `make` writes code for, where the condition holds; else `zero`."""
        if condition == "true":
            return make()
        before, label = self.label, self.fresh("load")
        self.line(f"br i1 {condition}, label %{label}, label %{label}.end")
        self.start(label)
        found = make()
        inside = self.label
        self.line(f"br label %{label}.end")
        self.start(f"{label}.end")
        return self.let(f"phi {t} [ {zero}, %{before} ], [ {found}, %{inside} ]")

    def lane_condition(self, guard: Inst | None, i: int) -> str:
        if guard is None:
            return "true"
        if guard.op is Low.FIRST:
            return "true" if i < guard.arg else "false"
        if guard.lanes == 1:
            return self.names[guard]
        return self.let(f"extractelement {self.typed(guard)}, i64 {i}")

    def lane_address(self, x: Inst, i: int) -> tuple[str, str]:
        """(type in memory, address) of one lane of an access."""
        pointer, offset = x.src[:2]
        element = memory_type(pointer.dtype)
        if offset.lanes == 1:
            return element, self.address(self.names[pointer], offset, x.arg + i, element)
        own = self.let(f"extractelement {self.typed(offset)}, i64 {i}")
        at = self.let(f"getelementptr inbounds {element}, ptr {self.names[pointer]}, i64 {own}")
        return element, self.let(f"getelementptr inbounds {element}, ptr {at}, i64 {x.arg}") if x.arg else at

    def loaded_lane(self, x: Inst, i: int) -> str:
        e, at = self.lane_address(x, i)
        found = self.let(f"load {e}, ptr {at}, align {x.src[0].dtype.itemsize}")
        return self.let(f"icmp ne {e} {found}, 0") if x.dtype.is_bool else found

    def store(self, x: Inst) -> None:
        offset, value, guard = x.src[1], x.src[2], x.src[3] if len(x.src) == 4 else None
        if offset.lanes == 1 and (guard is None or guard.lanes == 1):
            super().store(x)
            return
        for i in range(value.lanes):  # (in order: the last one to an address stays)
            if (condition := self.lane_condition(guard, i)) == "false":
                continue
            label = self.fresh("store")
            if condition != "true":
                self.line(f"br i1 {condition}, label %{label}, label %{label}.end")
                self.start(label)
            e, at = self.lane_address(x, i)
            one = self.names[value]
            if value.lanes > 1:
                one = self.let(f"extractelement {self.typed(value)}, i64 {i}")
            if value.dtype.is_bool:
                one = self.let(f"zext i1 {one} to {e}")
            self.line(f"store {e} {one}, ptr {at}, align {x.src[0].dtype.itemsize}")
            if condition != "true":
                self.line(f"br label %{label}.end")
                self.start(f"{label}.end")

    def alignment(self, x: Inst) -> int:
        pointer, offset = x.src[:2]
        each = pointer.dtype.itemsize
        if offset.lanes > 1 or (pointer.op is Low.PARAM and not self.target.aligned):
            return each
        known = gcd(gcd(self.multiple_of(offset), x.arg) * each, WIDEST_BYTES)
        return max(each, known & -known)

    def multiple_of(self, x: Inst) -> int:
        """A number of which an index is known to be a multiple; 0: it is 0."""
        if x not in self.multiples:
            self.multiples[x] = _multiple(x, [self.multiple_of(s) for s in x.src] if x.op in MULTIPLES else [])
        return self.multiples[x]


def _multiple(x: Inst, src: list[int]) -> int:
    """`src`: what its sources are known to be multiples of."""
    match x.op:
        case Low.CONST | Low.HERE:
            return abs(int(x.arg))
        case Ops.MUL:
            return src[0] * src[1]
        case Ops.ADD | Ops.SUB | Ops.MOD:
            return gcd(src[0], src[1])
        case Ops.IDIV if x.src[1].op is Low.CONST:
            return src[0] // src[1] if src[1] and src[0] % src[1] == 0 else 1
        case Ops.NEG:
            return src[0]
        case Ops.WHERE:
            return gcd(src[1], src[2])
        case Low.LOOP:
            return gcd(src[0], int(x.arg))
    return 1


class CheckedNVPTXPrinter(AccessChecks, NVPTXPrinter):
    """With a test of every index (CHECK_OOB=1); the sizes of the buffers and the record are arguments of their own."""

    is_checked = True

    def arguments(self) -> list[str]:
        return [*super().arguments(), *(f"i64 %s{i}" for i in range(self.program.slots)), "ptr addrspace(1) %record"]

    def size_in_bytes(self, x: Inst) -> str:
        return f"%s{x.arg}"

    def record(self) -> str:
        return self.let("addrspacecast ptr addrspace(1) %record to ptr")

    def run(self) -> str:
        return super().run().replace("noinline cold", "alwaysinline")


def render(program: LoweredProgram, target: NVPTXTarget) -> str:
    """The LLVM IR of a program."""
    return NVPTXPrinter(program, target).run()


def render_checked(program: LoweredProgram, target: NVPTXTarget) -> str:
    """The LLVM IR of a program that checks its accesses."""
    return CheckedNVPTXPrinter(program, target).run()


def scratch_in(text: str) -> int:
    """Bytes of scratch memory that a thread of the rendered kernel has; 0: it takes no such argument."""
    line = text.split("\n", 2)[1]
    assert line.startswith(SCRATCH), line
    return int(line.removeprefix(SCRATCH))
