"""Reductions by NumPy, to compare with. No tests in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from manygrad.native.memory import bytes_at
from manygrad.tensor.dtype import DType, accumulate_dtype, to_dtype


def view(addr: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    """The memory at `addr` as an array that does not own it."""
    d = to_dtype(dtype)
    return bytes_at(addr, count * d.itemsize).view(d.np)


def reduce_arrays(arrays: Sequence[np.ndarray[Any, Any]], op: str, dst: DType) -> np.ndarray[Any, Any]:
    """The tree reduction of equally long arrays, accumulated in float32 for half types and rounded once to `dst`."""
    acc = accumulate_dtype(dst)
    if acc.is_bool:
        fn: Any = np.logical_or if op in ("add", "max") else np.logical_and
    else:
        fn = {"add": np.add, "mul": np.multiply, "max": np.maximum}[op]

    def tree(values: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        if len(values) == 1:
            return values[0]
        half = 1 << (len(values) - 1).bit_length() - 1
        return fn(tree(values[:half]), tree(values[half:]))

    with np.errstate(all="ignore"):
        return tree([a.astype(acc.np) for a in arrays]).astype(dst.np)
