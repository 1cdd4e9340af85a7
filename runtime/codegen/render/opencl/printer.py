"""Prints a lowered program as OpenCL C, one instruction at a time.

The kernel is `run_part(buffer, offset, ..., variable, ..., total, per[, scratch])`: of each argument the memory object
and how many bytes into it the argument begins (a part of a memory object could begin only where the device says), then
the integer arguments, and how the parallel loop of `total` indices is cut: work item `i` runs those from `i * per` on,
`per` of them. Scratch memory is local where the device has room for it, else `scratch` has a part for each work item;
as on every device it begins with the index up to which it was used in this call, 0 here.

A program with groups of its own (`LoweredProgram.group`) has an index of the parallel loop for each group; its work
items wait for each other at barriers, and exchange values within subgroups of a size that the kernel demands, or else
through memory that the group shares. In all others a work item needs no other one.

before:  LOOP i: STORE(c, i, FMA(LOAD(a, i), LOAD(b, i), 1))   16 lanes
after:   for (long v9 = begin; v9 < finish; v9 += 16) {
           const float16 v10 = vload16(0, p1 + v9);
           const float16 v11 = vload16(0, p2 + v9);
           const float16 v12 = fma(v10, v11, (float16)(0x1.0000000000000p+0f));
           vstore16(v12, 0, p0 + v9);
         }
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import prod

from manygrad.runtime.codegen.lowered import EXCHANGE_BYTES, Inst, Low, LoweredProgram
from manygrad.runtime.codegen.render.opencl.arithmetic import OpenCLArithmetic
from manygrad.runtime.codegen.render.opencl.text import (
    WIDTHS,
    Value,
    constant,
    memory_type,
    pieces,
    scalar_type,
    starts,
    vector,
    whole,
)
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops

ENTRY = "run_part"
SCRATCH = "// bytes of global scratch memory a work item: "  # the second line
SUBGROUPS = "#pragma OPENCL EXTENSION cl_khr_subgroup_shuffle : enable"
ITEM_ALIGNMENT = 128  # of each work item's scratch memory: that of the widest vector


@dataclass(frozen=True)
class OpenCLTarget:
    """The parameters of the code besides the program. `group`: work items of a group; `local_bytes`: memory that a
    group may use as scratch memory."""

    group: int = 1
    local_bytes: int = 0
    double: bool = True
    subgroups: tuple[int, ...] = ()  # sizes that a kernel may demand of its subgroups; (): these exchange nothing


def scratch_of_item(program: LoweredProgram) -> int:
    """Bytes that one work item has."""
    return -(-program.scratch_bytes // ITEM_ALIGNMENT) * ITEM_ALIGNMENT


def items_of_group(program: LoweredProgram, target: OpenCLTarget) -> int:
    return prod(program.group) if program.group else target.group


def subgroup_of(program: LoweredProgram, target: OpenCLTarget) -> int:
    """The least size of subgroups in which the program's work items can exchange values; 0: none, or they do not."""
    items = max((2 * x.arg for x in program.insts if x.op is Low.EXCHANGE), default=0)
    return next((n for n in target.subgroups if n >= items > 0), 0)


def exchange_bytes(program: LoweredProgram, target: OpenCLTarget) -> int:
    """Bytes of shared memory through which work items exchange values."""
    runs = [list(xs) for op, xs in groupby(program.insts, lambda x: x.op) if op is Low.EXCHANGE]
    values = 0 if subgroup_of(program, target) else max((sum(x.lanes for x in xs) for xs in runs), default=0)
    return EXCHANGE_BYTES * values * items_of_group(program, target)


def scratch_is_local(program: LoweredProgram, target: OpenCLTarget) -> bool:
    shared = program.shared_bytes + exchange_bytes(program, target)
    return scratch_of_item(program) * items_of_group(program, target) + shared <= target.local_bytes


