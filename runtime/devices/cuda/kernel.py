"""CUDA kernels: how they are compiled, how their parallel loop is cut into threads, and how they are started."""

from __future__ import annotations

import ctypes
import hashlib
import math
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from manygrad.errors import CUDAError
from manygrad.runtime.codegen.analysis.describe import estimate, signature
from manygrad.runtime.codegen.lowered import LoweredProgram
from manygrad.runtime.codegen.opts import loop_nest
from manygrad.runtime.codegen.pipeline import Prepared
from manygrad.runtime.codegen.render.llvm import nvptx
from manygrad.runtime.codegen.render.llvm.text import ENTRY
from manygrad.runtime.devices.compile.arguments import KernelArguments
from manygrad.runtime.devices.compile.bounds import WORDS, report
from manygrad.runtime.devices.compile.compiled import Renderer
from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.devices.cuda.driver import Gpu, checked, gpu_of
from manygrad.runtime.devices.cuda.memory import MemoryRange, OwnedRange, scratch_of
from manygrad.runtime.devices.cuda.ptx import ptx_of
from manygrad.runtime.devices.cuda.stream import CUDAStream
from manygrad.tensor.code import code_version
from manygrad.tensor.uop.uop import UOp

HEADER_BYTES = 8
THREADS = 128  # of a block, where a kernel has no groups of its own
BLOCKS_A_UNIT = 16  # of such blocks; more indices than threads are run one after the other
SCRATCH_LIMIT_BYTES = 256 << 20  # of all threads together
PARAMETER_BYTES = 4096  # of all arguments of a kernel
ALIGNED = nvptx.NVPTXTarget(THREADS)
ANY_ADDRESS = nvptx.NVPTXTarget(THREADS, aligned=False)
STORE = DiskCache("cuda")


def render(program: LoweredProgram) -> str:
    return nvptx.render(program, ALIGNED)


def render_checked(program: LoweredProgram) -> str:
    return nvptx.render_checked(program, ANY_ADDRESS)


def render_for_any_address(program: LoweredProgram) -> str:
    return nvptx.render(program, ANY_ADDRESS)


NVPTX = Renderer(render, render_checked)


def compile_text(text: str) -> bytes:
    """Machine code, and before it how many bytes of scratch memory a thread has."""
    gpu = gpu_of(0)
    own, ptx = gpu.enter(), ptx_of(text, gpu.arch).encode() + b"\0"
    name = text.partition("\n")[0].removeprefix("; ")
    what = f"kernel {name} is not compiled by the driver (DEBUG=4 prints its code)"
    state = checked(own.cuLinkCreate(0, [], []), what)
    try:
        kind = own.CUjitInputType.CU_JIT_INPUT_PTX
        checked(own.cuLinkAddData(state, kind, ptx, len(ptx), name.encode(), 0, [], []), what)
        at, nbytes = checked(own.cuLinkComplete(state), what)
        code = ctypes.string_at(int(at), int(nbytes))
    finally:
        own.cuLinkDestroy(state)
    return nvptx.scratch_in(text).to_bytes(HEADER_BYTES, "little") + code


@cache
def version() -> bytes:
    """Version of compiled code and search results on disk besides the kernel."""
    return code_version() + gpu_of(0).key


class Functions:
    """A kernel's machine code, loaded where it is first run."""

    def __init__(self, compiled: bytes) -> None:
        self.scratch_bytes = int.from_bytes(compiled[:HEADER_BYTES], "little")
        self._code = compiled[HEADER_BYTES:]
        self._loaded: dict[int, tuple[Any, Any]] = {}  # number of a GPU -> (module, function)
        self._lock = threading.RLock()

    def on(self, gpu: Gpu) -> Any:
        with self._lock:
            if gpu.number not in self._loaded:
                own = gpu.enter()
                module = checked(own.cuModuleLoadData(self._code), f"GPU {gpu.number}: a kernel's code")
                self._loaded[gpu.number] = module, checked(own.cuModuleGetFunction(module, ENTRY.encode()), ENTRY)
            return self._loaded[gpu.number][1]


class DeviceRecord:
    """Where a bounds-checked kernel reports (`bounds.py`)."""

    def __init__(self, stream: CUDAStream) -> None:
        nbytes = 8 * WORDS
        self.memory = OwnedRange(stream, stream.alloc(nbytes), nbytes)
        self.memory.fill(memoryview(bytes(nbytes)))

    def check(self, name: str) -> None:
        """Waits; raises OutOfBoundsError, and clears the record, if kernel `name` has reported."""
        words = np.empty(WORDS, np.int64)
        self.memory.read(memoryview(words).cast("B"))
        if words[0]:
            self.memory.fill(memoryview(bytes(8 * WORDS)))
            report(name, words.tolist())


