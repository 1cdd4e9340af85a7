"""NVIDIA's driver, as cuda-bindings has it, with emulated GPUs behind it: what the backend asks of it, and no more.

Streams are lists of what was asked for. It happens when somebody waits, as late as may be: data that a kernel is still
to read can be overwritten, and results that nobody waited for are not there. Contexts, modules and graphs are checked
for being the caller's own; whatever is still there at the end can be counted (`Emulated.left`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.cuda.emulator import launch, parsed
from tests.cuda.memory import APART, BASE, DeviceMemory, Fault


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_FAILED = 719


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 8
    CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10


Of = CUdevice_attribute
ATTRIBUTES = {
    Of.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
    Of.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
    Of.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 4,
    Of.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: 1024,
    Of.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: 48 << 10,
    Of.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32,
}
OK = CUresult.CUDA_SUCCESS


@dataclass(eq=False)
class Context:
    number: int


@dataclass(eq=False)
class EmulatedStream:
    context: Context
    waiting: list[Callable[[], None]] = field(default_factory=list)
    hangs: bool = False  # nothing in it ends any more


@dataclass(eq=False)
class Event:
    done: bool = True
    at: float = 0.0
    stream: EmulatedStream | None = None


@dataclass(eq=False)
class LoadedModule:
    context: Context
    text: str


@dataclass(eq=False)
class Node:
    function: LoadedModule
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: list[bytes]


class CUDA_KERNEL_NODE_PARAMS(SimpleNamespace):
    pass


def arguments_at(module: LoadedModule, at: int) -> list[bytes]:
    """The bytes of each parameter, copied when the kernel is asked for, as the driver does."""
    params = parsed(module.text).params
    places = (ctypes.c_void_p * len(params)).from_address(at)
    return [ctypes.string_at(int(place or 0), size) for place, (_, size) in zip(places, params)]


class Emulated:
    """The module `cuda.bindings.driver`. Large: a method for each call of the driver.

    `gpus`: how many; `size`: bytes of memory of each; `late`: whether work happens only when it is waited for.
    """

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUDA_KERNEL_NODE_PARAMS = CUDA_KERNEL_NODE_PARAMS
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUjitInputType = SimpleNamespace(CU_JIT_INPUT_PTX=1)

    def __init__(self, gpus: int = 2, size: int = 1 << 30, late: bool = True) -> None:
        self.gpus, self.late = gpus, late
        self.memories = [DeviceMemory(size, i) for i in range(gpus)]
        self.contexts = [Context(i) for i in range(gpus)]
        self.current = threading.local()
        self.counts = dict.fromkeys(("kernels", "graphs", "copies"), 0)
        self.broken: CUresult | None = None
        self.tells = True  # a test wants to know what the fault is; a driver does not say
        self.pinned: dict[int, Any] = {}  # by address
        self.kept: list[Any] = []
        self.lock = threading.RLock()

    # *** devices ***

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (OK,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return OK, 13000

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, self.gpus

    def cuDeviceGet(self, number: int) -> tuple[Any, ...]:
        return OK, number

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return OK, b"emulated GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> tuple[Any, ...]:
        return OK, ATTRIBUTES[attribute]

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return OK, self.memories[device].size

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return OK, self.contexts[device]

    def cuCtxSetCurrent(self, context: Context) -> tuple[Any, ...]:
        self.current.context = context
        return (OK,)

    # *** streams and events ***

    def now(self, stream: EmulatedStream, work: Callable[[], None]) -> tuple[Any, ...]:
        """Puts work into a stream."""
        with self.lock:
            if self.broken:
                return (self.broken,)
            if getattr(self.current, "context", None) is not stream.context:
                return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
            stream.waiting.append(work)
            return (OK,) if self.late else self.finish(stream)

    def finish(self, stream: EmulatedStream) -> tuple[Any, ...]:
        with self.lock:
            while stream.waiting and not self.broken:
                work = stream.waiting.pop(0)
                try:
                    work()
                except Fault:
                    if self.tells:
                        raise
                    self.broken = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
            return (self.broken or OK,)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, EmulatedStream(self.current.context)

    def cuStreamSynchronize(self, stream: EmulatedStream) -> tuple[Any, ...]:
        return self.finish(stream)

    def cuStreamQuery(self, stream: EmulatedStream) -> tuple[Any, ...]:
        return self.get_on(stream, lambda: not stream.waiting)

    def cuEventQuery(self, event: Event) -> tuple[Any, ...]:
        return self.get_on(event.stream, lambda: event.done)

    def get_on(self, stream: EmulatedStream | None, is_ready: Callable[[], bool]) -> tuple[Any, ...]:
        """Whoever asks sees that the work before has happened, unless a kernel does not end."""
        with self.lock:
            if stream is not None and not stream.hangs and not is_ready():
                self.finish(stream)
            return (self.broken or (OK if is_ready() else CUresult.CUDA_ERROR_NOT_READY),)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, Event()

    def cuEventDestroy(self, event: Event) -> tuple[Any, ...]:
        return (OK,)

    def cuEventRecord(self, event: Event, stream: EmulatedStream) -> tuple[Any, ...]:
        event.done, event.stream = False, stream

        def happen() -> None:
            event.done, event.at = True, time.perf_counter()

        return self.now(stream, happen)

    def cuStreamWaitEvent(self, stream: EmulatedStream, event: Event, flags: int) -> tuple[Any, ...]:
        other = event.stream

        def wait() -> None:
            while other is not None and not event.done and other.waiting:
                other.waiting.pop(0)()

        return self.now(stream, wait)

    def cuEventElapsedTime(self, begin: Event, end: Event) -> tuple[Any, ...]:
        return OK, max(1e-6, (end.at - begin.at) * 1e3)

    # *** memory ***

    def memory_of(self, stream: EmulatedStream) -> DeviceMemory:
        return self.memories[stream.context.number]

    def cuMemAllocAsync(self, nbytes: int, stream: EmulatedStream) -> tuple[Any, ...]:
        try:
            at = self.memory_of(stream).alloc(nbytes)
        except MemoryError:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        return OK, at

    def cuMemFreeAsync(self, address: int, stream: EmulatedStream) -> tuple[Any, ...]:
        return self.now(stream, lambda: self.memory_at(address).free(int(address)))

    def memory_at(self, address: int) -> DeviceMemory:
        return self.memories[(int(address) - BASE) // APART]

    def view(self, address: int, nbytes: int) -> np.ndarray:
        return self.memory_at(address).view(int(address), nbytes)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        held = ctypes.create_string_buffer(nbytes)
        self.pinned[ctypes.addressof(held)] = held
        return OK, ctypes.addressof(held)

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        return (OK,) if self.pinned.pop(address, None) is not None else (CUresult.CUDA_ERROR_INVALID_VALUE,)

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return any(at <= address and address + nbytes <= at + len(held) for at, held in self.pinned.items())

    def cuMemcpyHtoDAsync(self, to: int, start: int, nbytes: int, stream: EmulatedStream) -> tuple[Any, ...]:
        self.counts["copies"] += 1
        # (pageable memory is staged before the call returns, pinned memory is read when the copy happens)
        data = None if self.is_pinned(start, nbytes) else ctypes.string_at(start, nbytes)

        def copy() -> None:
            self.view(to, nbytes)[:] = np.frombuffer(data or ctypes.string_at(start, nbytes), np.uint8)

        return self.now(stream, copy)

    def cuMemcpyDtoHAsync(self, to: int, start: int, nbytes: int, stream: EmulatedStream) -> tuple[Any, ...]:
        self.counts["copies"] += 1
        return self.now(stream, lambda: ctypes.memmove(to, self.view(start, nbytes).tobytes(), nbytes) and None)

    def cuMemcpyDtoDAsync(self, to: int, start: int, nbytes: int, stream: EmulatedStream) -> tuple[Any, ...]:
        self.counts["copies"] += 1

        def copy() -> None:
            self.view(to, nbytes)[:] = self.view(start, nbytes).copy()

        return self.now(stream, copy)

    # *** code ***

    def cuLinkCreate(self, count: int, options: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
        return OK, []

    def cuLinkAddData(
        self, state: list[bytes], kind: int, data: bytes, size: int, name: bytes, count: int,
        options: Sequence[Any], values: Sequence[Any],
    ) -> tuple[Any, ...]:  # fmt: skip
        if data[-1:] != b"\0" or len(data) != size:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        state.append(data[:-1])
        return (OK,)

    def cuLinkComplete(self, state: list[bytes]) -> tuple[Any, ...]:
        held = ctypes.create_string_buffer(state[0], len(state[0]))
        self.kept.append(held)
        return OK, ctypes.addressof(held), len(state[0])

    def cuLinkDestroy(self, state: list[bytes]) -> tuple[Any, ...]:
        self.kept.clear()
        return (OK,)

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        return OK, LoadedModule(self.current.context, image.decode())

    def cuModuleGetFunction(self, module: LoadedModule, name: bytes) -> tuple[Any, ...]:
        return (OK, module) if parsed(module.text).name == name.decode() else (CUresult.CUDA_ERROR_INVALID_VALUE, None)

    def run(
        self, module: LoadedModule, stream: EmulatedStream, grid: tuple[int, ...], block: tuple[int, ...],
        arguments: list[bytes],
    ) -> None:  # fmt: skip
        if module.context is not stream.context:
            raise Fault("a kernel of another context")
        launch(parsed(module.text), self.memory_of(stream), grid, block, arguments)

    def cuLaunchKernel(
        self, function: LoadedModule, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int,
        stream: EmulatedStream, at: int, extra: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.counts["kernels"] += 1
        arguments = arguments_at(function, at)
        return self.now(stream, lambda: self.run(function, stream, (gx, gy, gz), (bx, by, bz), arguments))

    # *** graphs ***

    def node(self, p: Any) -> Node:
        grid, block = (p.gridDimX, p.gridDimY, p.gridDimZ), (p.blockDimX, p.blockDimY, p.blockDimZ)
        return Node(p.func, grid, block, arguments_at(p.func, p.kernelParams))

    def cuGraphCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, []

    def cuGraphAddKernelNode(
        self, graph: list[Node], before: Sequence[Node], count: int, params: Any
    ) -> tuple[Any, ...]:
        if list(before) != graph[-1:]:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None
        graph.append(self.node(params))
        return OK, graph[-1]

    def cuGraphInstantiate(self, graph: list[Node], flags: int) -> tuple[Any, ...]:
        self.counts["graphs"] += 1
        return OK, {node: node for node in graph}

    def cuGraphExecKernelNodeSetParams(self, made: dict[Node, Node], node: Node, params: Any) -> tuple[Any, ...]:
        made[node] = self.node(params)
        return (OK,)

    def cuGraphLaunch(self, made: dict[Node, Node], stream: EmulatedStream) -> tuple[Any, ...]:
        self.counts["kernels"] += len(made)
        nodes = list(made.values())  # (as they are now)

        def play() -> None:
            for n in nodes:
                self.run(n.function, stream, n.grid, n.block, n.arguments)

        return self.now(stream, play)

    def cuGraphExecDestroy(self, made: dict[Node, Node]) -> tuple[Any, ...]:
        return (OK,)

    def cuGraphDestroy(self, graph: list[Node]) -> tuple[Any, ...]:
        return (OK,)

    @property
    def left(self) -> int:
        """Bytes that are still allocated."""
        return sum(m.used for m in self.memories)
