"""Machines, as code generation knows them. Who reads it from the system: `runtime/devices/target.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.uop import UOp

LINE_BYTES = 64  # of a cache line
LANE_BYTES = 4  # of each factor of a dot product, side by side
# of each factor that a matrix unit holds at once, and so SQUARES**2 of sums: eight registers
SQUARES = 2
WARP = 32  # threads of a GPU that run one instruction
# a matrix product of warps: how many threads of one lie below each other in its part of the product, and side by side;
# of each row what a group copies at a time
WARP_DOWN, WARP_BESIDE = 8, 4
FRAGMENT_BYTES = 64
CHUNK_BYTES = 16  # of it a thread reads at once; one instruction copies as much into the memory of a group, at most


class Dot(NamedTuple):
    """An instruction that adds the products of what four bytes hold of type `left` by the same of type `right` to an
    int32 or float32, in vectors of `vector_bytes`; as the arg of a CUSTOM, one of the products, which may be added up
    by it. `words`: several instructions, by way of 16 bits; `most`: what is of type `left` is known not to be more than
    that (of a machine's: must not be more). `rows`: of a matrix unit, which multiplies up to so many rows of one factor
    by a vector's lanes of the other in one instruction, of each as much as a vector holds; 1: there is none. `columns`:
    of one whose operands and sums are shared out over the registers of a warp's threads (mma), which multiplies by so
    many columns of the other, factors of float32 rounded to tf32 before; 0: it is none. Other factors of float32 are
    multiplied in parts, by a matrix unit alone."""

    left: DType
    right: DType
    vector_bytes: int
    words: bool = False
    most: int | None = None
    rows: int = 1
    columns: int = 0

    @property
    def terms(self) -> int:
        """Products that it adds up in a lane."""
        return LANE_BYTES // (dtypes.bfloat16 if self.in_parts else self.left).itemsize

    @property
    def most_terms(self) -> int:
        """Products that an instruction of a matrix unit adds up, at most."""
        return self.terms * self.vector_bytes // LANE_BYTES

    @property
    def block_terms(self) -> int:
        """Iterations of a product of warps that a group copies at a time."""
        return FRAGMENT_BYTES // self.left.itemsize

    @property
    def in_parts(self) -> bool:
        return self.left is dtypes.float32 and not self.columns

    @property
    def words_most(self) -> int:
        """How many of it add up to what fits 16 bits, whatever the bytes are: each adds two products there."""
        if not self.words or self.most is None:
            return 0
        largest = 2 * self.most * -int(self.right.min)
        return int(dtypes.int16.max) // largest if largest else 0

    def takes(self, x: UOp, y: UOp) -> bool:
        """Whether it multiplies `x` by `y`, in any order."""
        if {self.left, self.right} != {x.dtype, y.dtype}:
            return False
        return self.most is None or bounds(x if x.dtype is self.left else y)[1] <= self.most


# mma.sync of PTX, 16 rows by 8 columns, 16 iterations at once, of float32 8
WARP_DOTS = tuple(Dot(t, t, 32, rows=16, columns=8) for t in (dtypes.bfloat16, dtypes.float16, dtypes.float32))


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
    copies_ahead: bool = False  # whether they go on while what they copy is on its way there (cp.async)
    warp_items: int = 0  # threads that access memory at once, best what lies side by side; 0: this is no GPU
    first_cache_bytes: int = 48 << 10  # a core's own first-level data cache; not read from the system

    @property
    def accumulators(self) -> int:
        """Vectors of sums that a tile holds; the other registers are for what is loaded."""
        return 24 if self.registers >= 32 else 12
