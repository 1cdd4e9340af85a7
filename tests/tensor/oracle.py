"""Data and comparisons shared by the tests of the tensor operators. NumPy is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from manygrad import Tensor, dtypes
from manygrad.tensor.dtype import DType, to_dtype

FLOAT_TOLERANCE = {8: 1e-12, 4: 2e-6, 2: 1e-2}
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0,), (3, 5), (2, 0, 3), (2, 1, 4))
SIGNED = ["int8", "int16", "int32", "int64"]
INTS = [*SIGNED, "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
ALL = ["bool", *INTS, *FLOATS]
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 4e-15}  # about 8 roundings
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


def special(kind: str) -> np.ndarray:
    """The values of a type that functions have rules for, and some between them."""
    if kind == "bool":
        return np.array([False, True])
    d = getattr(dtypes, kind)
    if d.is_int:
        low, high = int(d.min), int(d.max)
        values = {low, low + 1, -5, -3, -2, -1, 0, 1, 2, 3, 7, 31, high // 2, high - 1, high}
        return np.array(sorted(v for v in values if v >= low), d.np)
    info = np.finfo(np.float32) if kind == "bfloat16" else np.finfo(d.np)
    ends = [np.inf, float(info.max) if kind != "bfloat16" else 3e38, float(info.tiny), float(info.tiny) / 8]
    values = [0.0, 1.0, 0.5, 1.5, 2.0, 2.5, 3.0, 7.0, 0.7, 1e-3, 25.0, 100.0, *ends]
    return np.array([np.nan, *values, *(-v for v in values)]).astype(d.np)


def difference(
    got: np.ndarray,
    want: np.ndarray,
    tolerance: float,
    inputs: list[np.ndarray],
    open_at: Any = False,
    zeros: bool = True,
) -> str:
    """What differs: types, shapes, where NaN and infinities are, numbers beyond the tolerance, the signs of zeros."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{got.shape}, not {want.dtype}{want.shape}"
    a, b = wide(got), wide(want)
    with np.errstate(all="ignore"):
        if a.dtype.kind == "f":
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            same |= np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) <= tolerance * np.abs(b) + smallest(got.dtype))
            same &= (not zeros) | (a != 0) | (b != 0) | (np.signbit(a) == np.signbit(b))
        else:
            same = a == b
    wrong = np.argwhere(~(same | np.broadcast_to(open_at, want.shape)))
    if not len(wrong):
        return ""
    whole = [np.broadcast_to(wide(x), want.shape) for x in inputs]
    shown = [
        f"{[x[tuple(at)].item() for x in whole]}: {a[tuple(at)].item()}, not {b[tuple(at)].item()}" for at in wrong[:6]
    ]
    return f"{got.dtype}, {len(wrong)} of {want.size}: " + "; ".join(shown)


def smallest(kind: np.dtype) -> float:
    """Numbers below the normal ones have fewer digits: one unit of their last place is allowed."""
    return {"float16": 6e-8, "bfloat16": 1e-40, "float32": 1.5e-45, "float64": 5e-324}.get(kind.name, 0.0)


def same_values(got: Any, want: Any, *inputs: Any, tolerance: float | None = None) -> None:
    got, want = (got.numpy() if isinstance(got, Tensor) else np.asarray(got)), np.asarray(want)
    rough = TOLERANCE.get(want.dtype.name, 0) * 8 if tolerance is None else tolerance
    found = difference(got, want, rough, [], zeros=False)
    assert not found, f"{found}; of {inputs}"
