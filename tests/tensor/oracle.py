"""Data and comparisons shared by the tests of the tensor operators. NumPy is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad import Tensor, dtypes
from manygrad.tensor.dtype import DType, to_dtype

FLOAT_TOLERANCE = {8: 1e-12, 4: 2e-6, 2: 1e-2}
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0,), (3, 5), (2, 0, 3), (2, 1, 4))
PAIRS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 4), ()), ((), (2, 3)), ((3, 1), (1, 4)), ((2, 1, 3), (4, 1)), ((1,), (5,)),
    ((0, 3), (3,)), ((0,), (1,)), ((2, 0), (2, 1)), ((), ()),
)  # fmt: skip


def numbers(
    rng: np.random.Generator, dtype: DType | str, shape: tuple[int, ...], low: float = -4, high: float = 4
) -> np.ndarray:
    """Values in [low, high] of both signs where the type has them; never a float 0."""
    d = to_dtype(dtype)
    if d.is_bool:
        return rng.integers(0, 2, shape).astype(bool)
    if d.is_int:
        return rng.integers(
            int(low) if not d.is_unsigned else max(int(low), 0), int(high), shape, endpoint=True
        ).astype(d.np)
    x = rng.uniform(low, high, shape)
    return np.asarray(np.where(np.abs(x) < 0.05, 0.05, x)).astype(d.np)


def wide(a: Any) -> np.ndarray:
    """bfloat16 has no NumPy functions of its own."""
    a = np.asarray(a)
    return a.astype(np.float32) if a.dtype == dtypes.bfloat16.np else a


def check(got: Tensor, want: Any, rtol: float | None = None, atol: float | None = None) -> None:
    """Shape, type and values of `got` are those of the NumPy array `want` (bits for ints and bools)."""
    want = np.asarray(want)
    assert got.shape == want.shape, f"shape {got.shape} is not {want.shape}"
    a = got.numpy()
    assert a.shape == want.shape and a.dtype == got.dtype.np
    if got.dtype.is_float:
        tolerance = FLOAT_TOLERANCE[got.dtype.itemsize] if rtol is None else rtol
        np.testing.assert_allclose(
            a.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance if atol is None else atol
        )
    else:
        np.testing.assert_array_equal(a, want)


def finite_difference(
    f: Callable[..., np.ndarray], arrays: list[np.ndarray], which: int, weight: np.ndarray, h: float = 1e-6
) -> np.ndarray:
    """d(sum(f * weight)) / d(arrays[which]) by central differences in float64."""
    out = np.zeros(arrays[which].shape)
    for at in np.ndindex(*arrays[which].shape):
        up, down = [a.copy() for a in arrays], [a.copy() for a in arrays]
        up[which][at] += h
        down[which][at] -= h
        out[at] = ((f(*up) - f(*down)) * weight).sum() / (2 * h)
    return out
