"""OpenCL kernels: how they are compiled, how their parallel loop is cut into work items, and how they are started."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from manygrad.runtime.codegen.analysis.describe import estimate, signature
from manygrad.runtime.codegen.lowered import LoweredProgram
from manygrad.runtime.codegen.opts import loop_nest
from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.codegen.render.opencl import printer as renderer
from manygrad.runtime.codegen.render.opencl.bounds import render_checked
from manygrad.runtime.devices.compile.arguments import KernelArguments
from manygrad.runtime.devices.compile.bounds import WORDS, report
from manygrad.runtime.devices.compile.compiled import Renderer
from manygrad.runtime.devices.opencl.driver import LANGUAGE, SUBGROUP_LANGUAGE, driver, opencl
from manygrad.tensor.code import code_version
from manygrad.tensor.environment import CACHE
from manygrad.tensor.uop.uop import UOp

HEADER_BYTES = 16
SERIAL_WORK = 1 << 17  # operations + bytes up to which one work item of a processor does it all
ITEMS_A_UNIT = 4  # of a processor's core: what is left over is shared out
GROUPS_A_UNIT = 64  # of a GPU's
SCRATCH_LIMIT_BYTES = 256 << 20  # of all work items together, where scratch memory is not local


class Stream:
    """The queue of one device, in order, and the scratch memory that its kernels use one after the other."""

    def __init__(self) -> None:
        self.queue = opencl().CommandQueue(driver().context)
        self._scratch: Any = None

    def scratch(self, nbytes: int) -> Any:
        if self._scratch is None or self._scratch.size < nbytes:
            cl = opencl()
            self._scratch = cl.Buffer(driver().context, cl.mem_flags.READ_WRITE, nbytes)
        return self._scratch


@dataclass(eq=False)
class MemorySlice:
    """`nbytes` from `offset` on in a memory object. A handle knows its device's stream, so that a kernel shared by all
    devices runs on the right one."""

    stream: Stream
    memory: Any
    nbytes: int
    address: int  # no two memory objects have a number in common: who overlaps with whom (TinyJit asks)
    offset: int = 0

    def part(self, offset_bytes: int, nbytes: int) -> MemorySlice:
        assert 0 <= offset_bytes and offset_bytes + nbytes <= self.nbytes, (
            f"view of bytes {offset_bytes}..{offset_bytes + nbytes} of {self.nbytes}"
        )
        return MemorySlice(self.stream, self.memory, nbytes, self.address + offset_bytes, self.offset + offset_bytes)


_addresses = itertools.count(1)
ADDRESS_STEP = 1 << 48  # more than any memory object has


def new_block(stream: Stream, nbytes: int) -> MemorySlice:
    """Fresh memory; its contents are undefined. Raises pyopencl's errors."""
    cl = opencl()
    memory = cl.Buffer(driver().context, cl.mem_flags.READ_WRITE, nbytes)
    return MemorySlice(stream, memory, nbytes, next(_addresses) * ADDRESS_STEP)


def render(program: LoweredProgram) -> str:
    return renderer.render(program, driver().target)


OPENCL_C = Renderer(render, lambda program: render_checked(program, driver().target))


def compile_text(text: str) -> bytes:
    """The driver's binary where that is kept on disk; else the text. (To make a binary a driver may compile for groups
    of any size, and once more for those that run: it takes its time.)"""
    if not CACHE:
        return packed(text)
    (binary,) = build(text).get_info(opencl().program_info.BINARIES)
    return packed(text, bytes(binary))


def packed(text: str, binary: bytes = b"") -> bytes:
    """Bytes for `program_of`: a binary, or text."""
    head = np.array([renderer.global_scratch(text), len(binary)], np.int64).tobytes()
    return head + (binary or text.encode())


def build(text: str) -> Any:
    cl, own = opencl(), driver()
    try:
        options = [SUBGROUP_LANGUAGE if o is LANGUAGE and renderer.SUBGROUPS in text else o for o in own.options]
        return cl.Program(own.context, text).build(options=options, cache_dir=False)
    except cl.Error as error:
        name = text.partition("\n")[0].removeprefix("// ")
        raise RuntimeError(
            f"the OpenCL driver of {own.device.name} does not compile kernel {name} (DEBUG=4 prints its code): {error}"
        ) from error


@cache
def version() -> bytes:
    """Version of compiled code and search results on disk besides the kernel."""
    return code_version() + driver().key


def program_of(compiled: bytes) -> tuple[Any, int]:
    """The program, and how many bytes of global scratch memory a work item takes."""
    own, (scratch_bytes, binary_bytes) = driver(), np.frombuffer(compiled[:HEADER_BYTES], np.int64)
    rest = compiled[HEADER_BYTES:]
    if not binary_bytes:
        return build(rest.decode()), int(scratch_bytes)
    return opencl().Program(own.context, [own.device], [rest]).build(cache_dir=False), int(scratch_bytes)


