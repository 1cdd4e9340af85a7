"""What PTX's arithmetic gives, on arrays of a value for each thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

TYPES = {
    **{f"u{8 * n}": t for n, t in ((1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64))},
    **{f"s{8 * n}": t for n, t in ((1, np.int8), (2, np.int16), (4, np.int32), (8, np.int64))},
    **{f"b{8 * n}": t for n, t in ((1, np.uint8), (2, np.uint16), (4, np.uint32), (8, np.uint64))},
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
ROUNDINGS = {"rn", "rz", "rni", "rzi", "rmi", "rpi", "lo", "hi", "wide", "sat", "ftz", "full", "approx"}


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once: the product is exact in float64, the sum is rounded to odd there."""
    product = a.astype(np.float64) * b.astype(np.float64)
    c = c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64).copy()
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    outward = (error > 0) == (total > 0)
    bits = np.where(inexact, np.where(outward, bits | 1, bits - 1), bits)
    return bits.view(np.float64).astype(np.float32)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once, but for ties that the last bits of the product decide."""
    product = a * b
    scale = 134217729.0
    a1 = a * scale - (a * scale - a)
    b1 = b * scale - (b * scale - b)
    error = (a - a1) * (b - b1) - (product - a1 * b1 - (a - a1) * b1 - a1 * (b - b1))
    total = product + c
    part = total - product
    rest = (product - (total - part)) + (c - part)
    found = total + (rest + error)
    return np.where(np.isfinite(found), found, product + c)


def high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of a product."""
    size = a.dtype.itemsize
    if size < 8:
        wide = {2: np.int32, 4: np.int64}[size] if a.dtype.kind == "i" else {2: np.uint32, 4: np.uint64}[size]
        return (a.astype(wide) * b.astype(wide) >> wide(8 * size)).astype(a.dtype)
    x, y = a.view(np.uint64), b.view(np.uint64)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    x0, x1, y0, y1 = x & mask, x >> half, y & mask, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    other = x0 * y1 + (middle & mask)
    found = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        found = found - np.where(a < 0, y, 0) - np.where(b < 0, x, 0)
    return found.view(a.dtype)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero; what a GPU gives for a division by zero is all ones."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a, a // np.where(b == 0, 1, b).astype(a.dtype))
    safe = np.where((b == 0) | (b == -1), 1, b).astype(a.dtype)
    floor = a // safe
    found = floor + ((a % safe != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, -1, np.where(b == -1, -a, found)).astype(a.dtype)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - quotient(a, b) * b).astype(a.dtype)


def shifted(a: np.ndarray, by: np.ndarray, left: bool) -> np.ndarray:
    """Shifts by as much as the width, or more, leave nothing, or the sign."""
    bits = 8 * a.dtype.itemsize
    small = np.minimum(by.view(np.uint32), bits - 1).astype(a.dtype)
    if left:
        return np.where(by.view(np.uint32) >= bits, 0, a << small).astype(a.dtype)
    if a.dtype.kind == "i":
        return a >> small
    return np.where(by.view(np.uint32) >= bits, 0, a >> small).astype(a.dtype)


def converted(a: np.ndarray, to: type, modes: set[str]) -> np.ndarray:
    """cvt: floats to whole numbers saturate, and NaN is 0."""
    from_float, to_float = a.dtype.kind == "f", np.dtype(to).kind == "f"
    with np.errstate(all="ignore"):
        if to_float:
            if from_float and modes & {"rni", "rzi", "rmi", "rpi"}:
                a = whole(a, modes)
            return a.astype(to)
        if not from_float:
            return a.astype(to)
        a = whole(a.astype(np.float64), modes)
        info = np.iinfo(to)
        inside = (a >= float(info.min)) & (a <= float(info.max)) & (a < 2.0 ** (8 * np.dtype(to).itemsize))
        inside &= (a < 2.0 ** (8 * np.dtype(to).itemsize - 1)) | (info.min == 0)
        found = np.where(inside, a, 0).astype(to)
        return np.where(np.isnan(a), 0, np.where(inside, found, np.where(a > 0, info.max, info.min))).astype(to)


def whole(a: np.ndarray, modes: set[str]) -> np.ndarray:
    if "rni" in modes:
        return np.rint(a)
    if "rmi" in modes:
        return np.floor(a)
    return np.ceil(a) if "rpi" in modes else np.trunc(a)


def least(a: np.ndarray, b: np.ndarray, modes: set[str], pick: Callable[..., np.ndarray]) -> np.ndarray:
    """min and max: a NaN is left out, but with .NaN."""
    if a.dtype.kind != "f":
        return pick(a, b)
    found = np.where(np.isnan(a), b, np.where(np.isnan(b), a, pick(a, b)))
    return np.where(np.isnan(a) | np.isnan(b), a + b, found) if "NaN" in modes else found


COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "ne": lambda a, b: (a != b) & ~(np.isnan(a) | np.isnan(b)) if a.dtype.kind == "f" else a != b,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "neu": lambda a, b: (a != b) | np.isnan(a) | np.isnan(b), "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
}  # fmt: skip
TWO: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip
