"""Many kernels by one call: a CUDA graph, whose nodes' arguments can be changed without making it anew."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.runtime.devices.base import Call, Kernel
from manygrad.runtime.devices.compile.chain import kernels_of
from manygrad.runtime.devices.cuda.driver import checked
from manygrad.runtime.devices.cuda.kernel import CUDAKernel, KernelLaunch
from manygrad.runtime.devices.cuda.memory import MemoryRange
from manygrad.runtime.devices.cuda.stream import MARK_EVERY


class Executable:
    """Launches in one stream, one after the other, as the driver's graph."""

    def __init__(self, launches: Sequence[KernelLaunch]) -> None:
        self.launches, self.stream = [x for x in launches if x.blocks], launches[0].stream
        self.name = f"{self.stream.name}: a graph of {len(launches)} kernels"
        own = self.stream.gpu.enter()
        self._graph = checked(own.cuGraphCreate(0), self.name)
        self._nodes: list[Any] = []
        for launch in self.launches:
            before = self._nodes[-1:]
            node = own.cuGraphAddKernelNode(self._graph, before, len(before), _parameters(own, launch))
            self._nodes.append(checked(node, self.name))
        self._made = checked(own.cuGraphInstantiate(self._graph, 0), self.name)

    def start(self) -> None:
        checked(self.stream.gpu.enter().cuGraphLaunch(self._made, self.stream.handle), self.name)
        self.stream.started(f"one of a graph of {len(self.launches)}", MARK_EVERY)

    def change(self, launch: KernelLaunch) -> None:
        """The arguments of a launch are others now."""
        own, node = self.stream.gpu.enter(), self._nodes[self.launches.index(launch)]
        checked(own.cuGraphExecKernelNodeSetParams(self._made, node, _parameters(own, launch)), self.name)

    def __del__(self, ended: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_made") and not ended():
            own = self.stream.gpu.enter()
            own.cuGraphExecDestroy(self._made)
            own.cuGraphDestroy(self._graph)


def _launch(kernel: Kernel, handles: Sequence[MemoryRange], vars: tuple[int, ...]) -> KernelLaunch:
    assert isinstance(kernel, CUDAKernel), kernel
    return kernel.launch(handles, vars)


def _parameters(own: Any, launch: KernelLaunch) -> Any:
    p = own.CUDA_KERNEL_NODE_PARAMS()
    p.func, p.sharedMemBytes, p.extra = launch.function, 0, 0
    p.gridDimX, p.gridDimY, p.gridDimZ = launch.blocks, 1, 1
    p.blockDimX, p.blockDimY, p.blockDimZ = launch.kernel.threads
    p.kernelParams = ctypes.addressof(launch.pointers)
    return p


class CUDAGraph:
    """A Graph. `launches`: of each call, the kernels that it starts, each in the stream of its own device."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.launches = [[_launch(*started) for started in kernels_of(call)] for call in calls]
        self.flat = [x for launches in self.launches for x in launches]
        self.streams = list(dict.fromkeys(x.stream for x in self.flat))
        self._made: list[Executable] | None = None  # in order, each in one stream

    @property
    def executables(self) -> list[Executable]:
        if self._made is None:
            runs: list[list[KernelLaunch]] = []
            for x in self.flat:
                if runs and runs[-1][0].stream is x.stream:
                    runs[-1].append(x)
                else:
                    runs.append([x])
            self._made = [Executable(run) for run in runs]
        return self._made

    def __call__(self, timed: bool = False) -> list[float] | None:
        if not timed:
            for one in self.executables:
                one.start()
            for x in self.flat:
                x.check()
            return None
        self.finish()
        stamps = [time.perf_counter()]
        for launches in self.launches:
            for x in launches:
                x.start()
            self.finish()
            stamps.append(time.perf_counter())
        for x in self.flat:
            x.check()
        return stamps

    def finish(self) -> None:
        for stream in self.streams:
            stream.finish()

    def wake(self) -> None:
        pass

    def native_call(self) -> None:
        return None

    def mover(self, handle: MemoryRange) -> Callable[[MemoryRange], None]:
        begin, end = handle.address, handle.address + handle.nbytes
        found = [(x, i, x.values[i] - begin) for x in self.flat for i in range(x.slots) if begin <= x.values[i] < end]

        def move(to: MemoryRange) -> None:
            for x, i, offset in found:
                x.values[i] = to.address + offset
            for x in {x: None for x, _, _ in found}:
                x.choose()
                for one in self._made or ():
                    if x in one.launches:
                        one.change(x)

        return move