class DeviceBoundsRecord:
    """Where a bounds-checked kernel reports (`bounds.py`)."""

    def __init__(self) -> None:
        cl, flags = opencl(), opencl().mem_flags
        hostbuf = np.zeros(WORDS, np.int64)
        self.memory = cl.Buffer(driver().context, flags.READ_WRITE | flags.COPY_HOST_PTR, hostbuf=hostbuf)

    def check(self, name: str, queue: Any) -> None:
        """Waits; raises OutOfBoundsError, and clears the record, if kernel `name` has reported."""
        words = np.empty(WORDS, np.int64)
        opencl().enqueue_copy(queue, words, self.memory, is_blocking=True)
        if words[0]:
            opencl().enqueue_copy(queue, self.memory, np.zeros(WORDS, np.int64), is_blocking=True)
            report(name, words.tolist())


@dataclass(frozen=True)
class Launch:
    """A kernel whose arguments are set. `kept`: the memory that they name, which OpenCL does not keep alive."""

    name: str

    kernel: Any
    size: tuple[int, ...]  # work items; (0,): none
    group: tuple[int, ...]
    kept: tuple[Any, ...]
    queue: Any  # of the device whose memory it is
    record: DeviceBoundsRecord | None = None

    def start(self) -> None:
        if self.size[0]:
            opencl().enqueue_nd_range_kernel(self.queue, self.kernel, self.size, self.group)

    def check(self) -> None:
        """Waits for a bounds-checked kernel. Raises OutOfBoundsError."""
        if self.record is not None:
            self.record.check(self.name, self.queue)


class OpenCLKernel:
    """A loaded kernel. A call starts it; `launch` is for who starts it again and again (`graph.py`)."""

    def __init__(self, prepared: Prepared, ast: UOp, compiled: bytes, checked: bool = False) -> None:
        own, self.checked = driver(), checked
        self.name, self.opts, self.prepared = prepared.name, prepared.opts, prepared
        self.flops, self.nbytes = estimate(ast)
        sig = signature(prepared.ast)
        nest = loop_nest(sig, prepared.opts)
        self.takes = KernelArguments.of(self.name, ast, sig.slots, nest)
        self.slots, self.group = sig.slots, nest.group
        words = 16 * self.slots + 8 * len(self.takes.names) + 24 + (8 * self.slots + 8 if checked else 0)
        if words > own.parameter_bytes:
            raise NotImplementedError(
                f"kernel {self.name} takes {self.slots} buffers, as arguments of {words} bytes; this OpenCL device "
                f"takes {own.parameter_bytes}. Join fewer tensors at once: .realize() some of them in between"
            )
        self.program, self.scratch_bytes = program_of(compiled)
        self._kernel = self.fresh()
        self._lock = threading.Lock()  # a cl_kernel holds its arguments: one call sets them and starts it at a time

    @property
    def source(self) -> str:
        """The OpenCL C, made again on request: a kernel from the disk cache has only a binary."""
        return self.prepared.code(OPENCL_C.of(self.checked))

    def fresh(self) -> Any:
        """The kernel, with arguments of its own."""
        return opencl().Kernel(self.program, renderer.ENTRY)

    def grid(self, variables: dict[str, int]) -> tuple[int, int]:
        """(total, per): the indices of the parallel loop, and how many of them a work item, or a group, runs."""
        own = driver()
        total = self.takes.total(variables)
        if self.group:
            parts = total
        elif self.flops + self.nbytes <= SERIAL_WORK and own.is_cpu:
            parts = 1
        else:
            parts = own.units * (ITEMS_A_UNIT if own.is_cpu else GROUPS_A_UNIT * own.target.group)
        if self.scratch_bytes:
            parts = min(parts, max(1, SCRATCH_LIMIT_BYTES // (self.scratch_bytes * math.prod(self.group))))
        return total, max(1, -(-total // max(1, parts)))

    def launch(self, handles: Sequence[MemorySlice], vars: tuple[int, ...], kernel: Any) -> Launch:
        """Sets the arguments of `kernel`, one of `fresh()`."""
        known = self.takes.known(len(handles), vars)
        total, per = self.grid(known)
        group, parts = self.group or (driver().target.group,), -(-total // per)
        size = (parts * group[0], *group[1:]) if self.group else (-(-parts // group[0]) * group[0],)
        used = handles[: self.slots]
        arguments: list[Any] = [x for h in used for x in (h.memory, np.int64(h.offset))]
        arguments += map(np.int64, (*vars, total, per))
        kept = [h.memory for h in used]
        if self.scratch_bytes and parts:
            kept.append(used[0].stream.scratch(math.prod(size) * self.scratch_bytes))
            arguments.append(kept[-1])
        elif self.scratch_bytes:
            arguments.append(None)
        record = DeviceBoundsRecord() if self.checked else None
        if record is not None:
            arguments += [*(np.int64(h.nbytes) for h in used), record.memory]
        kernel.set_args(*arguments)
        return Launch(self.name, kernel, size, group, tuple(kept), handles[0].stream.queue, record)

    def __call__(self, handles: Sequence[MemorySlice], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        queue = handles[0].stream.queue
        if wait:
            queue.finish()
        began = time.perf_counter()
        is_mine = self._lock.acquire(blocking=False)  # (who has it may be this thread, below a destructor)
        try:
            launch = self.launch(handles, vars, self._kernel if is_mine else self.fresh())
            launch.start()
        finally:
            if is_mine:
                self._lock.release()
        launch.check()
        if not wait:
            queue.flush()
            return None
        queue.finish()
        return time.perf_counter() - began
