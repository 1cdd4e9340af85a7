"""CPU: kernels as LLVM IR compiled in this process, run by the native thread team.

All `CPU:i` of a process share kernels and threads; each has its own memory counters. Memory is NumPy's, or, after
`set_arena`, a shared-memory arena that other workers of the host can read.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from manygrad.native.chain import CHAIN_BYTES, Row, chain_table, temporaries_at
from manygrad.native.compiler import compiler, leave_memory
from manygrad.native.graph import Job, graph_table, room_for_stamps, seconds
from manygrad.runtime.codegen.describe import estimate, evaluate_int, signature
from manygrad.runtime.codegen.lowered import Program
from manygrad.runtime.codegen.opt import Opt, make_plan
from manygrad.runtime.codegen.pipeline import Prepared, prepare
from manygrad.runtime.devices.base import Call, Graph, Kernel
from manygrad.runtime.devices.bounds import Record
from manygrad.runtime.devices.chain import Chained
from manygrad.runtime.devices.host import HostDevice, Memory
from manygrad.runtime.devices.objects import OBJECTS, version
from manygrad.runtime.devices.target import host_target
from manygrad.runtime.devices.threads import team, wanted_threads
from manygrad.runtime.devices.together import compile_together
from manygrad.runtime.render.bounds import render_checked
from manygrad.runtime.render.llvm import ENTRY, render
from manygrad.tensor.environment import BEAM, CHECK_OOB, DEBUG, NOOPT
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

SERIAL_WORK = 1 << 17  # operations + bytes up to which waking threads costs more than it saves
PIECE_WORK = 1 << 16  # the least work worth a turn at the shared counter

_arena: tuple[Callable[[int], int], Callable[[int], None], int] | None = None


def set_arena(alloc: Callable[[int], int] | None, free: Callable[[int], None] | None = None, address: int = 0) -> None:
    """From now on CPU memory comes from `address + alloc(nbytes)` and is given back by `free(offset)`; None: NumPy's again."""
    global _arena
    assert alloc is None or free is not None
    _arena = None if alloc is None else (alloc, free, address)  # type: ignore[assignment]


