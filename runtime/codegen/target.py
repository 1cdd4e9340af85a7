"""What code generation has to know of a machine. Who reads it from the system: `runtime/devices/target.py`."""

from __future__ import annotations

from dataclasses import dataclass

from manygrad.runtime.codegen.kernel.dots import Dot

LINE_BYTES = 64  # of a cache line


@dataclass(frozen=True)
class Machine:
    """One processor, or what stands for it in a test. Sizes are in bytes."""

    vector_bytes: int  # of a vector register: 64 with AVX-512, 32 with AVX2, 16 with NEON or SSE
    registers: int  # how many of them
    cache_bytes: int = 1 << 20  # a core's own second-level cache, as the system tells
    scales: bool = False  # whether x * 2**n and a look-up in two registers are one instruction (AVX-512 VL and DQ)
    cores: int = 1  # that may share a kernel: those this process may run on
    dots: tuple[Dot, ...] = ()  # products that one instruction adds up
    burst_bytes: int = 0  # what may be prefetched at once without holding up loads (0: little); measured, by processor
    group_items: int = 1  # work items that a group may have; 1: the device has no groups
    shared_bytes: int = 0  # of memory that they share
    subgroup_items: int = 0  # work items that exchange values in registers (a warp); 0: through shared memory alone
    first_cache_bytes: int = 48 << 10  # a core's own first-level data cache; not read from the system

    @property
    def accumulators(self) -> int:
        """Vectors of sums that a tile holds; the other registers are for what is loaded."""
        return 24 if self.registers >= 32 else 12
