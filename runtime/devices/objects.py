"""Machine code on disk."""

from __future__ import annotations

from functools import cache

from manygrad.runtime.devices.diskcache import DiskCache, code_version
from manygrad.runtime.devices.target import host_target

OBJECTS = DiskCache("kernels")


@cache
def version() -> bytes:
    """What compiled code and search results on disk depend on besides the kernel: the compiler's source and the
    machine."""
    return code_version("native", "runtime/codegen", "runtime/render", "runtime/devices") + host_target().key
