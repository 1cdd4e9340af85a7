"""The queue of one device of CUDA, and the waits for it, none of which is without a deadline."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from manygrad.errors import CUDAError
from manygrad.runtime.devices.cuda.driver import NOT_READY, Gpu, checked
from manygrad.runtime.devices.cuda.staging import Staging
from manygrad.tensor.environment import KERNEL_TIMEOUT_S

MARK_EVERY = 64  # kernels after which an event tells that the GPU gets on
SPIN_S, PAUSE_S, LONGEST_PAUSE_S = 200e-6, 20e-6, 1e-3  # how long a wait asks at once; then it sleeps in between


class CUDAStream:
    """Kernels and copies, one after the other. Which data is where follows from it alone."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        own = gpu.enter()
        self.handle = checked(own.cuStreamCreate(own.CUstream_flags.CU_STREAM_NON_BLOCKING), name)
        self.staging = Staging(gpu, self.handle, name, self.wait)
        self.scratch: Any = None  # memory that its kernels use one after the other (`memory.py`)
        self.last = ""  # the kernel, or graph, that was started last
        self.stuck = ""  # why nothing is waited for any more
        self._unmarked = 0  # kernels since the last mark
        self._marks: deque[Any] = deque()  # events that had not happened when they were looked at last
        self._spare: list[Any] = []
        self._lock = threading.RLock()  # of the marks: several threads may wait

    def finish(self) -> None:
        """Waits for all that was started. Raises CUDAError where the GPU does not get on for KERNEL_TIMEOUT_S."""
        own = self.gpu.enter()
        self.wait(lambda: own.cuStreamQuery(self.handle))

    def wait(self, ask: Callable[[], tuple[Any, ...]]) -> None:
        """Asks the driver until its answer is not that something is under way."""
        if self.stuck:
            raise CUDAError(self.stuck)
        answer, began, pause = ask(), time.monotonic(), PAUSE_S
        got_on = began
        while int(answer[0]) == NOT_READY:
            now = time.monotonic()
            if now - began > SPIN_S:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                if self._gets_on():
                    got_on = now
                elif now - got_on > KERNEL_TIMEOUT_S.value:
                    self.stuck = (
                        f"{self.name}: the GPU has not got on for {KERNEL_TIMEOUT_S.value:g} s (KERNEL_TIMEOUT_S); the "
                        f"last kernel that was started is {self.last or 'none'}. A kernel that does not end? DEBUG=2 "
                        "waits for each, and names it; `nvidia-smi` shows whether another process uses the GPU"
                    )
                    raise CUDAError(self.stuck)
            answer = ask()
        checked(answer, self.name)

    def started(self, name: str, kernels: int = 1) -> None:
        """Now and then an event is left behind, by which a wait sees that the GPU gets on."""
        self.last = name
        self._unmarked += kernels
        if self._unmarked < MARK_EVERY:
            return
        own = self.gpu.enter()
        with self._lock:
            self._unmarked = 0
            self._gets_on()
            event = self._spare.pop() if self._spare else None
            if event is None:
                event = checked(own.cuEventCreate(own.CUevent_flags.CU_EVENT_DISABLE_TIMING), self.name)
            checked(own.cuEventRecord(event, self.handle), self.name)
            self._marks.append(event)

    def _gets_on(self) -> bool:
        """Whether a mark has been passed since the last look."""
        own = self.gpu.enter()
        with self._lock:
            count = len(self._marks)
            while self._marks and int(own.cuEventQuery(self._marks[0])[0]) != NOT_READY:
                self._spare.append(self._marks.popleft())
            return len(self._marks) < count

    def after(self, other: CUDAStream) -> None:
        """What comes next here waits for what the other one has been given."""
        own = other.gpu.enter()
        event = checked(own.cuEventCreate(own.CUevent_flags.CU_EVENT_DISABLE_TIMING), self.name)
        checked(own.cuEventRecord(event, other.handle), self.name)
        checked(self.gpu.enter().cuStreamWaitEvent(self.handle, event, 0), self.name)
        checked(own.cuEventDestroy(event), self.name)  # (the driver keeps it until it has happened)

    def alloc(self, nbytes: int) -> int:
        """The address of fresh memory. Raises MemoryError."""
        what = f"{self.name}: {nbytes} bytes"
        return int(checked(self.gpu.enter().cuMemAllocAsync(max(1, nbytes), self.handle), what))

    def free(self, address: int) -> None:
        """Kernels that were started before may still use it."""
        checked(self.gpu.enter().cuMemFreeAsync(address, self.handle), self.name)
