"""The CPU's part in the search for optimisations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from manygrad.native.compiler import compiler
from manygrad.native.memory import aligned, bytes_at
from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.codegen.render.llvm.text import ENTRY
from manygrad.runtime.devices.cpu.kernel import LLVM, CPUKernel
from manygrad.runtime.devices.cpu.objects import version
from manygrad.runtime.devices.cpu.threads import team, wanted_threads
from manygrad.runtime.devices.host import Memory
from manygrad.runtime.devices.target import host_target
from manygrad.runtime.devices.tune.bench import Bench
from manygrad.tensor.uop.uop import UOp

LEAST_WORK = 1 << 22  # operations + bytes of a kernel of which a part foretells the whole


class CPUScratch:
    """A Scratch: the array is the memory."""

    def __init__(self, nbytes: int) -> None:
        raw, address = aligned(nbytes, 4096)
        self.handle, self.array = Memory(address, nbytes, raw), bytes_at(address, nbytes)

    def push(self) -> None:
        pass

    def pull(self) -> None:
        pass


class CPUCandidate:
    """A Candidate."""

    def __init__(self, prepared: Prepared, ast: UOp, code: str) -> None:
        self.kernel = CPUKernel(prepared, ast, compiler().link(compiler().object_code(code), [ENTRY]))

    def run(self, handles: Sequence[Any], vars: tuple[int, ...], count: int = 1) -> float:
        buffers, numbers, total, grain = self.kernel.arguments(handles, vars)
        native = team()
        scratch = native.ready()
        began = time.perf_counter()
        for _ in range(count):
            native.run(self.kernel.address, buffers, numbers, total, grain, scratch)
        return (time.perf_counter() - began) / count

    def part_s(self, handles: Sequence[Any], vars: tuple[int, ...]) -> float | None:
        buffers, numbers, total, grain = self.kernel.arguments(handles, vars)
        if total < 64 or self.kernel.flops + self.kernel.nbytes < LEAST_WORK:
            return None
        native = team()
        part, scratch = total // 16, native.ready()
        began = time.perf_counter()
        native.run(self.kernel.address, buffers, numbers, part, grain, scratch)
        return (time.perf_counter() - began) * total / part


BENCH = Bench(
    machine=lambda: host_target().machine,
    key=lambda: f"{wanted_threads()}".encode() + version(),
    render=LLVM.render,
    load=CPUCandidate,
    memory=CPUScratch,
)
