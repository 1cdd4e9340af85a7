"""NULL: plans and schedules without memory and without computing. The smallest backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manygrad.runtime.codegen.describe import estimate, kernel_name
from manygrad.runtime.devices.base import Device, Kernel
from manygrad.tensor.uop.uop import UOp


class NullKernel(Kernel):
    def __call__(self, handles: Sequence[Any], vars: tuple[int, ...] = (), wait: bool = False) -> float | None:
        return 0.0 if wait else None


class NullDevice(Device):
    kind = "NULL"

    def _alloc(self, nbytes: int) -> None:
        return None

    def view(self, handle: Any, offset_bytes: int, nbytes: int) -> None:
        return None

    def copyin(self, handle: Any, data: memoryview) -> None:
        pass

    def copyout(self, data: memoryview, handle: Any) -> None:
        data.cast("B")[:] = bytes(data.nbytes)

    def _compile(self, ast: UOp) -> Kernel:
        return NullKernel(kernel_name(ast), "", *estimate(ast))
