"""TINY, the worked example of CONTRIBUTING.md: the host does not see its memory, and kernels run later, as a GPU's."""

import ctypes
import math
import time

import numpy as np

from manygrad.native.compiler import compiler
from manygrad.native.memory import aligned, bytes_at
from manygrad.runtime.codegen.analysis.describe import estimate, evaluate_int, signature
from manygrad.runtime.codegen.lowered import SCRATCH_BYTES
from manygrad.runtime.codegen.opts import loop_nest
from manygrad.runtime.codegen.render.llvm.printer import render
from manygrad.runtime.codegen.render.llvm.text import ENTRY
from manygrad.runtime.codegen.target import Machine
from manygrad.runtime.devices.base import Allocator, Backend, Builder, Opened, Queue
from manygrad.runtime.devices.compile.compiled import Compiled, Renderer
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.devices.cpu.objects import version
from manygrad.runtime.devices.in_order import CallsInOrder


class Stream(list):
    """Work that was started and has not been done."""

    def synchronize(self):
        while self:
            self.pop(0)()


class Block:
    """Memory: a handle knows its device's stream, so that a kernel shared by all devices runs on the right one."""

    def __init__(self, stream, address, nbytes, owner):
        self.stream, self.address, self.nbytes, self.owner = stream, address, nbytes, owner

    def part(self, offset, nbytes):
        return Block(self.stream, self.address + offset, nbytes, self.owner)

    def bytes(self, nbytes):
        self.stream.synchronize()
        return bytes_at(self.address, nbytes)


class TinyKernel:
    def __init__(self, prepared, ast, binary):
        self.name, self.opts, self.source = prepared.name, prepared.opts, prepared.code(render)
        self.flops, self.nbytes = estimate(ast)
        self.names = [v.arg.name for v in signature(ast).variables]
        self.counts = loop_nest(signature(prepared.ast), prepared.opts).counts
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        address = compiler().load(binary, [ENTRY])[ENTRY]
        self.function = ctypes.CFUNCTYPE(None, pointer, pointer, number, number, pointer)(address)

    def run(self, handles, vars):
        known = dict(zip(self.names, vars))
        total = math.prod(-(-evaluate_int(n, known) // step) for n, step in self.counts)
        _owner, scratch = aligned(SCRATCH_BYTES, 4096)
        bytes_at(scratch, 8)[:] = 0
        buffers = (ctypes.c_void_p * len(handles))(*[h.address for h in handles])
        self.function(buffers, (ctypes.c_int64 * (len(vars) or 1))(*vars), 0, total, scratch)

    def __call__(self, handles, vars=(), wait=False):
        began = time.perf_counter()
        handles[0].stream.append(lambda: self.run(handles, vars))
        if not wait:
            return None
        handles[0].stream.synchronize()
        return time.perf_counter() - began


def open_device(name):
    stream = Stream()

    def alloc(nbytes):
        owner, address = aligned(nbytes, 64)
        return Block(stream, address, nbytes, owner)

    def copyin(handle, data):
        handle.bytes(data.nbytes)[:] = np.frombuffer(data, np.uint8)

    def copyout(data, handle):
        np.frombuffer(data, np.uint8)[:] = handle.bytes(data.nbytes)

    return Opened(Allocator(alloc, Block.part, copyin, copyout), Queue(CallsInOrder, stream.synchronize))


COMPILED = Compiled(
    machine=lambda: Machine(vector_bytes=16, registers=16),
    renderer=Renderer(render),
    compile=lambda text: compiler().object_code(text),
    load=TinyKernel,
    version=lambda: b"tiny" + version(),
    store=DiskCache("tiny"),
)
BACKEND = Backend("TINY", Builder(COMPILED.build, build_with=COMPILED.build_with), open_device)
