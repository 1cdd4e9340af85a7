"""mma.sync, 16 rows by 8 columns by 16 terms (8 of tf32), of whole warps: which thread has what, and the sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WARP = 32
THREAD = np.arange(WARP)
BELOW, BESIDE = THREAD // 4, THREAD % 4
ROWS, COLUMNS = 16, 8
TF32_BITS = np.uint32(0xFFFFE000)  # that the instruction reads of a float32


def values(registers: Sequence[np.ndarray], kind: str) -> np.ndarray:
    """Registers of 32 bits, each of (warps, threads), as numbers: (warps, threads, registers, numbers in one)."""
    words = np.ascontiguousarray(np.stack(registers, -1).astype(np.uint32))
    if kind == "tf32":
        return (words & TF32_BITS).view(np.float32).astype(np.float64)[..., None]
    halves = words.view(np.uint16).reshape(*words.shape, 2)
    if kind == "bf16":
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return halves.view(np.float16).astype(np.float64)


def rounded_to_tf32(a: np.ndarray) -> np.ndarray:
    """cvt.rna.tf32.f32: to the nearest, ties away from zero, in a float32's bits."""
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    near = (bits + np.uint32(0x1000)) & TF32_BITS
    return np.where(np.isnan(a), np.uint32(0x7FFFFFFF), np.where(np.isinf(a), bits, near))


def product(a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray], kind: str) -> list[np.ndarray]:
    """The four sums of each thread, (warps, threads) each. The order of the sum is not that of any GPU: it is rounded
    once."""
    left, right = values(a, kind), values(b, kind)
    warps, each = len(left), left.shape[-1]
    terms = 8 * each
    rows, columns = np.zeros((warps, ROWS, terms)), np.zeros((warps, terms, COLUMNS))
    for part in range(each):
        for register in range(4):
            below, after = register % 2 * 8, register // 2 * 4 * each
            rows[:, BELOW + below, each * BESIDE + after + part] = left[:, THREAD, register, part]
        for register in range(2):
            columns[:, each * BESIDE + 4 * each * register + part, BELOW] = right[:, THREAD, register, part]
    total = rows @ columns
    return [
        (total[:, BELOW + i // 2 * 8, 2 * BESIDE + i % 2] + c[i].astype(np.float64)).astype(np.float32)
        for i in range(4)
    ]
