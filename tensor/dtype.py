"""Element types and PyTorch's promotion rules.

A `DType` is an interned value; `dtypes` is the namespace of all of them. `index` is the type of loop indices and
offsets (a 64-bit signed integer that never reaches a buffer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True, eq=False)
class DType:
    """`kind` is one of `b` (bool), `i`, `u`, `f`, `x` (index), `v` (void); `bits` the width of one element."""

    name: str
    kind: str
    itemsize: int
    np: Any

    def __repr__(self) -> str:
        return f"dtypes.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.name,)

    @property
    def bits(self) -> int:
        return 1 if self.kind == "b" else self.itemsize * 8

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iux"

    @property
    def is_unsigned(self) -> bool:
        return self.kind == "u"

    @property
    def is_bool(self) -> bool:
        return self.kind == "b"

    @property
    def is_half(self) -> bool:
        return self.kind == "f" and self.itemsize == 2

    @property
    def is_fp8(self) -> bool:
        """Storage only: moved and cast, not computed with."""
        return self.kind == "f" and self.itemsize == 1

    @property
    def min(self) -> int | float:
        """The smallest value (−inf for floats)."""
        if self.is_float:
            return -float("inf")
        return 0 if self.kind in "bu" else -(1 << (self.itemsize * 8 - 1))

    @property
    def max(self) -> int | float:
        if self.is_float:
            return float("inf")
        if self.is_bool:
            return 1
        return (1 << (self.itemsize * 8)) - 1 if self.kind == "u" else (1 << (self.itemsize * 8 - 1)) - 1

    def array(self, values: np.ndarray) -> np.ndarray:
        """A NumPy array in this type; what is too large for `float8_e4m3fn`, which has no infinity, becomes its
        largest number, as everywhere here."""
        if self.name == "float8_e4m3fn" and values.dtype != self.np:
            values = np.clip(values, -448, 448)
        return values.astype(self.np)

    def fits(self, value: Any) -> Any:
        """A number that a user gives for this type; ValueError for an integer that it does not hold. (Of unsigned types
        negative numbers count from the end, as in PyTorch.)"""
        if self.kind in "iu" and not (-self.max if self.kind == "u" else self.min) <= value <= self.max:
            raise ValueError(f"{self.name} does not hold {value}, only {self.min} to {self.max}; pass another dtype")
        return value

    def const(self, value: Any) -> Any:
        """`value` as this type holds it: a Python bool, int (wrapped) or float (rounded)."""
        if self.is_bool:
            return bool(value)
        if self.is_float:
            return float(value) if self.itemsize == 8 else float(self.array(np.asarray(value, dtype=np.float64)))
        value = int(value)
        if self.kind == "x":
            return value
        span = 1 << (self.itemsize * 8)
        value %= span
        return value - span if self.kind == "i" and value >= span // 2 else value


class dtypes:
    """The namespace of element types, with the aliases PyTorch has."""

    void = DType("void", "v", 0, None)
    index = DType("index", "x", 8, np.dtype(np.int64))
    bool = DType("bool", "b", 1, np.dtype(np.bool_))
    int8 = DType("int8", "i", 1, np.dtype(np.int8))
    int16 = DType("int16", "i", 2, np.dtype(np.int16))
    int32 = DType("int32", "i", 4, np.dtype(np.int32))
    int64 = DType("int64", "i", 8, np.dtype(np.int64))
    uint8 = DType("uint8", "u", 1, np.dtype(np.uint8))
    uint16 = DType("uint16", "u", 2, np.dtype(np.uint16))
    uint32 = DType("uint32", "u", 4, np.dtype(np.uint32))
    uint64 = DType("uint64", "u", 8, np.dtype(np.uint64))
    float16 = DType("float16", "f", 2, np.dtype(np.float16))
    bfloat16 = DType("bfloat16", "f", 2, np.dtype(ml_dtypes.bfloat16))
    float32 = DType("float32", "f", 4, np.dtype(np.float32))
    float64 = DType("float64", "f", 8, np.dtype(np.float64))
    float8_e4m3fn = DType("float8_e4m3fn", "f", 1, np.dtype(ml_dtypes.float8_e4m3fn))
    float8_e5m2 = DType("float8_e5m2", "f", 1, np.dtype(ml_dtypes.float8_e5m2))
    half, float, double, char, short, int, long = float16, float32, float64, int8, int16, int32, int64
    all: tuple[DType, ...] = (
        bool,
        int8,
        int16,
        int32,
        int64,
        uint8,
        uint16,
        uint32,
        uint64,
        float16,
        bfloat16,
        float32,
        float64,
    )
    floats: tuple[DType, ...] = (float16, bfloat16, float32, float64)
    fp8s: tuple[DType, ...] = (float8_e4m3fn, float8_e5m2)
    default_float = float32
    default_int = int64

    @staticmethod
    def from_np(dtype: Any) -> DType:
        found = _BY_NP.get(np.dtype(dtype))
        if found is None:
            raise TypeError(
                f"NumPy dtype {np.dtype(dtype)} has no counterpart here; use one of {[d.name for d in dtypes.all]}"
            )
        return found


_BY_NP = {d.np: d for d in (*dtypes.all, *dtypes.fp8s)}
_NAMES = {d.name: d for d in (*dtypes.all, *dtypes.fp8s, dtypes.void, dtypes.index)}


def _by_name(name: str) -> DType:
    return _NAMES[name]


def to_dtype(dtype: DType | str) -> DType:
    """Accepts a `DType` or its name."""
    if isinstance(dtype, DType):
        return dtype
    alias = getattr(dtypes, dtype, None) if isinstance(dtype, str) else None
    if isinstance(alias, DType):
        return alias
    raise TypeError(f"unknown dtype {dtype!r}; known: {[d.name for d in dtypes.all]}")


def category(d: DType) -> int:
    """0 bool, 1 integer, 2 float: the classes of PyTorch's promotion."""
    return 2 if d.is_float else 1 if d.is_int else 0


