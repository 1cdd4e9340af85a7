"""mma.sync, 16 rows by 8 columns by 16 terms, of whole warps: which thread has what, and the sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WARP = 32
THREAD = np.arange(WARP)
BELOW, BESIDE = THREAD // 4, THREAD % 4
ROWS, TERMS, COLUMNS = 16, 16, 8


def values(registers: Sequence[np.ndarray], is_bfloat: bool) -> np.ndarray:
    """Registers of 32 bits, each of (warps, threads), as numbers: (warps, threads, registers, 2)."""
    words = np.ascontiguousarray(np.stack(registers, -1).astype(np.uint32))
    halves = words.view(np.uint16).reshape(*words.shape, 2)
    if is_bfloat:
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return halves.view(np.float16).astype(np.float64)


def product(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray], is_bfloat: bool
) -> list[np.ndarray]:
    """The four sums of each thread, (warps, threads) each. The order of the sum is not that of any GPU: it is rounded
    once."""
    left, right = values(a, is_bfloat), values(b, is_bfloat)
    warps = len(left)
    rows, columns = np.zeros((warps, ROWS, TERMS)), np.zeros((warps, TERMS, COLUMNS))
    for half in range(2):
        for register in range(4):
            below, after = register % 2 * 8, register // 2 * 8
            rows[:, BELOW + below, 2 * BESIDE + after + half] = left[:, THREAD, register, half]
        for register in range(2):
            columns[:, 2 * BESIDE + 8 * register + half, BELOW] = right[:, THREAD, register, half]
    total = rows @ columns
    return [
        (total[:, BELOW + i // 2 * 8, 2 * BESIDE + i % 2] + c[i].astype(np.float64)).astype(np.float32)
        for i in range(4)
    ]
