"""NULL: plans and schedules without memory and without computing. The smallest backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from manygrad.runtime.codegen.analysis.describe import estimate, kernel_name
from manygrad.runtime.codegen.opts import Opt
from manygrad.runtime.devices.base import Allocator, Backend, Builder, Opened
from manygrad.runtime.devices.in_order import IN_ORDER
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class NullKernel:
    name: str
    flops: int
    nbytes: int
    source: str = ""
    opts: tuple[Opt, ...] = ()

    def __call__(self, handles: Sequence[Any], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        return 0.0 if wait else None


def build(ast: UOp) -> NullKernel:
    return NullKernel(kernel_name(ast), *estimate(ast))


def copyout(data: memoryview, handle: Any) -> None:
    data.cast("B")[:] = bytes(data.nbytes)


HANDLE = object()  # (None would be memory that is not allocated yet, to be allocated and counted at each use)
MEMORY = Allocator(
    alloc=lambda nbytes: HANDLE,
    view=lambda handle, offset_bytes, nbytes: HANDLE,
    copyin=lambda handle, data: None,
    copyout=copyout,
)
BACKEND = Backend("NULL", Builder(build), lambda name: Opened(MEMORY, IN_ORDER))