class OpenCLPrinter(OpenCLArithmetic):
    """Writes a program as OpenCL C. Large: a method for each family of instructions."""

    def __init__(self, program: LoweredProgram, target: OpenCLTarget) -> None:
        super().__init__()
        self.program, self.target = program, target
        self.local, self.subgroup = scratch_is_local(program, target), subgroup_of(program, target)
        self.spaces: dict[Inst, str] = {}  # pointer -> its address space

    def run(self) -> str:
        program, target = self.program, self.target
        for op, insts in groupby(program.insts, lambda x: x.op):
            if op is Low.EXCHANGE:
                self.exchange(list(insts))
                continue
            for inst in insts:
                found = self.inst(inst)
                if found is not None:
                    self.names[inst] = found
        if self.double and not target.double:
            raise NotImplementedError(
                f"kernel {program.name} computes in float64, which this OpenCL device does not have: "
                "cast to float32 first, or run it on another device, as with .to('CPU')"
            )
        arguments = [f"__global uchar* b{i}, const long o{i}" for i in range(program.slots)]
        arguments += [f"const long n{i}" for i in range(len(program.variables))]
        arguments += ["const long total", "const long per"]
        item, items, before = scratch_of_item(program), items_of_group(program, target), list[str]()
        if item:
            at = f"{self.item} * {item}" if self.local else f"(get_group_id(0) * {items} + {self.item}) * {item}L"
            if self.local:
                size = item * items
                before.append(f"__local uchar all_scratch[{size}] __attribute__((aligned({ITEM_ALIGNMENT})));")
            else:
                arguments.append("__global uchar* all_scratch")
            before.append(f"{self.scratch_space} uchar* scratch = all_scratch + {at};")
            before.append(f"*({self.scratch_space} long*)scratch = 0;")
        arguments += self.more_arguments()
        for name, size in (("shared", program.shared_bytes), ("exchanged", exchange_bytes(program, target))):
            if size:
                before.append(f"__local uchar {name}[{size}] __attribute__((aligned({ITEM_ALIGNMENT})));")
        sizes = (*program.group, 1, 1, 1)[:3] if program.group else (target.group, 1, 1)
        first = f"get_{'group' if program.group else 'global'}_id(0)"
        head = [
            f"// {program.name}",
            f"{SCRATCH}{0 if self.local else item}",
            "#pragma OPENCL FP_CONTRACT OFF",
            *(["#pragma OPENCL EXTENSION cl_khr_fp64 : enable"] if self.double else []),
            *([SUBGROUPS] if self.subgroup else []),
            *self.helpers.values(),
            f"__kernel __attribute__((reqd_work_group_size({', '.join(map(str, sizes))})))",
            *([f"__attribute__((intel_reqd_sub_group_size({self.subgroup})))"] if self.subgroup else []),
            f"void {ENTRY}({', '.join(arguments)}) {{",
            f"  const long begin = {first} * per, finish = min(begin + per, total);",
            "  if (begin >= finish) return;",
            *(f"  {line}" for line in before),
        ]
        return "\n".join([*head, *self.lines, "}", ""])

    def more_arguments(self) -> list[str]:
        return []

    @property
    def item(self) -> str:
        """The number of this work item in its group."""
        sizes = self.program.group or (self.target.group,)
        text = f"get_local_id({len(sizes) - 1})"
        for dim in reversed(range(len(sizes) - 1)):
            text = f"({text} * {sizes[dim]} + get_local_id({dim}))"
        return text

    @property
    def scratch_space(self) -> str:
        return "__local" if self.local else "__global"

    # *** instructions ***

    def inst(self, x: Inst) -> Value | None:
        src = [self.names[s] for s in x.src if s in self.names]
        d, lanes = x.dtype, x.lanes
        match x.op:
            case Low.PARAM:
                return self.pointer(x, "__global", f"b{x.arg} + o{x.arg}")
            case Low.SCRATCH:
                return self.pointer(x, self.scratch_space, f"scratch + {x.arg}")
            case Low.SHARED:
                return self.pointer(x, "__local", f"shared + {x.arg}")
            case Low.ITEM:
                return (f"(long){self.item if x.arg is None else f'get_local_id({x.arg})'}",)
            case Low.BARRIER:
                self.line("barrier(CLK_LOCAL_MEM_FENCE);")
                return None
            case Low.VAR:
                return (f"n{x.arg}",)
            case Low.BEGIN:
                return ("begin",)
            case Low.FINISH:
                return ("finish",)
            case Low.CONST | Low.HERE:
                return tuple(constant(x.arg, d, n) for n in pieces(lanes))
            case Low.IOTA | Low.TABLE | Low.FIRST:
                return self.table(x)
            case Low.SPLAT:
                one = f"-({src[0][0]})" if d.is_bool else src[0][0]
                wide = {n: self.piece(d, n, f"({vector(scalar_type(d), n)})({one})") for n in set(pieces(lanes)) - {1}}
                return tuple(wide.get(n, src[0][0]) for n in pieces(lanes))
            case Low.SHUFFLE:
                a, b = x.src
                return self.joined(d, [self.lane(a, i) if i < a.lanes else self.lane(b, i - a.lanes) for i in x.arg])
            case Low.HALVES:
                return self.half(x, src[0])
            case Low.EXTRACT:
                return (self.piece(d, 1, self.lane(x.src[0], x.arg)),)
            case Low.ANY:
                found = (f"any({m})" if n > 1 else m for m, n in zip(src[0], pieces(x.src[0].lanes)))
                return (self.piece(d, 1, f"({' | '.join(found)})"),)
            case Low.FMA:
                return tuple(self.piece(d, n, f"fma({', '.join(own)})") for n, *own in zip(pieces(lanes), *src))
            case Low.ROUND:
                return tuple(self.piece(d, n, f"rint({own})") for n, own in zip(pieces(lanes), src[0]))
            case Low.LOAD:
                return self.load(x)
            case Low.STORE | Low.STREAM:
                self.store(x)
                return None
            case Low.PREFETCH:
                if self.spaces[x.src[0]] == "__global":
                    self.line(f"prefetch({self.address(x, self.names[x.src[1]][0])}, 1);")
                return None
            case Low.ACC:
                return tuple(self.accumulator(d, n, own) for n, own in zip(pieces(lanes), src[0]))
            case Low.GET:
                return tuple(self.piece(d, n, own) for n, own in zip(pieces(lanes), src[0]))
            case Low.SET:
                for name, own in zip(*src):
                    self.line(f"{name} = {own};")
                return None
            case Low.LOOP | Low.IF | Low.ELSE | Low.END:
                return self.control(x, src)
        if not isinstance(x.op, Ops):
            raise NotImplementedError(f"{x.op.name} is an instruction of other machines (`Machine.scales`, `dots`)")
        return self.alu(x, src)

    def control(self, x: Inst, src: list[Value]) -> Value | None:
        """Opens or closes a block; of a loop its index."""
        match x.op:
            case Low.LOOP:
                name = self.fresh()
                (begin,), (end,) = src
                self.line(f"for (long {name} = {begin}; {name} < {end}; {name} += {x.arg}) {{")
                self.depth += 1
                return (name,)
            case Low.IF:
                self.line(f"if ({src[0][0]}) {{")
                self.depth += 1
            case Low.ELSE:
                self.depth -= 1
                self.line("} else {")
                self.depth += 1
            case Low.END:
                self.depth -= 1
                self.line("}")
        return None

    def exchange(self, insts: list[Inst]) -> None:
        """Values of the work items whose places differ in a bit: all at once, as a barrier takes its time. Small types
        are exchanged as int."""
        found: dict[Inst, list[str]] = {x: [] for x in insts}
        values = [(x, self.lane(x.src[0], i)) for x in insts for i in range(x.lanes)]
        items = items_of_group(self.program, self.target)
        types = {x: "int" if x.dtype.is_bool or x.dtype.itemsize < 4 else scalar_type(x.dtype) for x in insts}
        at = [f"*(__local {types[x]}*)((__local long*)exchanged + {n * items} + " for n, (x, _) in enumerate(values)]
        if not self.subgroup:
            for place, (_, own) in zip(at, values):
                self.line(f"{place}{self.item}) = {own};")
            self.line("barrier(CLK_LOCAL_MEM_FENCE);")
        for place, (x, own) in zip(at, values):
            shuffled = f"sub_group_shuffle_xor(({types[x]})({own}), {x.arg}u)"
            other = shuffled if self.subgroup else f"{place}({self.item} ^ {x.arg}))"
            found[x].append(self.piece(x.dtype, 1, f"({scalar_type(x.dtype)})({other})"))
        if not self.subgroup:
            self.line("barrier(CLK_LOCAL_MEM_FENCE);")
        self.names.update((x, self.joined(x.dtype, own)) for x, own in found.items())

    def pointer(self, x: Inst, space: str, at: str) -> Value:
        self.spaces[x] = space
        if x.dtype is dtypes.float64:
            self.double = True
        t = f"{space} {memory_type(x.dtype)}*"
        name = self.fresh("p")
        self.line(f"{t} {name} = ({t})({at});")
        return (name,)

    def accumulator(self, d: DType, n: int, start: str) -> str:
        name = self.fresh("acc")
        self.line(f"{vector(scalar_type(d), n)} {name} = {start};")
        return name

    def table(self, x: Inst) -> Value:
        """Lanes that are known now."""
        if x.op is Low.FIRST:
            lanes = [str(int(i < x.arg)) for i in range(x.lanes)]
        else:
            lanes = [whole(int(i), 8) for i in (range(x.lanes) if x.op is Low.IOTA else x.arg)]
        return self.joined(x.dtype, lanes)

    def half(self, x: Inst, src: Value) -> Value:
        whole_lanes, n = x.src[0].lanes, x.lanes
        if n in WIDTHS and 2 * n == whole_lanes and 2 * n <= WIDTHS[0]:
            one = f"({src[0]}).{'hi' if x.arg else 'lo'}"
            return (self.piece(x.dtype, n, f"({one} & 1)" if n == 1 and x.dtype.is_bool else one),)
        if n % WIDTHS[0] == 0:
            return src[: len(src) // 2] if x.arg == 0 else src[len(src) // 2 :]
        return self.joined(x.dtype, [self.lane(x.src[0], x.arg * n + i) for i in range(n)])

    # *** memory ***

    def address(self, x: Inst, offset: str, more: int = 0) -> str:
        """Address of the element at `offset`, of those that LOAD or STORE `x` counts."""
        terms = [self.names[x.src[0]][0]]
        first = x.src[1]
        if not (first.op in (Low.CONST, Low.HERE) and first.arg == 0 and first.lanes == 1):
            terms.append(offset)
        if x.arg + more:
            terms.append(str(x.arg + more))
        return f"({' + '.join(terms)})" if len(terms) > 1 else terms[0]

    def load(self, x: Inst) -> Value:
        pointer, offset = x.src[0], x.src[1]
        if x.dtype.itemsize != pointer.dtype.itemsize:
            raise NotImplementedError(f"LOAD of {x.dtype} from memory of {pointer.dtype}")
        guard = x.src[2] if len(x.src) == 3 else None
        found = []
        for k, (first, n) in enumerate(starts(x.lanes)):
            if offset.lanes > 1:
                text = self.gathered(x, offset, guard, first, n)
            else:
                at = self.address(x, self.names[offset][0], first)
                if guard is None:
                    text = self.loaded(at, n)
                elif guard.lanes == 1:
                    text = f"({self.names[guard][0]} ? {self.loaded(at, n)} : {self.zeros(x.dtype, n)})"
                elif guard.op is Low.FIRST:
                    text = self.first_loaded(x, at, n, guard.arg - first)
                else:
                    mask = self.names[guard][k]
                    text = f"{self.load_helper(x, n)}({at}, {mask})"
            found.append(self.valued(x.dtype, n, text))
        return tuple(found)

    def zeros(self, d: DType, n: int) -> str:
        return f"({vector(memory_type(d), n)})(0)"

    def loaded(self, at: str, n: int) -> str:
        return f"*{at}" if n == 1 else f"vload{n}(0, {at})"

    def valued(self, d: DType, n: int, text: str) -> str:
        """A value as registers hold it, of what memory holds."""
        return self.piece(d, n, self.mask(f"(({text}) != {constant(0, dtypes.uint8, n)})", 1, n) if d.is_bool else text)

    def stored(self, d: DType, n: int, text: str) -> str:
        """The reverse of `valued`."""
        return f"convert_{vector('uchar', n)}({text} & 1)" if d.is_bool else text

    def first_loaded(self, x: Inst, at: str, n: int, count: int) -> str:
        """The first `count` of a piece's lanes; 0 in the others."""
        if count >= n:
            return self.loaded(at, n)
        if count <= 0:
            return self.zeros(x.dtype, n)
        parts, done = [], 0
        for m in pieces(count):
            parts.append(self.loaded(f"({at} + {done})", m))
            done += m
        t = memory_type(x.dtype)
        return f"({vector(t, n)})({', '.join([*parts, *[f'({t})(0)'] * (n - count)])})"

    def gathered(self, x: Inst, offset: Inst, guard: Inst | None, first: int, n: int) -> str:
        t, lanes = memory_type(x.dtype), []
        for i in range(first, first + n):
            one = f"*{self.address(x, self.lane(offset, i))}"
            if guard is not None:
                one = f"({self.lane(guard, i)} ? {one} : ({t})(0))"
            lanes.append(one)
        return f"({vector(t, n)})({', '.join(lanes)})" if n > 1 else lanes[0]

    def load_helper(self, x: Inst, n: int) -> str:
        """A function that loads the lanes of a mask; 0 in the others."""
        space, t = self.spaces[x.src[0]], memory_type(x.dtype)
        name = f"load{space.strip('_')[0]}_{t}{n}"
        if name not in self.helpers:
            v, args = vector(t, n), f"const {space} {t}* p, const {vector('int', n)} m"
            if n == 1:
                body = f"return m ? *p : ({t})(0);"
            else:
                lanes = " ".join(f"if (m.s{i:x}) v.s{i:x} = p[{i}];" for i in range(n))
                body = f"if (all(m)) return vload{n}(0, p); {v} v = ({v})(0); {lanes} return v;"
            self.helpers[name] = f"static {v} {name}({args}) {{ {body} }}"
        return name

    def store_helper(self, x: Inst, n: int) -> str:
        """A function that stores the lanes of a mask."""
        space, t = self.spaces[x.src[0]], memory_type(x.src[2].dtype)
        name = f"store{space.strip('_')[0]}_{t}{n}"
        if name not in self.helpers:
            v, m = vector(t, n), vector("int", n)
            if n == 1:
                body = "if (m) *p = v;"
            else:
                lanes = " ".join(f"if (m.s{i:x}) p[{i}] = v.s{i:x};" for i in range(n))
                body = f"if (all(m)) vstore{n}(v, 0, p); else {{ {lanes} }}"
            self.helpers[name] = f"static void {name}(const {v} v, {space} {t}* p, const {m} m) {{ {body} }}"
        return name

    def store(self, x: Inst) -> None:
        pointer, offset, value = x.src[0], x.src[1], x.src[2]
        if value.dtype.itemsize != pointer.dtype.itemsize:
            raise NotImplementedError(f"STORE of {value.dtype} to memory of {pointer.dtype}")
        guard = x.src[3] if len(x.src) == 4 else None
        for k, (first, n) in enumerate(starts(value.lanes)):
            text = self.stored(value.dtype, n, self.names[value][k])
            if offset.lanes > 1:
                self.scattered(x, guard, first, n, text)
                continue
            at = self.address(x, self.names[offset][0], first)
            if guard is None:
                self.put(at, n, text)
            elif guard.lanes == 1:
                self.line(f"if ({self.names[guard][0]}) {{")
                self.depth += 1
                self.put(at, n, text)
                self.depth -= 1
                self.line("}")
            elif guard.op is Low.FIRST:
                self.put_first(at, n, text, memory_type(value.dtype), guard.arg - first)
            else:
                self.line(f"{self.store_helper(x, n)}({text}, {at}, {self.names[guard][k]});")

    def put(self, at: str, n: int, text: str) -> None:
        self.line(f"*{at} = {text};" if n == 1 else f"vstore{n}({text}, 0, {at});")

    def put_first(self, at: str, n: int, text: str, t: str, count: int) -> None:
        """The first `count` of a piece's lanes."""
        if count >= n:
            self.put(at, n, text)
        elif count > 0:
            name, done = self.let(vector(t, n), text), 0
            for m in pieces(count):
                lanes = "".join(f"{i:x}" for i in range(done, done + m))
                self.put(f"({at} + {done})", m, f"{name}.s{lanes}")
                done += m

    def scattered(self, x: Inst, guard: Inst | None, first: int, n: int, text: str) -> None:
        """In order: the last one to an address stays."""
        offset, name = x.src[1], self.let(vector(memory_type(x.src[2].dtype), n), text)
        for i in range(n):
            only = "" if guard is None else f"if ({self.lane(guard, first + i)}) "
            one = name if n == 1 else f"{name}.s{i:x}"
            self.line(f"{only}*{self.address(x, self.lane(offset, first + i))} = {one};")


def render(program: LoweredProgram, target: OpenCLTarget) -> str:
    """The OpenCL C of a program."""
    return OpenCLPrinter(program, target).run()


def global_scratch(text: str) -> int:
    """Bytes of `scratch` that a work item of the rendered kernel has; 0: it takes no such argument."""
    line = text.split("\n", 2)[1]
    assert line.startswith(SCRATCH), line
    return int(line.removeprefix(SCRATCH))
