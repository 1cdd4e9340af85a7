"""DISK: a file as memory. `DISK:/path` maps the file; it holds data and runs no kernels."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from manygrad.runtime.devices.base import Kernel
from manygrad.runtime.devices.host import HostDevice, Memory
from manygrad.tensor.uop.uop import UOp


class DiskDevice(HostDevice):
    """Every allocation is the file from its start, made as long as needed. A file that cannot be written is mapped read-only."""

    kind = "DISK"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.path = name.partition(":")[2]

    @staticmethod
    def rounded(nbytes: int) -> int:
        return max(1, nbytes)  # a file is as long as its contents

    def _alloc(self, nbytes: int) -> Memory:
        try:
            writable = not os.path.exists(self.path) or os.access(self.path, os.W_OK)
            with open(self.path, ("r+b" if os.path.exists(self.path) else "w+b") if writable else "rb") as file:
                if os.fstat(file.fileno()).st_size < nbytes:
                    if not writable:
                        raise ValueError(
                            f"{self.path} has {os.fstat(file.fileno()).st_size} bytes, {nbytes} are wanted, and it is read-only"
                        )
                    file.truncate(nbytes)
                mapped = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
        except OSError as error:
            raise OSError(error.errno, f"device {self.name}: {error.strerror}", self.path) from None
        return Memory(np.frombuffer(mapped, dtype=np.uint8).ctypes.data, nbytes, mapped)

    def free(self, handle: Any, nbytes: int) -> None:
        """Unmaps; nothing is kept, since another allocation must see the file as it is then."""
        self.allocated -= self.rounded(nbytes)

    def _compile(self, ast: UOp) -> Kernel:
        raise NotImplementedError(
            f"{self.name} is storage and runs no kernels: copy the tensor to a computing device first, for example .to('CPU')"
        )
