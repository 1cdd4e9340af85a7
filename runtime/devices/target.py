"""The target of code: the processor, and what code generation has to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from manygrad.native.processor import Processor, cores, llvm_version, matrix_unit, processor, second_level_cache_bytes
from manygrad.runtime.codegen.target import Dot, Machine
from manygrad.tensor.dtype import dtypes

# a softmax over rows of 4 KiB is a tenth faster where its first pass asks for the next row, if memory is busy
ZEN_BURST_BYTES = 4 << 10
AMX_ROWS = 16
AVX2_DOTS = (
    Dot(dtypes.uint8, dtypes.int8, 32, words=True, most=127),
    Dot(dtypes.uint8, dtypes.int8, 32, words=True),
)


@dataclass(frozen=True)
class Target:
    processor: Processor
    machine: Machine

    @property
    def rounds_bfloat16(self) -> bool:
        """Whether one instruction rounds float32 to bfloat16, and another one tells where it does not as we do."""
        return has_bfloat16(self.processor) and self.processor.has("avx512dq")

    @property
    def key(self) -> bytes:
        """Key of generated code on disk besides the kernel."""
        return f"{self.processor.key} {self.machine}".encode()


@cache
def host_target() -> Target:
    """This machine."""
    return Target(processor(), machine_of(processor(), cores()))


def machine_of(p: Processor, cores: int) -> Machine:
    """Machine that follows from a processor's features; the cache is this machine's."""
    dots, cache_bytes = dot_products(p), second_level_cache_bytes()
    burst = ZEN_BURST_BYTES if p.cpu.startswith("znver") else 0
    if p.has("avx512f"):
        vector, registers, scales = 64, 32, p.has("avx512vl", "avx512dq")
    elif p.architecture == "aarch64":
        vector, registers, scales = 16, 32, False
    else:
        vector, registers, scales = 32 if p.has("avx2") else 16, 16, False
    return Machine(vector, registers, cache_bytes, scales, cores, dots=dots, burst_bytes=burst)


def _rows(p: Processor, feature: str) -> int:
    """Rows of a tile register for this element type."""
    return AMX_ROWS if p.has("amx-tile", feature) and matrix_unit() else 1


def has_bfloat16(p: Processor) -> bool:
    """AVX-512's instructions for it, in processor and compiler."""
    return p.has("avx512bf16", "avx512vl") and llvm_version()[0] >= 20


def dot_products(p: Processor) -> tuple[Dot, ...]:
    """The products of bytes that one instruction adds up, of AVX-512 VNNI, AVX-VNNI, or NEON, or a few of AVX2; and of
    bfloat16: of AVX-512 BF16. Also of AMX, where the system lets this process use it."""
    if p.has("avx512vnni", "avx512vl"):
        rows = _rows(p, "amx-bf16")
        halves = (Dot(dtypes.bfloat16, dtypes.bfloat16, 64, rows=rows),) if has_bfloat16(p) else ()
        parts = (Dot(dtypes.float32, dtypes.float32, 64, rows=rows),) if rows > 1 else ()
        return (Dot(dtypes.uint8, dtypes.int8, 64, rows=_rows(p, "amx-int8")), *halves, *parts)
    if p.has("avxvnni"):
        return (Dot(dtypes.uint8, dtypes.int8, 32),)
    if p.has("avx2"):
        return AVX2_DOTS
    return tuple(Dot(d, d, 16) for d in (dtypes.int8, dtypes.uint8)) if p.has("dotprod") else ()
