"""CPU: kernels as LLVM IR compiled in this process, run by the native thread team.

All `CPU:i` of a process share kernels and threads; each has its own memory counters. Memory is NumPy's, or that of an
arena which other workers of the host can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from manygrad.native.compiler import compiler, leave_memory
from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.codegen.render.llvm.text import ENTRY
from manygrad.runtime.devices.base import Allocator, Backend, Builder, KernelStore, Opened, Queue
from manygrad.runtime.devices.compile.compiled import KNOBS, Compiled
from manygrad.runtime.devices.compile.together import build_together
from manygrad.runtime.devices.cpu.chain import CPUChain
from manygrad.runtime.devices.cpu.graph import CPUGraph
from manygrad.runtime.devices.cpu.kernel import LLVM, CPUKernel
from manygrad.runtime.devices.cpu.objects import OBJECTS, version
from manygrad.runtime.devices.host import HOST_MEMORY, Memory
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.environment import CHECK_OOB
from manygrad.tensor.uop.uop import UOp

if TYPE_CHECKING:
    from manygrad.collectives.transport.arena import Arena

# *** memory ***


def within(arena: Arena) -> Allocator:
    """Memory of an arena."""
    base = arena.addr(0)

    def alloc(nbytes: int) -> Memory:
        return Memory(base + arena.alloc(nbytes), nbytes, arena)

    def free(handle: Memory, nbytes: int) -> None:
        arena.free(handle.address - base)

    return replace(HOST_MEMORY, alloc=alloc, free=free, zeroed=None)


# *** kernels ***


def load(prepared: Prepared, ast: UOp, binary: bytes) -> CPUKernel:
    return CPUKernel(prepared, ast, compiler().link(binary, [ENTRY]), bool(CHECK_OOB))


def search(ast: UOp) -> tuple[Opt, ...] | None:
    from manygrad.runtime.devices.cpu.bench import BENCH
    from manygrad.runtime.devices.tune.tune import tuned  # it measures this device's kernels

    return tuned(ast, BENCH)


COMPILED = Compiled(
    machine=lambda: host_target().machine,
    renderer=LLVM,
    compile=lambda text: compiler().object_code(text),
    load=load,
    version=version,
    store=OBJECTS,
    search=search,
)


def build_all(asts: Sequence[UOp], loaded: KernelStore) -> None:
    before = compiler().compiled
    build_together(COMPILED, asts, loaded)
    if len(asts) > 1 or compiler().compiled > before:
        leave_memory()


MEMORY = replace(HOST_MEMORY, within=within)
BUILDER = Builder(COMPILED.build, CPUChain, build_all, COMPILED.build_with, KNOBS)
BACKEND = Backend("CPU", BUILDER, lambda name: Opened(MEMORY, Queue(CPUGraph)))
