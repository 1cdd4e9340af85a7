"""CUDA: kernels as PTX, which LLVM makes, on NVIDIA's GPUs.

`CUDA:i` is the i-th GPU that the driver sees; where there are fewer, several devices share one, each with a stream of
its own. All share their kernels. The host does not see the memory. Kernels run in the order in which they were started,
behind the back of Python: `copyin`, `copyout` and `synchronize` wait for them.
"""

from __future__ import annotations

from functools import partial

from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.devices.base import Allocator, Backend, Builder, Opened, Queue
from manygrad.runtime.devices.compile.compiled import KNOBS, Compiled
from manygrad.runtime.devices.compile.together import build_together
from manygrad.runtime.devices.cuda.driver import gpu_of
from manygrad.runtime.devices.cuda.graph import CUDAGraph
from manygrad.runtime.devices.cuda.kernel import NVPTX, STORE, CUDAKernel, compile_text, version
from manygrad.runtime.devices.cuda.memory import MemoryRange
from manygrad.runtime.devices.cuda.stream import CUDAStream
from manygrad.tensor.environment import CHECK_OOB
from manygrad.tensor.uop.uop import UOp


def open_device(name: str) -> Opened:
    gpu = gpu_of(int(name.partition(":")[2]))  # (its errors say what to install)
    stream = CUDAStream(gpu, name)

    def alloc(nbytes: int) -> MemoryRange:
        return MemoryRange(stream, stream.alloc(nbytes), nbytes)

    def sized(handle: MemoryRange, nbytes: int) -> None:
        handle.nbytes = nbytes  # what is beyond is out of bounds

    memory = Allocator(
        alloc,
        MemoryRange.part,
        MemoryRange.fill,
        lambda data, handle: handle.read(data),
        free=lambda handle, nbytes: stream.free(handle.address),
        sized=sized,
        copy=MemoryRange.copy_from,
        keep_bytes=gpu.memory_bytes // 2,
    )
    return Opened(memory, Queue(CUDAGraph, stream.finish, binds=False))


def search(ast: UOp) -> tuple[Opt, ...] | None:
    from manygrad.runtime.devices.cuda.bench import BENCH
    from manygrad.runtime.devices.tune.tune import tuned

    return tuned(ast, BENCH)


COMPILED = Compiled(
    machine=lambda: gpu_of(0).machine,
    renderer=NVPTX,
    compile=compile_text,
    load=lambda prepared, ast, binary: CUDAKernel(prepared, ast, binary, bool(CHECK_OOB)),
    version=version,
    store=STORE,
    search=search,
)


BUILDER = Builder(
    COMPILED.build, build_all=partial(build_together, COMPILED), build_with=COMPILED.build_with, knobs=KNOBS
)
BACKEND = Backend("CUDA", BUILDER, open_device)