class CPUKernel(Kernel):
    """A loaded kernel: `address` of its function, and how its parallel loop is cut."""

    def __init__(self, prepared: Prepared, ast: UOp, address: int, checked: bool = False) -> None:
        flops, nbytes = estimate(ast)
        super().__init__(prepared.name, "", flops, nbytes, prepared.opts)
        self.prepared, self.address = prepared, address
        self.record = Record() if checked else None  # where a bounds-checked kernel reports
        sig = signature(prepared.ast)
        plan = make_plan(sig, prepared.opts)
        self.slots = sig.slots
        self.names = tuple(v.arg[0] for v in signature(ast).variables)
        self.bounds = tuple((v.arg[1], v.arg[2]) for v in signature(ast).variables)
        self.counts = plan.counts
        inner = plan.loops[: plan.parallel][-1:]  # what its tiles pack serves one index each
        self.staged = max(
            (plan.loops.index(r) + 1 for r, _ in plan.staged if r not in inner), default=0
        )  # loops up to the last that packs
        self.fixed = self.pieces({}) if all(n.op is Ops.CONST for n, _ in self.counts) else None

    @property
    def source(self) -> str:
        """The LLVM IR, made again on request: a kernel from the disk cache has only object code."""
        return self.prepared.code(render if self.record is None else render_checked)

    @source.setter
    def source(self, text: str) -> None:
        pass

    def pieces(self, variables: dict[str, int]) -> tuple[int, int]:
        """(total, grain) of the parallel loop."""
        counts = [-(-evaluate_int(n, variables) // step) for n, step in self.counts]
        total = math.prod(counts)
        work = self.flops + self.nbytes
        if work <= SERIAL_WORK or total <= 1:
            return max(1, total), max(1, total)
        smallest = -(-PIECE_WORK * total // work)
        wanted = 4 * wanted_threads()
        if self.staged:  # what is packed serves a run of indices: as few cuts within one as keep the threads busy
            run = math.prod(counts[self.staged :])
            return total, max(1, smallest, -(-run // max(1, -(-wanted * run // total))))
        return total, max(1, smallest, -(-total // max(64, wanted)))

    def arguments(self, handles: Sequence[Memory], vars: tuple[int, ...]) -> tuple[Any, Any, int, int]:
        """(buffers, variables, total, grain), the first two as C arrays."""
        assert len(handles) >= self.slots and len(vars) == len(self.names), (
            f"{self.name} takes {self.slots} buffers and the variables {self.names}, not {len(handles)} and {vars}"
        )
        if self.record is not None:
            buffers = self.record.arguments(handles, self.slots)
        else:
            buffers = (ctypes.c_void_p * max(1, len(handles)))(*[h.address for h in handles])
        if not self.names:
            return buffers, None, *(self.fixed or (1, 1))
        for name, value, (lo, hi) in zip(self.names, vars, self.bounds):
            if not lo <= value <= hi:
                raise ValueError(f"{self.name}: variable {name} is {value}, outside of its bounds {lo}..{hi}")
        numbers = (ctypes.c_int64 * len(vars))(*vars)
        return buffers, numbers, *(self.fixed or self.pieces(dict(zip(self.names, vars))))

    def __call__(self, handles: Sequence[Memory], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        buffers, numbers, total, grain = self.arguments(handles, vars)
        native = team()
        scratch = native.ready()
        began = time.perf_counter() if wait else 0.0
        native.run(self.address, buffers, numbers, total, grain, scratch)
        seconds = time.perf_counter() - began if wait else None
        if self.record is not None:
            self.record.check(self.name)
        return seconds


class CPUChain(Chained):
    """Blocks of a chain as the indices of a parallel loop; each thread has temporaries of its own (`native/chain.py`)."""

    kernels: tuple[CPUKernel, ...]

    def __init__(self, ast: UOp, kernels: Sequence[CPUKernel]) -> None:
        super().__init__(ast, kernels)
        self.address = team().chain_address
        self.record = self if any(k.record is not None for k in kernels) else None
        begin = temporaries_at(sum(len(own) * 2 + 1 for own in self.spec.slots))
        self.places = {
            i: begin + offset for i, offset, _ in self.spec.temps
        }  # argument -> byte offset of the thread's own
        end = max(begin + offset + nbytes for _, offset, nbytes in self.spec.temps)
        assert end <= CHAIN_BYTES, f"{end} bytes of temporaries a block, of {CHAIN_BYTES}"
        self.totals = [(ctypes.c_int64 * (1 if k.fixed else self.spec.blocks))(*self.totals_of(k)) for k in kernels]

    def totals_of(self, kernel: CPUKernel) -> list[int]:
        """The total of its loop, for each block where they differ."""
        if kernel.fixed:
            return [kernel.fixed[0]]
        return [kernel.pieces({kernel.names[0]: block})[0] for block in range(self.spec.blocks)]

    def arguments(self, handles: Sequence[Memory], vars: tuple[int, ...]) -> tuple[Any, Any, int, int]:
        """As a kernel's: (buffers, variables, total, grain)."""
        rows: list[Row] = []
        moves: list[int] = []
        words: list[int] = []
        for kernel, own, variables, totals in zip(self.kernels, self.spec.slots, self.variables, self.totals):
            buffers = kernel.arguments([handles[i] for i in own], variables)[0]
            rows.append(Row(kernel.address, len(words), ctypes.addressof(totals), 0 if kernel.fixed else 8))
            moves += (len(words) + j for j, i in enumerate(own) if i in self.places)
            words += (
                self.places[own[j]] if j < len(own) and own[j] in self.places else word or 0
                for j, word in enumerate(buffers)
            )
        return chain_table(rows, moves, words), None, self.spec.blocks, 1

    def __call__(self, handles: Sequence[Memory], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        return CPUKernel.__call__(self, handles, vars, wait)  # type: ignore[arg-type]

    def check(self, name: str) -> None:
        """As a kernel's record: raises what one of the kernels has reported."""
        for kernel in self.kernels:
            if kernel.record is not None:
                kernel.record.check(kernel.name)


class CPUDevice(HostDevice):
    kind = "CPU"
    knobs = ("NOOPT", "CHECK_OOB", "BEAM", "BEAM_SPLIT")

    def _alloc(self, nbytes: int) -> Memory:
        if _arena is None:
            return super()._alloc(nbytes)
        alloc, _, base = _arena
        return Memory(base + alloc(nbytes), nbytes, _arena)

    def _free(self, handle: Memory, nbytes: int) -> None:
        if isinstance(handle.owner, tuple):  # of an arena
            _, free, base = handle.owner
            free(handle.address - base)

    def _compile(self, ast: UOp) -> Kernel:
        if not BEAM or NOOPT:
            return self.compile_with(ast)
        from manygrad.runtime.devices.tune import tuned  # it measures this device's kernels

        return self.compile_with(ast, tuned(ast))

    def _chain(self, ast: UOp) -> Kernel:
        return CPUChain(ast, [cast(CPUKernel, self.compile(k)) for k in ast.src])

    def compile_with(self, ast: UOp, opts: tuple[Opt, ...] | None = None, simplify: bool = True) -> CPUKernel:
        """The kernel under given optimisations (None: the heuristic's), from the disk cache where it was made before.

        The ids in `opts` are those of the ranges after `collapse`; without `simplify`, of `ast` itself.
        """
        return self.load(prepare(ast, host_target().machine, opts, simplify), ast)

    def load(self, prepared: Prepared, ast: UOp) -> CPUKernel:
        """The kernel, ready to run; its machine code from the disk cache where it was made before."""
        key = self.object_key(prepared, ast)
        code = OBJECTS.get(key)
        if code is None:
            code = self.build(prepared, key, self.code_of(prepared))
        return self._loaded(prepared, ast, code)

    def _loaded(self, prepared: Prepared, ast: UOp, code: bytes) -> CPUKernel:
        return CPUKernel(prepared, ast, compiler().load(code, [ENTRY])[ENTRY], bool(CHECK_OOB))

    def object_key(self, prepared: Prepared, ast: UOp) -> bytes:
        """The key of a kernel's machine code on disk."""
        return hashlib.sha256(ast.key + f"{prepared.opts}{'True' if CHECK_OOB else ''}".encode() + version()).digest()

    def code_of(self, prepared: Prepared) -> str:
        return prepared.code(render_checked if CHECK_OOB else render)

    def build(self, prepared: Prepared, key: bytes, text: str, known: bytes | None = None) -> bytes:
        """Machine code of LLVM IR `text` (`known`, if it was compiled before), put on disk under `key`. From any thread."""
        began = time.perf_counter()
        code = known or compiler().object_code(text)
        OBJECTS.put(key, code)
        if DEBUG >= 1:
            print(f"compiled {prepared.name} in {(time.perf_counter() - began) * 1e3:.1f} ms: {list(prepared.opts)}")
        return code

    def compile_all(self, asts: Iterable[UOp]) -> None:
        new = [ast for ast in dict.fromkeys(asts) if self._key(ast) not in self._kernels]
        before = compiler().compiled
        if len(new) > 1 and not BEAM:
            compile_together(self, new, OBJECTS)
        else:
            super().compile_all(new)
        if len(new) > 1 or compiler().compiled > before:
            leave_memory()

    def keep(self, ast: UOp, prepared: Prepared, code: bytes) -> None:
        """Loads a kernel for `compile` to find."""
        self._kernels.setdefault(self._key(ast), self._loaded(prepared, ast, code))

    def graph(self, calls: Sequence[Call]) -> Graph:
        return CPUGraph(calls)


class CPUGraph(Graph):
    """One native call that runs a table of kernels."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__(calls)
        self.kept = [kernel.arguments(handles, vars) for kernel, handles, vars in calls]  # type: ignore[attr-defined]
        jobs = [
            Job(k.address, ctypes.addressof(b), 0 if v is None else ctypes.addressof(v), total, grain)  # type: ignore[attr-defined]
            for (k, _, _), (b, v, total, grain) in zip(calls, self.kept)
        ]
        self.shared = any(total > grain for *_, total, grain in self.kept)  # whether there is work for the team
        self.table = graph_table(jobs)
        self.checked = {k: k.record for k, _, _ in calls if k.record is not None}  # type: ignore[attr-defined]

    def __call__(self, timed: bool = False) -> list[float] | None:
        count, native = len(self.kept), team()
        stamps = room_for_stamps(count) if timed else None
        native.graph(self.table, count, native.ready(), stamps)
        for kernel, record in self.checked.items():
            record.check(kernel.name)
        return None if stamps is None else seconds(stamps)

    def wake(self) -> None:
        if self.shared:
            team().wake()

    def mover(self, handle: Memory) -> Callable[[Memory], None]:
        begin, end = handle.address, handle.address + handle.nbytes
        places = [
            (words, i, w - begin)
            for words, *_ in self.kept
            for i, w in enumerate(words)
            if w is not None and begin <= w < end
        ]

        def move(to: Memory) -> None:
            for words, i, offset in places:
                words[i] = to.address + offset

        return move


def program_of(kernel: CPUKernel) -> Program:
    """The lowered form of a kernel, for inspection."""
    return kernel.prepared.program()
