"""What a device is: memory, a compiler, and a way to run many kernels by one call.

A backend subclasses `Device` and gives `_alloc`, `copyin`, `copyout` and `_compile`; `null.py` is the smallest one, and
`python.py` says what a kernel means. Memory handles are opaque to everybody else. Freed memory is kept, by size, for
the next allocation of that size.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from manygrad.runtime import profile
from manygrad.runtime.codegen.opts import Opt
from manygrad.tensor.environment import REGISTRY
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

ALIGNMENT = 64
LARGE_BYTES = 1 << 20
CACHE_LIMIT_BYTES = 2 << 30  # freed memory kept for reuse, per device; above it, the largest blocks are given back

Call = tuple["Kernel", Sequence[Any], tuple[int, ...]]


class Graph:
    """Calls in order, their handles and variables fixed; backends do it by one native call."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = [(kernel, list(handles), tuple(vars)) for kernel, handles, vars in calls]

    def __call__(self, timed: bool = False) -> list[float] | None:
        """Runs them; if `timed`, gives the times before each call and after the last (`time.perf_counter`'s)."""
        stamps = [time.perf_counter()]
        for kernel, handles, vars in self.calls:
            kernel(handles, vars, wait=timed)
            stamps.append(time.perf_counter())
        return stamps if timed else None

    def wake(self) -> None:
        """A call is about to come: what takes its time to wake may begin."""

    def mover(self, handle: Any) -> Callable[[Any], None] | None:
        """A function that has the calls read another handle's memory, of the same size, in place of this one's; None: cannot be done."""
        return None