class KernelLaunch:
    """A kernel whose arguments are laid out, to be started again and again. `move` has it read other memory."""

    def __init__(
        self, kernel: CUDAKernel, handles: Sequence[MemoryRange], words: list[int], blocks: int,
        kept: OwnedRange | None, record: DeviceRecord | None,
    ) -> None:  # fmt: skip
        self.kernel, self.stream, self.kept, self.record = kernel, handles[0].stream, kept, record
        self.slots, self.blocks = kernel.slots, blocks
        self.values = (ctypes.c_uint64 * len(words))(*words)
        first = ctypes.addressof(self.values)
        self.pointers = (ctypes.c_void_p * len(words))(*(first + 8 * i for i in range(len(words))))
        self.choose()

    def choose(self) -> None:
        """The code for the memory that the arguments name: accesses are wide where all of it begins at multiples of
        16 bytes."""
        odd = any(a % nvptx.WIDEST_BYTES for a in self.values[: self.slots])
        self.function = self.kernel.functions(odd).on(self.stream.gpu)

    def start(self) -> None:
        if self.blocks:
            own, at = self.stream.gpu.enter(), ctypes.addressof(self.pointers)
            x, y, z = self.kernel.threads
            answer = own.cuLaunchKernel(self.function, self.blocks, 1, 1, x, y, z, 0, self.stream.handle, at, 0)
            checked(answer, f"kernel {self.kernel.name}")
            self.stream.started(self.kernel.name)

    def check(self) -> None:
        """Waits for a bounds-checked kernel. Raises OutOfBoundsError."""
        if self.record is not None:
            self.record.check(self.kernel.name)


class CUDAKernel:
    """A loaded kernel. A call starts it; `launch` is for who starts it again and again (`graph.py`)."""

    def __init__(self, prepared: Prepared, ast: UOp, compiled: bytes, checked: bool = False) -> None:
        self.name, self.opts, self.prepared, self.checked = prepared.name, prepared.opts, prepared, checked
        self.flops, self.nbytes = estimate(ast)
        sig = signature(prepared.ast)
        nest = loop_nest(sig, prepared.opts)
        self.takes = KernelArguments.of(self.name, ast, sig.slots, nest)
        self.slots, self.group = sig.slots, nest.group
        self.threads = (*(nest.group or (THREADS,)), 1, 1)[:3]
        words = self.slots * (2 if checked else 1) + len(self.takes.names) + 4
        if 8 * words > PARAMETER_BYTES:
            raise NotImplementedError(
                f"kernel {self.name} takes {self.slots} buffers, as arguments of {8 * words} bytes; a GPU takes "
                f"{PARAMETER_BYTES}. Join fewer tensors at once: .realize() some of them in between"
            )
        self._aligned = Functions(compiled)
        self._others: Functions | None = None
        self._key = hashlib.sha256(compiled).digest()

    @property
    def source(self) -> str:
        """The LLVM IR, made again on request: a kernel from the disk cache has only machine code."""
        return self.prepared.code(NVPTX.of(self.checked))

    def functions(self, odd: bool) -> Functions:
        """The code; `odd`: for memory that begins anywhere, made when it is first needed."""
        if not odd or self.checked:
            return self._aligned
        if self._others is None:
            key = hashlib.sha256(self._key + b"for any address" + version()).digest()
            found = STORE.get(key)
            if found is None:
                STORE.put(key, found := compile_text(self.prepared.code(render_for_any_address)))
            self._others = Functions(found)
        return self._others

    def grid(self, variables: dict[str, int], units: int) -> tuple[int, int, int]:
        """(total, per, blocks): the indices of the parallel loop, how many of them a thread, or a block, runs, and how
        many blocks that takes."""
        total = self.takes.total(variables)
        threads = math.prod(self.threads)
        blocks = total if self.group else min(-(-total // threads), units * BLOCKS_A_UNIT)
        if scratch := self._aligned.scratch_bytes:
            blocks = min(blocks, max(1, SCRATCH_LIMIT_BYTES // (scratch * threads)))
        at_once = blocks if self.group else blocks * threads
        per = max(1, -(-total // max(1, at_once)))
        return total, per, -(-total // (per if self.group else per * threads))

    def launch(self, handles: Sequence[MemoryRange], vars: tuple[int, ...]) -> KernelLaunch:
        known = self.takes.known(len(handles), vars)
        used = handles[: self.slots]
        if len({h.stream for h in used}) > 1:
            raise CUDAError(f"kernel {self.name} is given memory of several devices: {[h.stream.name for h in used]}")
        stream = used[0].stream
        total, per, blocks = self.grid(known, stream.gpu.units)
        words = [*(h.address for h in used), *(v % 2**64 for v in vars), total, per]
        kept = None
        if scratch := self._aligned.scratch_bytes:
            kept = scratch_of(stream, max(1, blocks) * math.prod(self.threads) * scratch)
            words.append(kept.address)
        record = DeviceRecord(stream) if self.checked else None
        if record is not None:
            words += [*(h.nbytes for h in used), record.memory.address]
        return KernelLaunch(self, used, words, blocks, kept, record)

    def __call__(self, handles: Sequence[MemoryRange], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        stream = handles[0].stream
        if wait:
            stream.finish()
        began = time.perf_counter()
        launch = self.launch(handles, vars)
        launch.start()
        launch.check()
        if not wait:
            return None
        stream.finish()
        return time.perf_counter() - began
