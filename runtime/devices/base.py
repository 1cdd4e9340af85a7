"""The parts of a device. A backend names these parts; it inherits nothing.

| part | answers |
|---|---|
| `Allocator` | where memory comes from, how data gets in and out, and whether the host can see it |
| `Builder` | how a kernel AST becomes a `Kernel` (`compiled.py`: renderer and compiler; `python.py`: interpreted) |
| `Kernel` | a compiled kernel, ready to run |
| `Queue` | how many kernels are run by one call, and how to wait for all that was started |

`Backend` holds the builder, shared by all devices of a kind, and opens one device: its allocator and its queue. Memory
handles are opaque to everybody but the backend. A handle knows its device, so that a kernel shared by all devices of a
kind runs where its memory is. `null.py` is the smallest backend, and `python.py` says what a kernel means;
CONTRIBUTING.md has a worked example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.devices.numbers import Numbers
from manygrad.tensor.uop.uop import UOp

if TYPE_CHECKING:
    from manygrad.collectives.transport.arena import Arena
    from manygrad.native.replay import NativeCall

ALIGNMENT = 64
KEEP_BYTES = 2 << 30  # freed memory kept for reuse, per device; above it, the largest blocks are given back


def _nothing(*_: Any) -> None:
    pass


# *** memory ***


@dataclass(frozen=True)
class HostAccess:
    """Access to memory that the host reads and writes where it lies."""

    as_numpy: Callable[[Any, int], np.ndarray]  # (handle, nbytes): the memory as a uint8 array, without a copy
    address: Callable[[Any], int]
    adopt: Callable[[np.ndarray], Any]  # the handle of a contiguous array's own memory
    at: Callable[[int, int], Any]  # (address, nbytes): the handle of memory that somebody else keeps


@dataclass(frozen=True)
class Allocator:
    """Memory of one device. `copyin` and `copyout` return when the data is there: they wait for kernels that use the
    memory."""

    alloc: Callable[[int], Any]  # fresh memory, of a multiple of `alignment` bytes; its contents are undefined
    view: Callable[[Any, int, int], Any]  # (handle, offset_bytes, nbytes): a part of it, not freed on its own
    copyin: Callable[[Any, memoryview], None]
    copyout: Callable[[memoryview, Any], None]
    free: Callable[[Any, int], None] = _nothing  # (handle, nbytes): the default leaves it to Python's reference counts
    sized: Callable[[Any, int], None] = _nothing  # (handle, nbytes): from now on the block serves so many of its bytes
    trim: Callable[[], None] = _nothing  # gives back what it keeps itself; called after blocks were freed
    zeroed: Callable[[int], Any] | None = None  # as `alloc`, all zeros, which take no memory until they are written
    # (to, from, nbytes): between devices of one kind, where the host does not see the memory; None: through the host
    copy: Callable[[Any, Any, int], None] | None = None
    host: HostAccess | None = None
    within: Callable[[Arena], Allocator] | None = None  # the same with blocks of an arena; None: it has its own memory
    alignment: int = ALIGNMENT
    keep_bytes: int = KEEP_BYTES  # freed memory that is kept; 0: none


# *** kernels ***


class Kernel(Protocol):
    """A compiled kernel AST. `flops` and `nbytes` are estimates of one run, symbolic sizes taken at their maximum."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def flops(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def opts(self) -> tuple[Opt, ...]: ...

    def __call__(self, handles: Sequence[Any], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        """Runs it on `handles` (by PARAM slot) and `vars` (by sorted name), or starts it; with `wait`, the seconds it
        took."""


class KernelStore(Protocol):
    """The kernels of one kind of device that this process has (`LoadedKernels`)."""

    def get(self, ast: UOp) -> Kernel: ...
    def keep(self, ast: UOp, kernel: Kernel) -> None: ...


def _without_opts(ast: UOp, opts: tuple[Opt, ...] | None, simplify: bool) -> Kernel:
    raise NotImplementedError("kernels of this kind of device are not optimised")


def _one_by_one(asts: Sequence[UOp], loaded: KernelStore) -> None:
    for ast in asts:
        loaded.get(ast)


@dataclass(frozen=True)
class Builder:
    """From kernel AST to Kernel, for all devices of a kind."""

    build: Callable[[UOp], Kernel]  # of a SINK
    # of a CHAIN, whose kernels are given; None: these, block by block (`chain.py`)
    chain: Callable[[UOp, Sequence[Any]], Kernel] | None = None
    build_all: Callable[[Sequence[UOp], KernelStore], None] = _one_by_one  # of SINKs that are not loaded yet
    build_with: Callable[[UOp, tuple[Opt, ...] | None, bool], Kernel] = _without_opts  # (ast, opts, simplify)
    knobs: tuple[str, ...] = ()  # environment variables that change what it builds


# *** running ***

Call = tuple[Kernel, Sequence[Any], Numbers]


class Graph(Protocol):
    """Calls in order, on fixed handles. Their variables have the values of each run (where `Queue.binds` says so)."""

    def __call__(self, timed: bool = False) -> list[float] | None:
        """Runs them; if `timed`, gives the times before each call and after the last (`time.perf_counter`'s)."""

    def wake(self) -> None:
        """A call is about to come: what takes its time to wake may begin."""

    def native_call(self) -> NativeCall | None:
        """The call as native code would make it, for this thread; None where it needs Python."""

    def mover(self, handle: Any) -> Callable[[Any], None] | None:
        """A function that has the calls read another handle's memory, of the same size, in place of this one's; None:
        cannot be done."""


@dataclass(frozen=True)
class Queue:
    """Queue of one device: kernels run in the order in which they were called."""

    graph: Callable[[Sequence[Call]], Graph]
    synchronize: Callable[[], None] = _nothing  # waits until everything started has ended
    binds: bool = True  # whether the variables of its graphs can be changed


# *** a kind of device ***


class Opened(NamedTuple):
    allocator: Allocator
    queue: Queue


@dataclass(frozen=True)
class Backend:
    """A kind of device. `open(name)` gives what one device has of its own."""

    kind: str
    builder: Builder
    open: Callable[[str], Opened]
