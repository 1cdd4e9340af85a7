"""A kernel in machine code, whose parallel loop the thread team shares."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from manygrad.native.compiler import Linked
from manygrad.runtime.codegen.analysis.describe import estimate, signature
from manygrad.runtime.codegen.lowered import LoweredProgram
from manygrad.runtime.codegen.opts import loop_nest
from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.codegen.render.llvm.text import ENTRY
from manygrad.runtime.devices.compile.arguments import KernelArguments
from manygrad.runtime.devices.compile.bounds import BoundsRecord
from manygrad.runtime.devices.compile.compiled import Renderer
from manygrad.runtime.devices.cpu.threads import team, wanted_threads
from manygrad.runtime.devices.host import Memory
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

SERIAL_WORK = 1 << 17  # operations + bytes up to which waking threads costs more than it saves
PIECE_WORK = 1 << 16  # the least work worth a turn at the shared counter


def _rendered(program: LoweredProgram) -> str:
    from manygrad.runtime.codegen.render.llvm.printer import (
        render,  # (as in `codegen/pipeline.py`: a kernel on disk needs none)
    )

    return render(program, host_target().rounds_bfloat16)


def _checked(program: LoweredProgram) -> str:
    from manygrad.runtime.codegen.render.llvm.bounds import render_checked

    return render_checked(program, host_target().rounds_bfloat16)


LLVM = Renderer(_rendered, _checked)


class TeamJob(Protocol):
    """A job for the team: a function at `address`, whose bounds-checked kernels report to `records`: (name,
    record)."""

    address: int
    work: int  # operations + bytes

    @property
    def records(self) -> tuple[tuple[str, BoundsRecord], ...]: ...

    def arguments(self, handles: Sequence[Memory], vars: tuple[int, ...]) -> tuple[Any, Any, int, int]:
        """(buffers, variables, total, grain), the first two as C arrays."""


def run_on_team(job: TeamJob, handles: Sequence[Memory], vars: tuple[int, ...], wait: bool) -> float | None:
    """The seconds it took, with `wait`. Raises what a bounds-checked kernel has reported."""
    buffers, numbers, total, grain = job.arguments(handles, vars)
    native = team()
    scratch = native.ready()
    began = time.perf_counter() if wait else 0.0
    run = native.short_run if job.work <= SERIAL_WORK else native.run
    run(job.address, buffers, numbers, total, grain, scratch)
    seconds = time.perf_counter() - began if wait else None
    for name, record in job.records:
        record.check(name)
    return seconds


class CPUKernel:
    """A loaded kernel: `address` of its function, and how its parallel loop is cut. Its code, `linked`, stays
    loaded as long as it lives: who has the address keeps the kernel."""

    def __init__(self, prepared: Prepared, ast: UOp, linked: Linked, checked: bool = False) -> None:
        self.name, self.opts = prepared.name, prepared.opts
        self.flops, self.nbytes = estimate(ast)
        self.work = self.flops + self.nbytes
        self.prepared, self.linked, self.address = prepared, linked, linked[ENTRY]
        self.record = BoundsRecord() if checked else None  # where a bounds-checked kernel reports
        self.records = () if self.record is None else ((self.name, self.record),)
        sig = signature(prepared.ast)
        plan = loop_nest(sig, prepared.opts)
        self.takes = KernelArguments.of(self.name, ast, sig.slots, plan)
        self.slots = sig.slots
        inner = plan.loops[: plan.parallel][-1:]  # what its tiles pack serves one index each
        self.staged = max(
            (plan.loops.index(r) + 1 for r, _ in plan.staged if r not in inner), default=0
        )  # loops up to the last that packs
        self.last_cut: tuple[Any, tuple[int, int]] | None = None
        self.fixed = self.pieces({}) if all(n.op is Ops.CONST for n, _ in self.takes.counts) else None

    @property
    def source(self) -> str:
        """The LLVM IR, made again on request: a kernel from the disk cache has only object code."""
        return self.prepared.code(LLVM.of(self.record is not None))

    def pieces(self, variables: dict[str, int]) -> tuple[int, int]:
        """(total, grain) of the parallel loop; 0 where a variable leaves nothing of one of its loops."""
        counts = self.takes.steps(variables)
        total = math.prod(counts)
        if self.work <= SERIAL_WORK or total <= 1:
            return total, max(1, total)
        smallest = -(-PIECE_WORK * total // self.work)
        wanted = 4 * wanted_threads()
        if self.staged:  # what is packed serves a run of indices: as few cuts within one as keep the threads busy
            run = math.prod(counts[self.staged :])
            return total, max(1, smallest, -(-run // max(1, -(-wanted * run // total))))
        return total, max(1, smallest, -(-total // max(64, wanted)))

    def arguments(self, handles: Sequence[Memory], vars: tuple[int, ...]) -> tuple[Any, Any, int, int]:
        """(buffers, variables, total, grain), the first two as C arrays."""
        assert len(handles) >= self.slots, f"{self.name} takes {self.slots} buffers, not {len(handles)}"
        if self.record is not None:
            buffers = self.record.arguments(handles, self.slots)
        else:
            buffers = (ctypes.c_void_p * max(1, len(handles)))(*[h.address for h in handles])
        if not self.takes.names:
            return buffers, None, *(self.fixed or (1, 1))
        return buffers, (ctypes.c_int64 * len(vars))(*vars), *self.cut(vars)

    def cut(self, vars: tuple[int, ...]) -> tuple[int, int]:
        """(total, grain) with these variables. Raises ValueError where one is out of bounds."""
        key = vars, 0 if self.fixed else wanted_threads()
        if (last := self.last_cut) is not None and last[0] == key:  # layers share their kernels, and have equal values
            return last[1]
        known = self.takes.known(self.slots, vars)
        found = self.fixed or self.pieces(known)
        self.last_cut = key, found
        return found

    def __call__(self, handles: Sequence[Memory], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        return run_on_team(self, handles, vars, wait)