class Kernel(ABC):
    """A compiled kernel AST. `flops` and `nbytes` are estimates of one run, symbolic sizes taken at their maximum."""

    name: str
    source: str
    flops: int
    nbytes: int
    opts: tuple[Opt, ...]

    def __init__(
        self, name: str, source: str = "", flops: int = 0, nbytes: int = 0, opts: tuple[Opt, ...] = ()
    ) -> None:
        self.name, self.source, self.flops, self.nbytes, self.opts = name, source, flops, nbytes, opts

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.flops} flops, {self.nbytes} bytes>"

    @abstractmethod
    def __call__(self, handles: Sequence[Any], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        """Runs it on `handles` (by PARAM slot) and `vars` (by sorted name); with `wait`, the seconds it took."""


class Device(ABC):
    """One device. The kernels compiled are shared by all devices of a kind; memory and its counters are its own.

    `allocated`, `cached`, `peak`: bytes in use, bytes freed and kept, and the most bytes ever in use.
    """

    kind: ClassVar[str]
    knobs: ClassVar[tuple[str, ...]] = ()  # environment variables that change what `_compile` gives

    def __init__(self, name: str) -> None:
        self.name = name
        self.allocated = self.cached = self.peak = 0
        self._free_blocks: dict[int, list[Any]] = {}
        self._memory_lock = threading.RLock()  # (a garbage collection while it is held may free buffers)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._kernels, cls._building, cls._compile_lock = {}, {}, threading.Lock()

    _kernels: ClassVar[dict[Any, Kernel]]
    _building: ClassVar[dict[Any, threading.Lock]]
    _compile_lock: ClassVar[threading.Lock]

    def __repr__(self) -> str:
        return f"<Device {self.name}>"

    # *** memory ***

    @abstractmethod
    def _alloc(self, nbytes: int) -> Any:
        """Fresh memory of `nbytes` (a multiple of 64), 64-byte aligned; its contents are undefined."""

    def _free(self, handle: Any, nbytes: int) -> None:  # noqa: B027
        """Gives memory back to the system; the default leaves that to Python's reference counts."""

    @abstractmethod
    def view(self, handle: Any, offset_bytes: int, nbytes: int) -> Any:
        """The handle of a part of `handle`; it is not freed on its own."""

    @abstractmethod
    def copyin(self, handle: Any, data: memoryview) -> None: ...

    @abstractmethod
    def copyout(self, data: memoryview, handle: Any) -> None: ...

    def as_numpy(self, handle: Any, nbytes: int) -> np.ndarray | None:
        """The memory as a uint8 array without a copy; None where the host cannot see it."""
        return None

    def adopt(self, array: np.ndarray) -> Any:
        """The handle of a contiguous array's own memory; None where kernels cannot use host memory."""
        return None

    def address(self, handle: Any) -> int:
        raise NotImplementedError(f"memory of {self.name} has no host address")

    @staticmethod
    def rounded(nbytes: int) -> int:
        """The size of the block that holds `nbytes`."""
        return max(ALIGNMENT, (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)

    def alloc(self, nbytes: int) -> Any:
        """Memory for `nbytes`: a freed block of the same size where there is one."""
        size = self.rounded(nbytes)
        with self._memory_lock:
            blocks = self._free_blocks.get(size)
            handle = blocks.pop() if blocks else None
            self.cached -= size if handle is not None else 0
        if handle is None:
            if (
                size >= LARGE_BYTES and self.cached
            ):  # smaller blocks make room: what a program uses at first would stay for ever
                self.trim(max(0, self.cached - size), largest=size)
            try:
                handle = self._alloc(size)
            except MemoryError:
                self.trim()
                handle = self._alloc(size)
        with self._memory_lock:
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        return handle

    def free(self, handle: Any, nbytes: int) -> None:
        """Takes back what `alloc(nbytes)` gave."""
        size = self.rounded(nbytes)
        with self._memory_lock:
            self.allocated -= size
            if handle is not None:
                self._free_blocks.setdefault(size, []).append(handle)
                self.cached += size
        if self.cached > CACHE_LIMIT_BYTES:
            self.trim(CACHE_LIMIT_BYTES // 2)

    def trim(self, keep_bytes: int = 0, largest: int | None = None) -> None:
        """Gives cached blocks back, the largest first, until at most `keep_bytes` are kept; none of more than `largest` bytes."""
        with self._memory_lock:
            for size in sorted(s for s in list(self._free_blocks) if largest is None or s <= largest)[::-1]:
                blocks = self._free_blocks[size]
                while blocks and self.cached > keep_bytes:
                    self._free(blocks.pop(), size)
                    self.cached -= size

    # *** kernels ***

    @abstractmethod
    def _compile(self, ast: UOp) -> Kernel: ...

    def _chain(self, ast: UOp) -> Kernel:
        """The kernel of a CHAIN; a backend may run its blocks in parallel."""
        from manygrad.runtime.devices.chain import Chained

        return Chained(ast, [self.compile(k) for k in ast.src])

    def compile(self, ast: UOp) -> Kernel:
        """The kernel of `ast`, a SINK or a CHAIN; from the cache of loaded kernels when this kind of device compiled it before."""
        cls = type(self)
        key = self._key(ast)
        if (found := cls._kernels.get(key)) is not None:
            return found
        with cls._compile_lock:
            building = cls._building.setdefault(key, threading.Lock())
        with building:
            if (found := cls._kernels.get(key)) is None:
                start = time.perf_counter()
                found = cls._kernels[key] = self._compile(ast) if ast.op is Ops.SINK else self._chain(ast)
                if profile.active:
                    profile.record(
                        profile.compile_lane(),
                        found.name,
                        start,
                        time.perf_counter(),
                        {"opts": list(map(repr, found.opts))},
                    )
        cls._building.pop(key, None)
        return found

    def _key(self, ast: UOp) -> tuple[Any, ...]:
        """Of a loaded kernel."""
        return (ast, *(REGISTRY[k].value for k in self.knobs))

    def compile_all(self, asts: Iterable[UOp]) -> None:
        """Compiles what `compile` will be asked for; a backend may do so in parallel."""
        for ast in asts:
            self.compile(ast)

    def graph(self, calls: Sequence[Call]) -> Graph:
        return Graph(calls)

    def synchronize(self) -> None:  # noqa: B027
        """Waits until everything started has ended."""
