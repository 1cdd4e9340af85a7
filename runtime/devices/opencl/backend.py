"""OPENCL: kernels as OpenCL C, on whatever an installed driver offers: a processor (pocl), a GPU.

All `OPENCL:i` of a process are queues of their own on one OpenCL device, the one of OPENCL_DEVICE, and share its
kernels. The host does not see the memory. Kernels run in the order in which they were started, behind the back of
Python: `copyin`, `copyout` and `synchronize` wait for them.
"""

from __future__ import annotations

from functools import partial

from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.devices.base import Allocator, Backend, Builder, Opened, Queue
from manygrad.runtime.devices.compile.compiled import KNOBS, Compiled
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.devices.compile.together import build_together
from manygrad.runtime.devices.opencl.driver import driver, opencl
from manygrad.runtime.devices.opencl.graph import OpenCLGraph
from manygrad.runtime.devices.opencl.kernel import (
    OPENCL_C,
    MemorySlice,
    OpenCLKernel,
    Stream,
    compile_text,
    new_block,
    version,
)
from manygrad.tensor.environment import CHECK_OOB
from manygrad.tensor.uop.uop import UOp

# *** memory ***


def open_device(name: str) -> Opened:
    driver()  # (its errors say what to install)
    stream = Stream()

    def alloc(nbytes: int) -> MemorySlice:
        cl, own = opencl(), driver()
        if nbytes > own.largest_bytes:
            raise MemoryError(
                f"{name}: {nbytes} bytes in one buffer, this OpenCL device gives at most {own.largest_bytes}: "
                "cut the tensor, or shard it over devices"
            )
        try:
            return new_block(stream, nbytes)
        except cl.Error as error:
            raise MemoryError(f"{name} cannot give {nbytes} bytes: {error}") from None

    def sized(handle: MemorySlice, nbytes: int) -> None:
        handle.nbytes = nbytes  # what is beyond is out of bounds

    def copyin(handle: MemorySlice, data: memoryview) -> None:
        if data.nbytes:
            opencl().enqueue_copy(stream.queue, handle.memory, data, dst_offset=handle.offset, is_blocking=True)

    def copyout(data: memoryview, handle: MemorySlice) -> None:
        if data.nbytes:
            opencl().enqueue_copy(stream.queue, data, handle.memory, src_offset=handle.offset, is_blocking=True)

    def copy(to: MemorySlice, start: MemorySlice, nbytes: int) -> None:
        ours = to.stream is start.stream
        if not ours:
            start.stream.queue.finish()
        done = opencl().enqueue_copy(
            to.stream.queue,
            to.memory,
            start.memory,
            byte_count=nbytes,
            src_offset=start.offset,
            dst_offset=to.offset,
        )
        if not ours:  # (what comes next in the other queue may write there)
            done.wait()

    memory = Allocator(alloc, MemorySlice.part, copyin, copyout, sized=sized, copy=copy)
    return Opened(memory, Queue(OpenCLGraph, stream.queue.finish, binds=False))


# *** kernels ***


def search(ast: UOp) -> tuple[Opt, ...] | None:
    from manygrad.runtime.devices.opencl.bench import BENCH
    from manygrad.runtime.devices.tune.tune import tuned

    return tuned(ast, BENCH)


COMPILED = Compiled(
    machine=lambda: driver().machine,
    renderer=OPENCL_C,
    compile=compile_text,
    load=lambda prepared, ast, binary: OpenCLKernel(prepared, ast, binary, bool(CHECK_OOB)),
    version=version,
    store=DiskCache("opencl"),
    search=search,
)


BUILDER = Builder(
    COMPILED.build, build_all=partial(build_together, COMPILED), build_with=COMPILED.build_with, knobs=KNOBS
)
BACKEND = Backend("OPENCL", BUILDER, open_device)