def promote(a: DType, b: DType) -> DType:
    """The type of `a op b` for two tensors with dims (torch.promote_types).

    uint16/32/64 with a signed integer: PyTorch refuses; here the next wider signed type is taken (int64 at most).
    """
    if a is b:
        return a
    if a.is_fp8 or b.is_fp8:
        raise TypeError(
            f"{a.name} and {b.name} have no common type: float8 is for storage; cast with .float() or .bfloat16() first"
        )
    if category(a) != category(b):
        return a if category(a) > category(b) else b
    if a.is_float:
        if a.itemsize == b.itemsize:
            return dtypes.float32  # float16 with bfloat16
        return a if a.itemsize > b.itemsize else b
    if a.kind == b.kind:
        return a if a.itemsize > b.itemsize else b
    signed, unsigned = (a, b) if a.kind == "i" else (b, a)
    if signed.itemsize > unsigned.itemsize:
        return signed
    return {1: dtypes.int16, 2: dtypes.int32, 4: dtypes.int64, 8: dtypes.int64}[unsigned.itemsize]


def can_cast(source: DType | str, target: DType | str) -> bool:
    """Whether a result of type `source` may be written in place of one of `target` (torch.can_cast):
    no float to integers, nothing to bool."""
    return category(to_dtype(source)) <= category(to_dtype(target))


class finfo:
    """Limits of a float type: `bits`, `eps`, `max`, `min`, `tiny` (= `smallest_normal`), `smallest_subnormal`,
    `resolution`, `dtype`."""

    def __init__(self, dtype: DType | str = "float32"):
        d = to_dtype(dtype)
        if not d.is_float:
            raise TypeError(f"finfo is of float types, not {d.name}; use iinfo")
        info = ml_dtypes.finfo(d.np)
        self.dtype, self.bits = d.name, d.bits
        self.eps, self.max, self.min, self.resolution = (
            float(info.eps),
            float(info.max),
            float(info.min),
            float(info.resolution),
        )
        self.tiny = self.smallest_normal = float(info.smallest_normal)
        self.smallest_subnormal = float(info.smallest_subnormal)


class iinfo:
    """Limits of an integer type: `bits`, `max`, `min`, `dtype`."""

    def __init__(self, dtype: DType | str):
        d = to_dtype(dtype)
        if not d.is_int:
            raise TypeError(f"iinfo is of integer types, not {d.name}; use finfo")
        self.dtype, self.bits, self.max, self.min = d.name, d.bits, int(d.max), int(d.min)


def accumulate_dtype(d: DType) -> DType:
    """The type a sum of `d` is accumulated in: float32 for the half types, else `d`."""
    return dtypes.float32 if d.is_half else d


def contraction_dtype(d: DType) -> DType:
    """The type in which the products of a matrix product or convolution of `d` are made and added: float32 for the half
    types, int32 for the integers below, else `d`."""
    return dtypes.int32 if d.is_bool or (d.is_int and d.itemsize < 4) else accumulate_dtype(d)
