"""Elementwise functions of the array API standard (2023.12), under the names they have here, against NumPy.

Each takes every pair of special values of every type: NaN, infinities, zeros of both signs, subnormal numbers, the ends
of whole types. docs/pytorch.md says what is meant to differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from manygrad import Tensor
from tests.tensor.oracle import ALL, FLOATS, INTS, SIGNED, TOLERANCE, difference, special, wide

REAL = [*INTS, *FLOATS]
WHOLE = ["bool", *INTS]
F = Callable[..., Any]


@dataclass(frozen=True)
class Elementwise:
    """A function of `count` tensors in the types `kinds`; `loose` is the error allowed, in the type's tolerances.

    `skip(*arrays)` says where the value is open or meant to differ, `zeros` whether the sign of a zero counts.
    """

    ours: F
    numpy: F
    kinds: list[str]
    count: int = 1
    loose: float = 1
    skip: F | None = None
    zeros: bool = True


def shifts_out(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Shifts by less than 0 or at least the width are open."""
    return (b < 0) | (b >= a.dtype.itemsize * 8)


def division_is_open(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By 0, and of the least number by −1, the quotient of whole numbers is open."""
    if a.dtype.kind not in "iu":
        return np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)
    least = np.iinfo(a.dtype).min
    return (b == 0) | ((a == least) & (b == -1) if a.dtype.kind == "i" else False)


def negative_power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whole numbers have no negative powers."""
    return (b < 0) if a.dtype.kind == "i" else np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)


def power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(np.power(a, np.where(negative_power(a, b), b.dtype.type(1), b)))


def nowhere_finite(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The standard leaves the remainder and the quotient of huge numbers to the precision of the type."""
    if a.dtype.kind in "iu":
        return division_is_open(a, b)
    with np.errstate(all="ignore"):
        return np.isfinite(wide(a)) & (np.abs(np.true_divide(wide(a), wide(b))) > 2**7)


def unary(name: str, kinds: list[str] = FLOATS, numpy: F | None = None, loose: float = 1) -> Elementwise:
    return Elementwise(lambda t: getattr(t, name)(), numpy or getattr(np, name), kinds, 1, loose)


def binary(
    name: str, kinds: list[str], numpy: F | None = None, loose: float = 1, skip: F | None = None, zeros: bool = True
) -> Elementwise:
    return Elementwise(lambda s, t: getattr(s, name)(t), numpy or getattr(np, name), kinds, 2, loose, skip, zeros)


ELEMENTWISE: dict[str, Elementwise] = {
    "abs": unary("abs", REAL),
    "acos": unary("acos", numpy=np.arccos, loose=4),
    "acosh": unary("acosh", numpy=np.arccosh, loose=4),
    "asin": unary("asin", numpy=np.arcsin, loose=4),
    "asinh": unary("asinh", numpy=np.arcsinh, loose=4),
    "atan": unary("atan", numpy=np.arctan, loose=4),
    "atanh": unary("atanh", numpy=np.arctanh, loose=4),
    "ceil": unary("ceil", REAL),
    "cos": unary("cos", loose=4),
    "cosh": unary("cosh", loose=4),
    "exp": unary("exp", loose=4),
    "expm1": unary("expm1", loose=4),
    "floor": unary("floor", REAL),
    "isfinite": unary("isfinite", REAL),
    "isinf": unary("isinf", REAL),
    "isnan": unary("isnan", REAL),
    "log": unary("log", loose=4),
    "log10": unary("log10", loose=4),
    "log1p": unary("log1p", loose=4),
    "log2": unary("log2", loose=4),
    "logical_not": unary("logical_not", ALL),
    "negative": unary("negative", [*SIGNED, *FLOATS]),
    "positive": unary("positive", REAL),
    "reciprocal": unary("reciprocal"),
    "round": unary("round", REAL),
    "sign": Elementwise(lambda t: t.sign(), np.sign, REAL, skip=np.isnan),
    "signbit": unary("signbit"),
    "sin": unary("sin", loose=4),
    "sinh": unary("sinh", loose=4),
    "sqrt": unary("sqrt"),
    "square": unary("square", REAL),
    "tan": unary("tan", loose=4),
    "tanh": unary("tanh", loose=4),
    "trunc": unary("trunc", REAL),
    "bitwise_not": unary("bitwise_not", WHOLE, np.invert),
    "add": binary("add", REAL),
    "atan2": binary("atan2", FLOATS, np.arctan2, 4),
    "bitwise_and": binary("bitwise_and", WHOLE),
    "bitwise_left_shift": binary("bitwise_left_shift", INTS, np.left_shift, skip=shifts_out),
    "bitwise_or": binary("bitwise_or", WHOLE),
    "bitwise_right_shift": binary("bitwise_right_shift", INTS, np.right_shift, skip=shifts_out),
    "bitwise_xor": binary("bitwise_xor", WHOLE),
    "copysign": binary("copysign", FLOATS),
    "div": binary("div", FLOATS, np.divide),
    "eq": binary("eq", ALL, np.equal),
    "floor_divide": binary("floor_divide", REAL, skip=nowhere_finite),
    "greater": binary("greater", ALL),
    "greater_equal": binary("greater_equal", ALL),
    "hypot": binary("hypot", FLOATS, loose=2),
    "less": binary("less", ALL),
    "less_equal": binary("less_equal", ALL),
    "logaddexp": binary("logaddexp", FLOATS, loose=4),
    "logical_and": binary("logical_and", ALL),
    "logical_or": binary("logical_or", ALL),
    "logical_xor": binary("logical_xor", ALL),
    "maximum": binary("maximum", REAL),
    "minimum": binary("minimum", REAL),
    "multiply": binary("multiply", REAL),
    "nextafter": binary("nextafter", ["float32", "float64"]),
    "not_equal": binary("not_equal", ALL),
    "pow": binary("pow", REAL, power, skip=negative_power),
    "remainder": binary("remainder", REAL, skip=nowhere_finite, zeros=False),
    "subtract": binary("subtract", REAL),
    "clip": Elementwise(
        lambda s, t: s.clip(t.minimum(1), t.maximum(1)),
        lambda a, b: np.clip(a, np.minimum(b, a.dtype.type(1)), np.maximum(b, a.dtype.type(1))),
        REAL,
        2,
        zeros=False,
    ),
}


def in_the_type(f: F, arrays: list[np.ndarray]) -> np.ndarray:
    """Of half types in float64, rounded once; of others in themselves."""
    kind = arrays[0].dtype
    half = kind.itemsize == 2 and kind.kind not in "iu"
    with np.errstate(all="ignore"):
        want = np.asarray(f(*(a.astype(np.float64) if half else a for a in arrays)))
        return want.astype(kind) if half and want.dtype == np.float64 else want


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_of_special_values(name: str) -> None:
    f = ELEMENTWISE[name]
    wrong = []
    for kind in f.kinds:
        values = special(kind)
        arrays = [values] if f.count == 1 else [values[:, None], values[None, :]]
        want = in_the_type(f.numpy, arrays)
        skipped = f.skip(*arrays) if f.skip is not None else False
        given = [Tensor(a) for a in arrays]
        if (
            f.count == 2 and f.skip is not None and values.dtype.kind in "iu"
        ):  # (an error or a trap would hide the rest)
            given[1] = Tensor(np.where(skipped, 1, arrays[1]).astype(values.dtype))
        got = f.ours(*given).numpy()
        if found := difference(got, want, TOLERANCE.get(kind, 0) * f.loose, arrays, skipped, f.zeros):
            wrong.append(found)
    assert not wrong, "\n".join(wrong)
