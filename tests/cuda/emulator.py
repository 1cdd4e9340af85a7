"""Runs PTX on a processor: all threads of a launch at once, an instruction at a time, as NumPy arrays.

Threads that stand in the same basic block run together, the earliest block first, so that branches join again. What a
GPU would answer with a fault, or with wrong numbers, raises `Fault`: an access outside of a block of memory, an address
that is no multiple of its width, two threads of a block at one place of shared memory without a barrier between them, a
barrier that some threads of a block never reach, an exchange within a warp of which a thread is missing, a register
that is read before it is written. It cannot see speed, nor what the driver makes of the PTX.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tests.cuda.arithmetic import (
    COMPARE,
    TWO,
    TYPES,
    converted,
    fma32,
    fma64,
    least,
    quotient,
    remainder,
    shifted,
)
from tests.cuda.arithmetic import (
    high as upper_half,
)
from tests.cuda.copies import AsynchronousCopies
from tests.cuda.matrix import product, rounded_to_tf32
from tests.cuda.memory import LOCAL_BASE, SHARED_BASE, WARP, WINDOW, DeviceMemory, Fault, SharedMemory
from tests.cuda.parse import UNSIGNED, Instruction, Module, parse

AT_ONCE = 1 << 15  # threads
RUNNING, WAITING, ENDED, IN_WARP = 0, 1, 2, 3  # (the last: waiting for the other threads of an exchange)
MOST_STEPS = 200_000  # basic blocks in one run: what takes longer is taken for a loop without end

parsed = cache(parse)


def launch(
    module: Module, memory: DeviceMemory, grid: Sequence[int], block: Sequence[int], arguments: Sequence[bytes],
    data_at: int = 0,
) -> None:  # fmt: skip
    """Runs a kernel. `arguments`: the bytes of each parameter; `data_at`: the address of the module's own data."""
    threads = int(np.prod(block))
    if tuple(block) != tuple(module.threads) and module.threads != (1, 1, 1):
        raise Fault(f"{module.name} is made for blocks of {module.threads} threads, not of {tuple(block)}")
    if threads > 1024:
        raise Fault(f"a block of {threads} threads")
    if [len(a) for a in arguments] != [size for _, size in module.params]:
        raise Fault(f"{module.name} takes parameters of {module.params}")
    blocks = int(np.prod(grid))
    step = max(1, AT_ONCE // threads)
    for first in range(0, blocks, step):
        own = np.arange(first, min(blocks, first + step))
        Run(module, memory, tuple(grid), tuple(block), arguments, own, data_at).run()


class Run:
    """Some blocks of a launch. Large: the state of all threads, and a method for each family of instructions."""

    def __init__(
        self, module: Module, memory: DeviceMemory, grid: tuple[int, ...], block: tuple[int, ...],
        arguments: Sequence[bytes], blocks: np.ndarray, data_at: int,
    ) -> None:  # fmt: skip
        self.module, self.memory, self.data_at = module, memory, data_at
        self.per_block = int(np.prod(block))
        self.n = len(blocks) * self.per_block
        self.thread = np.arange(self.n) % self.per_block  # within its block
        self.block = np.repeat(np.arange(len(blocks)), self.per_block)  # of those that run now
        number = np.repeat(blocks, self.per_block)
        bx, by, bz = (*block, 1, 1)[:3]
        gx, gy, gz = (*grid, 1, 1)[:3]
        self.special = {
            "%tid.x": self.thread % bx, "%tid.y": self.thread // bx % by, "%tid.z": self.thread // (bx * by),
            "%ctaid.x": number % gx, "%ctaid.y": number // gx % gy, "%ctaid.z": number // (gx * gy),
            "%ntid.x": bx, "%ntid.y": by, "%ntid.z": bz, "%nctaid.x": gx, "%nctaid.y": gy, "%nctaid.z": gz,
            "%laneid": self.thread % WARP,
        }  # fmt: skip
        self.arguments = {name: data for (name, _), data in zip(module.params, arguments)}
        self.shared = SharedMemory(len(blocks), module.nbytes["shared"])
        self.copies = AsynchronousCopies(self.shared, memory, self.n)
        self.local = np.full((self.n, module.nbytes["local"]), 0xA5, np.uint8)
        self.registers: dict[str, np.ndarray] = {}
        self.at = np.zeros(self.n, np.int64)
        self.state = np.full(self.n, RUNNING, np.int8)

    # *** control ***

    def run(self) -> None:
        with np.errstate(all="ignore"):
            for _ in range(MOST_STEPS):
                ready = self.state == RUNNING
                if not ready.any():
                    if (self.state == IN_WARP).any():
                        raise Fault(f"{self.module.name}: an exchange within a warp of which a thread is missing")
                    if not (self.state == WAITING).any():
                        return
                    raise Fault(f"{self.module.name}: threads wait at a barrier that others of their block never reach")
                first = self.at[ready].min()
                self.step(int(first), np.flatnonzero(ready & (self.at == first)))
        raise Fault(f"{self.module.name}: more than {MOST_STEPS} basic blocks were run")

    def step(self, number: int, who: np.ndarray) -> None:
        """One basic block, of these threads."""
        if self.module.blocks[number] and self.module.blocks[number][0].op[0] == "shfl":
            who = self.complete(number)
            if not len(who):
                return
        everybody = len(who) == self.n
        self.who: Any = slice(None) if everybody else who
        self.ids = who
        for x in self.module.blocks[number]:
            if x.op[0] in ("bra", "ret", "exit", "barrier", "bar", "trap"):
                self.control(x, number, who)
                return
            self.execute(x)
            if self.memory.traffic is not None:
                self.memory.traffic.instructions += len(who)
        self.at[who] = number + 1
        if number + 1 == len(self.module.blocks):
            raise Fault("a kernel ends without ret")

    def complete(self, number: int) -> np.ndarray:
        """Of the threads that are at an exchange, those whose warps are there as a whole; the others wait."""
        there = np.flatnonzero((self.at == number) & np.isin(self.state, (RUNNING, IN_WARP)))
        self.state[there], self.who, self.ids = IN_WARP, there, there
        members = self.read(str(self.module.blocks[number][0].args[-1]), "u32")
        warp = self.block[there] * self.per_block + self.thread[there] // WARP
        _, where, count = np.unique(warp, return_inverse=True, return_counts=True)
        wanted = np.array([int(m).bit_count() for m in members])
        found = there[count[where] == wanted]
        self.state[found] = RUNNING
        return found

    def control(self, x: Instruction, number: int, who: np.ndarray) -> None:
        self.at[who] = number + 1
        if x.predicate is not None:
            holds = self.predicate(x)[self.who] if len(self.predicate(x)) == self.n else self.predicate(x)
            who = who[holds]
        match x.op[0]:
            case "bra":
                self.at[who] = self.module.labels[str(x.args[0])]
            case "ret" | "exit":
                self.copies.none_left(who)
                self.state[who] = ENDED
                self.release()
            case "trap":
                raise Fault("trap")
            case _:
                if "aligned" in x.op or x.op[0] == "bar":
                    warps = np.unique(self.block[who] * self.per_block + self.thread[who] // WARP)
                    there = np.isin(self.block * self.per_block + self.thread // WARP, warps) & (self.state != ENDED)
                    if there.sum() != len(who):
                        raise Fault("an aligned barrier that some threads of a warp do not reach together")
                self.state[who] = WAITING
                self.release()

    def release(self) -> None:
        """Blocks of which all threads that have not ended are at the barrier go on."""
        count = lambda state: np.bincount(self.block[self.state == state], minlength=len(self.shared.bytes))  # noqa: E731
        waiting = count(WAITING)
        ready = (waiting > 0) & (count(RUNNING) == 0)
        if ready.any():
            places = {
                tuple(np.unique(self.at[(self.block == b) & (self.state == WAITING)])) for b in np.flatnonzero(ready)
            }
            if any(len(p) != 1 for p in places):
                raise Fault("threads of one block wait at two barriers")
            self.state[np.isin(self.block, np.flatnonzero(ready)) & (self.state == WAITING)] = RUNNING
            self.shared.barrier(np.flatnonzero(ready))

    # *** operands ***

    def predicate(self, x: Instruction) -> np.ndarray:
        found = self.registers[str(x.predicate)]
        return ~found if x.negated else found

    def width(self, name: str) -> int:
        found = re.match(r"%([A-Za-z]+)\d*$", name)
        if found is None:
            raise Fault(f"{name} is no register")
        prefix = found.group(1)
        return self.module.registers[name[1:] if name[1:] in self.module.registers else prefix]

    def raw(self, name: str) -> np.ndarray:
        if name not in self.registers:
            raise Fault(f"{name} is read before it is written")
        return self.registers[name][self.who]

    def read(self, arg: str, kind: str) -> np.ndarray:
        """An operand as values of a type, one for each active thread."""
        count = len(self.ids)
        if kind == "pred":
            if arg in ("0", "1", "-1", "true", "false"):
                return np.full(count, arg in ("1", "-1", "true"))
            return self.raw(arg)
        if kind.endswith("x2"):  # two values in a register
            return np.ascontiguousarray(self.read(arg, "b32")).view(TYPES[kind[:-2]])
        t = TYPES[kind]
        if arg in self.special:
            value = self.special[arg]
            return np.broadcast_to(value, self.n)[self.who].astype(t)
        if arg.startswith("%"):
            bits = self.raw(arg)
            size = np.dtype(t).itemsize
            if bits.dtype.itemsize != size:
                bits = bits.astype(UNSIGNED[size])
            return bits.view(t)
        if arg in self.module.memory:
            space, offset = self.module.memory[arg]
            base = {"shared": 0, "local": 0, "global": self.data_at}[space]
            return np.full(count, base + offset, t)
        if found := re.match(r"0([fd])([0-9A-Fa-f]+)$", arg):
            bits = np.full(count, int(found.group(2), 16), np.uint32 if found.group(1) == "f" else np.uint64)
            return bits.view(t)
        if np.dtype(t).kind == "f":
            return np.full(count, float.fromhex(arg) if "x" in arg else float(arg), t)
        value = int(arg.rstrip("U"), 0) & ((1 << (8 * np.dtype(t).itemsize)) - 1)
        return np.full(count, value, UNSIGNED[np.dtype(t).itemsize]).view(t)

    def write(self, x: Instruction, name: str, value: np.ndarray) -> None:
        """A register of the active threads for which the instruction's predicate holds."""
        size = self.width(name)
        if name not in self.registers:
            self.registers[name] = np.zeros(self.n, bool if size == 0 else UNSIGNED[size])
        if size:
            value = np.ascontiguousarray(value)
            packed = len(value) == 2 * len(self.ids) and value.dtype.itemsize == 2
            value = value.view(UNSIGNED[4 if packed else value.dtype.itemsize])
            value = value if value.dtype.itemsize == size else value.astype(UNSIGNED[size])
        if x.predicate is None:
            self.registers[name][self.who] = value
        else:
            holds = self.predicate(x)[self.who]
            self.registers[name][self.ids[holds]] = value[holds]

    # *** instructions ***

    def execute(self, x: Instruction) -> None:
        op, modes = x.op[0], set(x.op[1:])
        kind = x.op[-1]
        args = [a for a in x.args if isinstance(a, str)]
        match op:
            case "ld":
                self.load(x, modes, kind)
                return
            case "st":
                self.store(x, modes, kind)
                return
            case "mov":
                self.move(x, kind)
                return
            case "cvta":
                self.generic(x, modes, args)
                return
            case "shfl":
                self.exchange(x)
                return
            case "mma":
                self.multiply(x)
                return
            case "cp":
                self.copy(x)
                return
            case "atom":
                self.compare_and_swap(x, modes, kind)
                return
            case "fence" | "membar" | "prefetch":
                return
            case "setp":
                compared = COMPARE[x.op[1]](self.read(args[1], kind), self.read(args[2], kind))
                halves = compared.reshape(-1, 2).T if kind.endswith("x2") else (compared, ~compared)
                for name, holds in zip(args[0].split("|"), halves):
                    if len(args) == 4:
                        extra = self.read(args[3], "pred")
                        holds = {"and": holds & extra, "or": holds | extra, "xor": holds ^ extra}[x.op[2]]
                    self.write(x, name, holds)
                return
            case "selp":
                chosen = self.read(args[3], "pred")
                self.write(x, args[0], np.where(chosen, self.read(args[1], kind), self.read(args[2], kind)))
                return
            case "cvt" if x.op[1:] == ("rna", "tf32", "f32"):
                self.write(x, args[0], rounded_to_tf32(self.read(args[1], "f32")))
                return
            case "cvt" if kind in ("f32",) and x.op[-2].endswith("x2"):
                t = TYPES[x.op[-2][:-2]]  # the first operand is the upper half
                high, low = (self.read(a, kind).astype(t) for a in args[1:3])
                self.write(x, args[0], np.stack([low, high], 1).reshape(-1))
                return
            case "cvt":
                made = converted(self.read(args[1], x.op[-1]), TYPES[x.op[-2]], modes)
                width = self.width(args[0])  # (of a wider register the sign fills the rest)
                self.write(x, args[0], made.astype(TYPES[f"s{8 * width}"]) if made.dtype.kind == "i" else made)
                return
        if op in ("prmt", "bfi"):
            for name in args[1:3]:
                self.poisoned(x, name, int(kind[1:]))
        self.write(x, args[0], self.alu(op, modes, kind, args[1:]))

    def alu(self, op: str, modes: set[str], kind: str, args: list[str]) -> np.ndarray:
        if kind == "pred":
            values = [self.read(a, "pred") for a in args]
            if op == "not":
                return ~values[0]
            return TWO[op](*values)
        if op in ("shl", "shr"):
            return shifted(self.read(args[0], kind), self.read(args[1], "u32"), op == "shl")
        if op in ("bfe", "bfi", "prmt", "shf"):
            return self.bits(op, modes, kind, args)
        values = [self.read(a, kind) for a in args[:2]]
        if op in ("mad", "mul") and "wide" in modes:
            wide = TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
            found = values[0].astype(wide) * values[1].astype(wide)
            return found if op == "mul" else found + self.read(args[2], f"{kind[0]}{2 * int(kind[1:])}")
        a = values[0]
        match op:
            case "mul" if "hi" in modes:
                return upper_half(*values)
            case "mad":
                return a * values[1] + self.read(args[2], kind)
            case "fma":
                c = self.read(args[2], kind)
                return fma32(a, values[1], c) if kind == "f32" else fma64(a, values[1], c)
            case "div":
                return a / values[1] if a.dtype.kind == "f" else quotient(*values)
            case "rem":
                return remainder(*values)
            case "min" | "max":
                return least(*values, modes, np.minimum if op == "min" else np.maximum)
            case "neg":
                return -a
            case "abs":
                return np.abs(a)
            case "not":
                return ~a
            case "rcp":
                return (1 / a).astype(a.dtype)
            case "sqrt":
                return np.sqrt(a)
            case "popc":
                return np.array([int(v).bit_count() for v in a], np.uint32)
            case "clz":
                bits = 8 * a.dtype.itemsize
                return np.array([bits - int(v).bit_length() for v in a], np.uint32)
            case "copysign":
                return np.copysign(values[1], a)
        if op in TWO:
            return TWO[op](*values)
        raise NotImplementedError(f"{op}.{'.'.join(modes)} in PTX")

    def bits(self, op: str, modes: set[str], kind: str, args: list[str]) -> np.ndarray:
        one = np.uint64(1)
        if op == "bfe":
            a = self.read(args[0], kind)
            at, count = (self.read(s, "u32").astype(np.uint64) for s in args[1:3])
            bits = a.astype(np.uint64 if kind[0] == "u" else np.int64)
            found = (bits.view(np.uint64) >> at) & ((one << np.minimum(count, 63)) - one)
            if kind[0] == "s":
                top = (found >> (np.maximum(count, 1) - one)) & one
                found = np.where(top == 1, found | ~((one << np.minimum(count, 63)) - one), found)
            return found.astype(UNSIGNED[a.dtype.itemsize]).view(a.dtype)
        if op == "bfi":
            own, into = (self.read(s, kind).astype(np.uint64) for s in args[:2])
            at, count = (self.read(s, "u32").astype(np.uint64) for s in args[2:4])
            mask = ((one << np.minimum(count, 63)) - one) << at
            return ((into & ~mask) | (own << at & mask)).astype(TYPES[kind])
        if op == "prmt":
            a, b, how = (self.read(s, "b32").astype(np.uint64) for s in args[:3])
            both, found = a | b << np.uint64(32), np.zeros(len(a), np.uint64)
            for i in range(4):
                nibble = how >> np.uint64(4 * i)
                byte = (both >> (np.uint64(8) * (nibble & np.uint64(7)))) & np.uint64(255)
                sign = np.where(byte >> np.uint64(7) == 1, np.uint64(255), np.uint64(0))
                found |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
            return found.astype(np.uint32)
        low, up = (self.read(s, "b32").astype(np.uint64) for s in args[:2])
        by = self.read(args[2], "u32").astype(np.uint64)
        by = by & np.uint64(31) if "wrap" in modes else np.minimum(by, np.uint64(32))
        both = low | up << np.uint64(32)
        found = both << by >> np.uint64(32) if "l" in modes else both >> by
        return found.astype(np.uint32)

    def move(self, x: Instruction, kind: str) -> None:
        to, source = x.args
        if isinstance(to, tuple):  # a register's parts
            size = int(kind[1:]) // len(to)
            self.poisoned(x, str(source), int(kind[1:]))
            whole = self.read(str(source), kind)
            for i, name in enumerate(to):
                if name != "_":
                    self.write(x, name, (whole >> np.array(i * size, whole.dtype)).astype(TYPES[f"b{size}"]))
        elif isinstance(source, tuple):
            size, found = int(kind[1:]) // len(source), np.zeros(len(self.ids), TYPES[kind])
            for i, name in enumerate(source):
                self.poisoned(x, name, size)
                found |= self.read(name, f"b{size}").astype(TYPES[kind]) << np.array(i * size, TYPES[kind])
            self.write(x, to, found)
        else:
            self.write(x, to, self.read(source, kind))

    def poisoned(self, x: Instruction, name: str, bits: int) -> None:
        """Lanes that nobody uses are taken apart and put together, too, and never written: they get a strange value."""
        if name.startswith("%") and name not in self.registers and name not in self.special:
            self.write(x, name, np.full(len(self.ids), 0xA5A5A5A5A5A5A5A5 & ((1 << bits) - 1), UNSIGNED[bits // 8]))

    def generic(self, x: Instruction, modes: set[str], args: list[str]) -> None:
        """cvta: between the address spaces and the generic one."""
        base = SHARED_BASE if "shared" in modes else LOCAL_BASE if "local" in modes else 0
        own = self.read(args[1], "u64")
        self.write(x, args[0], own - np.uint64(base) if "to" in modes else own + np.uint64(base))

    def exchange(self, x: Instruction) -> None:
        assert x.op[1:3] == ("sync", "bfly"), x.text
        to, own, lanes, clamp, mask = (str(a) for a in x.args)
        to = to.partition("|")[0]
        members, bit = self.read(mask, "u32"), self.read(lanes, "u32")
        assert (self.read(clamp, "u32") == WARP - 1).all()
        lane = self.thread[self.ids] % WARP
        if ((members >> lane.astype(np.uint32)) & 1 != 1).any():
            raise Fault("a thread takes part in an exchange that is not in its mask")
        place = np.full(self.n + WARP, -1)  # thread -> position among the active ones
        place[self.ids] = np.arange(len(self.ids))
        other = place[self.ids - lane + (lane ^ bit.astype(np.int64))]
        values = self.read(own, "b32")
        self.write(x, to, np.where(other >= 0, values[other], values))

    def multiply(self, x: Instruction) -> None:
        """mma: all threads of a warp are there."""
        kind = x.op[7]
        shape = ("sync", "aligned", "m16n8k8" if kind == "tf32" else "m16n8k16", "row", "col", "f32")
        assert x.op[1:7] == shape and kind == x.op[8] in ("bf16", "f16", "tf32"), x.text
        warp = self.block[self.ids] * self.per_block + self.thread[self.ids] // WARP
        whole = len(self.ids) % WARP == 0 and (warp.reshape(-1, WARP) == warp[::WARP, None]).all()
        if not whole or x.predicate is not None:
            raise Fault("a matrix instruction that some threads of a warp do not reach together")
        to, *operands = x.args
        kinds = ("b32", "b32", "f32")
        a, b, c = ([self.read(r, k).reshape(-1, WARP) for r in rs] for rs, k in zip(operands, kinds))
        for name, found in zip(to, product(a, b, c, kind)):
            self.write(x, name, found.reshape(-1))

    # *** memory ***

    def place(self, text: str) -> tuple[str, int]:
        found = re.match(r"\[(.+?)(?:\s*\+\s*(-?\d+))?\]$", text)
        assert found is not None, text
        return found.group(1), int(found.group(2) or 0)

    def addresses(self, text: str) -> np.ndarray:
        name, more = self.place(text)
        return (self.read(name, "u64").astype(np.int64) + more).astype(np.uint64)

    def load(self, x: Instruction, modes: set[str], kind: str) -> None:
        to, at = x.args
        names = to if isinstance(to, tuple) else (to,)
        size = int(kind[1:]) // 8
        if "param" in modes:
            name, more = self.place(str(at))
            held = np.frombuffer(self.arguments[name], np.uint8)[more : more + size].view(UNSIGNED[size])
            self.write(x, names[0], np.full(len(self.ids), held[0]))
            return
        active = self.active(x)
        data = self.moved(self.addresses(str(at)), active, modes, size * len(names), x.text)
        for i, name in enumerate(names):
            one = np.ascontiguousarray(data[:, i * size : (i + 1) * size]).view(TYPES[kind])[:, 0]
            full = np.zeros(len(self.ids), one.dtype)
            full[active] = one
            if kind[0] == "s" and self.width(name) > size:
                full = full.astype(TYPES[f"s{8 * self.width(name)}"])
            self.write(x, name, full)

    def store(self, x: Instruction, modes: set[str], kind: str) -> None:
        at, what = x.args
        names = what if isinstance(what, tuple) else (what,)
        size = int(kind[1:]) // 8
        parts = [self.read(n, kind).view(np.uint8).reshape(len(self.ids), size) for n in names]
        active = self.active(x)
        data = np.concatenate(parts, 1)[active]
        self.moved(self.addresses(str(at)), active, modes, size * len(names), x.text, data)

    def copy(self, x: Instruction) -> None:
        """cp.async: a copy, the end of a set of them, or a wait."""
        assert x.op[1] == "async" and x.predicate is None, x.text
        match x.op[2]:
            case "commit_group":
                self.copies.commit(self.ids)
            case "wait_all":
                self.copies.commit(self.ids)
                self.copies.wait(self.ids, 0)
            case "wait_group":
                self.copies.wait(self.ids, int(str(x.args[0])))
            case "ca" | "cg":
                to, source, size, *read = (str(a) for a in x.args)
                nbytes = int(size)
                if nbytes not in ((16,) if x.op[2] == "cg" else (4, 8, 16)):
                    raise Fault(f"{x.text}: copies of {nbytes} bytes")
                some = self.read(read[0], "u32") if read else np.full(len(self.ids), nbytes)
                blocks, addresses = self.block[self.ids], self.addresses(source)
                self.copies.start(self.ids, blocks, self.addresses(to), addresses, some, nbytes, x.text)
                self.count(addresses[some > 0], self.ids[some > 0], nbytes)
            case _:
                raise NotImplementedError(x.text)

    def count(self, at: np.ndarray, ids: np.ndarray, nbytes: int) -> None:
        if self.memory.traffic is not None:
            warps = self.block[ids] * self.per_block + self.thread[ids] // WARP
            self.memory.traffic.count(warps, at.astype(np.int64) - self.memory.base, nbytes)

    def active(self, x: Instruction) -> np.ndarray:
        """Which of the threads that run this have a predicate that holds."""
        return np.ones(len(self.ids), bool) if x.predicate is None else self.predicate(x)[self.who]

    def moved(
        self, addresses: np.ndarray, active: np.ndarray, modes: set[str], nbytes: int, what: str,
        data: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Reads `nbytes` for each active thread, or writes `data`."""
        addresses, ids = addresses[active], self.ids[active]
        space = next((s for s in ("global", "shared", "local", "const") if s in modes), None)
        if space is None:  # the generic address space
            in_shared = (addresses >= SHARED_BASE) & (addresses < SHARED_BASE + WINDOW)
            in_local = (addresses >= LOCAL_BASE) & (addresses < LOCAL_BASE + WINDOW)
            found = np.zeros((len(ids), nbytes), np.uint8)
            spaces = (
                (in_shared, "shared", SHARED_BASE),
                (in_local, "local", LOCAL_BASE),
                (~in_shared & ~in_local, "global", 0),
            )
            for here, name, base in spaces:
                if here.any():
                    own = None if data is None else data[here]
                    found[here] = self.moved_in(name, addresses[here] - np.uint64(base), ids[here], nbytes, what, own)
            return found
        return self.moved_in("global" if space == "const" else space, addresses, ids, nbytes, what, data)

    def moved_in(
        self, space: str, addresses: np.ndarray, ids: np.ndarray, nbytes: int, what: str, data: np.ndarray | None
    ) -> np.ndarray:
        if space == "shared":
            at = self.shared.offsets(addresses, nbytes, nbytes, what)
            if data is None:
                if self.memory.traffic is not None:
                    self.memory.traffic.count_banks(ids, at, nbytes)
                return self.shared.read(at, self.block[ids], ids, nbytes)
            self.shared.write(at, self.block[ids], ids, data)
            return data
        if space == "local":
            cells = addresses.astype(np.int64)[:, None] + np.arange(nbytes)
            if data is None:
                return self.local[ids[:, None], cells]
            self.local[ids[:, None], cells] = data
            return data
        at = self.memory.check(addresses, nbytes, nbytes, what, 1 if data is None else None)
        self.count(addresses, ids, nbytes)
        word = next(w for w in (8, 4, 2, 1) if nbytes % w == 0)
        whole = self.memory.bytes[: len(self.memory.bytes) // word * word].view(UNSIGNED[word])
        cells = (at // word)[:, None] + np.arange(nbytes // word)
        if data is None:
            return whole[cells].view(np.uint8).reshape(len(ids), nbytes)
        whole[cells] = np.ascontiguousarray(data).view(UNSIGNED[word]).reshape(cells.shape)
        return data

    def compare_and_swap(self, x: Instruction, modes: set[str], kind: str) -> None:
        """One thread after the other."""
        assert "cas" in modes, x.text
        to, at, expected, new = (str(a) for a in x.args)
        addresses, old, put = self.addresses(at), self.read(expected, kind), self.read(new, kind)
        found = np.zeros(len(self.ids), TYPES[kind])
        size = found.dtype.itemsize
        for i in np.flatnonzero(self.active(x)):
            cell = self.memory.view(int(addresses[i]), size).view(TYPES[kind])
            found[i] = cell[0]
            if cell[0] == old[i]:
                cell[0] = put[i]
        self.write(x, to, found)
