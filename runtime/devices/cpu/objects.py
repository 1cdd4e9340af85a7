"""Machine code on disk."""

from __future__ import annotations

from functools import cache

from manygrad.runtime.devices.compile.diskcache import DiskCache
from manygrad.runtime.devices.target import host_target
from manygrad.tensor.code import code_version

OBJECTS = DiskCache("kernels")


@cache
def version() -> bytes:
    """Version of compiled code and search results on disk besides the kernel: our code and the machine."""
    return code_version() + host_target().key
