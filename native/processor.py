"""The processor this process runs on: LLVM's names of it, its features, its cores and its caches.

Nothing else asks for these; what follows from them for generated code is in the target (`runtime/devices/target.py`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import llvmlite.binding as llvm

ALIASES = {"arm64": "aarch64", "amd64": "x86_64"}  # other names of an architecture
SECOND_LEVEL_BYTES = 1 << 20  # of a cache, where the system does not tell
COUNTED_FOR_S = 0.1
# of Linux on x86_64: arch_prctl, ARCH_REQ_XCOMP_PERM, and the state of AMX's registers
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Processor:
    """The processor that LLVM makes code for. `features`: as LLVM takes them, `+avx2,-avx512f`."""

    triple: str
    cpu: str
    features: str = ""

    @property
    def architecture(self) -> str:
        name = self.triple.partition("-")[0]
        return ALIASES.get(name, name)

    def has(self, *features: str) -> bool:
        """Whether it has all of them, by LLVM's names."""
        return {f"+{f}" for f in features} <= set(self.features.split(","))

    @property
    def key(self) -> str:
        """Key of machine code on disk: the processor, and LLVM's version."""
        return f"{self.triple} {self.cpu} {self.features} {'.'.join(map(str, llvm.llvm_version_info))}"


@cache
def processor() -> Processor:
    """This machine's."""
    return Processor(llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


@cache
def matrix_unit() -> bool:
    """Has the system let this process use AMX's registers, in all its threads, and says whether it does: on Linux a
    process asks for their 8 KiB of state."""
    if sys.platform != "linux" or processor().architecture != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)


def llvm_version() -> tuple[int, ...]:
    return tuple(llvm.llvm_version_info)


def cores() -> int:
    """Count of the cores that this process may use, which may change while it runs: asked anew every
    `COUNTED_FOR_S`."""
    return _cores(int(time.monotonic() / COUNTED_FOR_S))


def counted_until_ns() -> int:
    """On the clock of time.monotonic."""
    return int((int(time.monotonic() / COUNTED_FOR_S) + 1) * COUNTED_FOR_S * 1e9)


@lru_cache(1)
def _cores(when: int) -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def second_level_cache_bytes() -> int:
    """Size of a core's own second-level cache."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return SECOND_LEVEL_BYTES
