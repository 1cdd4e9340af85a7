"""Many OpenCL kernels by one call: their arguments are set once, a call only starts them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from manygrad.runtime.devices.base import Call
from manygrad.runtime.devices.compile.chain import kernels_of
from manygrad.runtime.devices.opencl.kernel import Launch, MemorySlice, OpenCLKernel


class OpenCLGraph:
    """A Graph. `launches`: of each call, the kernels that it starts, each in the queue of its own device."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.launches: list[list[Launch]] = []
        self.places: list[tuple[Any, int, MemorySlice]] = []  # (kernel, number of an argument, the handle that it is)
        for call in calls:
            launches = []
            for kernel, handles, vars in kernels_of(call):
                assert isinstance(kernel, OpenCLKernel), kernel
                own = kernel.fresh()
                launches.append(kernel.launch(handles, vars, own))
                self.places += ((own, 2 * i, h) for i, h in enumerate(handles[: kernel.slots]))
            self.launches.append(launches)
        self.queues = list(dict.fromkeys(launch.queue for launches in self.launches for launch in launches))

    def __call__(self, timed: bool = False) -> list[float] | None:
        if timed:
            self.finish()
        stamps = [time.perf_counter()]
        for launches in self.launches:
            for launch in launches:
                launch.start()
            if timed:
                self.finish()
                stamps.append(time.perf_counter())
        for queue in self.queues:
            queue.flush()
        for launch in itertools.chain.from_iterable(self.launches):
            launch.check()
        return stamps if timed else None

    def finish(self) -> None:
        for queue in self.queues:
            queue.finish()

    def wake(self) -> None:
        pass

    def native_call(self) -> None:
        return None

    def mover(self, handle: MemorySlice) -> Callable[[MemorySlice], None]:
        begin, end = handle.offset, handle.offset + handle.nbytes
        found = [
            (kernel, number, h.offset - begin)
            for kernel, number, h in self.places
            if h.memory is handle.memory and begin <= h.offset < end
        ]
        kept: list[MemorySlice] = []

        def move(to: MemorySlice) -> None:
            kept[:] = [to]  # (OpenCL does not keep alive what arguments name)
            for kernel, number, offset in found:
                kernel.set_arg(number, to.memory)
                kernel.set_arg(number + 1, np.int64(to.offset + offset))

        return move
