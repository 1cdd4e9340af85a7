"""A device: memory of its own, the kernels of its kind, a queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.devices.base import Backend, Call, Graph, Kernel
from manygrad.runtime.devices.compile.loaded import LoadedKernels
from manygrad.runtime.devices.pool import Pool
from manygrad.tensor.uop.uop import UOp

if TYPE_CHECKING:
    from manygrad.collectives.transport.arena import Arena


class Device:
    """`kernels` are those of all devices of its kind; `memory` counts its own. With an `arena` a CPU takes it there."""

    def __init__(self, name: str, backend: Backend, kernels: LoadedKernels, arena: Arena | None = None) -> None:
        self.name, self.kind, self.kernels = name, backend.kind, kernels
        self.allocator, self.queue = backend.open(name)
        if arena is not None and self.allocator.within is not None:
            self.allocator = self.allocator.within(arena)
        self.memory = Pool(self.allocator)

    def __repr__(self) -> str:
        return f"<Device {self.name}>"

    # *** memory ***

    @property
    def allocated(self) -> int:
        return self.memory.allocated

    @property
    def cached(self) -> int:
        return self.memory.cached

    @property
    def peak(self) -> int:
        return self.memory.peak

    def alloc(self, nbytes: int) -> Any:
        """Memory for `nbytes`; its contents are undefined."""
        return self.memory.alloc(nbytes)

    def free(self, handle: Any, nbytes: int) -> None:
        """Takes back what `alloc(nbytes)` gave."""
        self.memory.free(handle, nbytes)

    def trim(self, keep_bytes: int = 0) -> None:
        """Gives freed memory back to the system, until at most `keep_bytes` are kept."""
        self.memory.trim(keep_bytes)

    def view(self, handle: Any, offset_bytes: int, nbytes: int) -> Any:
        """The handle of a part of `handle`; it is not freed on its own."""
        return self.allocator.view(handle, offset_bytes, nbytes)

    def copyin(self, handle: Any, data: memoryview) -> None:
        self.allocator.copyin(handle, data)

    def copyout(self, data: memoryview, handle: Any) -> None:
        self.allocator.copyout(data, handle)

    def as_numpy(self, handle: Any, nbytes: int) -> np.ndarray | None:
        """The memory as a uint8 array without a copy; None where the host cannot see it."""
        host = self.allocator.host
        return None if host is None else host.as_numpy(handle, nbytes)

    def adopt(self, array: np.ndarray) -> Any:
        """The handle of a contiguous array's own memory; None where kernels cannot use host memory."""
        host = self.allocator.host
        return None if host is None else host.adopt(array)

    def address(self, handle: Any) -> int:
        host = self.allocator.host
        if host is None:
            raise NotImplementedError(f"memory of {self.name} has no host address")
        return host.address(handle)

    # *** kernels ***

    def compile(self, ast: UOp) -> Kernel:
        """The kernel of `ast`, a SINK or a CHAIN; from the loaded ones where this kind of device compiled it before."""
        return self.kernels.get(ast)

    def compile_all(self, asts: Iterable[UOp]) -> None:
        """Compiles what `compile` will be asked for; a backend may do so in parallel."""
        self.kernels.get_all(asts)

    def compile_with(self, ast: UOp, opts: tuple[Opt, ...] | None = None, simplify: bool = True) -> Any:
        """The kernel under given optimisations (None: the heuristic's), not kept among the loaded ones.

        The ids in `opts` are those of the ranges after `collapse`; without `simplify`, of `ast` itself.
        """
        return self.kernels.builder.build_with(ast, opts, simplify)

    # *** running ***

    def graph(self, calls: Sequence[Call]) -> Graph:
        """Calls as one, their handles and variables fixed."""
        return self.queue.graph(calls)

    def synchronize(self) -> None:
        """Waits until everything started has ended."""
        self.queue.synchronize()
