"""DISK: a file as memory. `DISK:/path` maps the file; it holds data and runs no kernels."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from functools import partial

import numpy as np

from manygrad.runtime.devices.base import Backend, Builder, Kernel, Opened
from manygrad.runtime.devices.host import HOST_MEMORY, Memory
from manygrad.runtime.devices.in_order import IN_ORDER
from manygrad.tensor.uop.uop import UOp


def map_file(name: str, nbytes: int) -> Memory:
    """The file of device `name` from its start, made as long as needed. One that cannot be written is mapped
    read-only."""
    path = name.partition(":")[2]
    try:
        writable = not os.path.exists(path) or os.access(path, os.W_OK)
        with open(path, ("r+b" if os.path.exists(path) else "w+b") if writable else "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length < nbytes:
                if not writable:
                    raise ValueError(f"{path} has {length} bytes, {nbytes} are wanted, and it is read-only")
                file.truncate(nbytes)
            mapped = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
    except OSError as error:
        raise OSError(error.errno, f"device {name}: {error.strerror}", path) from None
    return Memory(np.frombuffer(mapped, dtype=np.uint8).ctypes.data, nbytes, mapped)


def no_kernels(ast: UOp) -> Kernel:
    raise NotImplementedError(
        "DISK is storage and runs no kernels: copy the tensor to a computing device first, for example .to('CPU'), and "
        "what was computed there to the file, with .to('DISK:/path')"
    )


def open_file(name: str) -> Opened:
    """A file is as long as its contents (alignment 1), and another allocation must see it as it is then (nothing is
    kept)."""
    memory = replace(
        HOST_MEMORY, alloc=partial(map_file, name), trim=lambda: None, zeroed=None, alignment=1, keep_bytes=0
    )
    return Opened(memory, IN_ORDER)


BACKEND = Backend("DISK", Builder(no_kernels), open_file)
