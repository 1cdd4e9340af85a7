"""Arithmetic, division, signs, rounding, limits."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, broadcastable, elementwise, shapes

ALL = ("float16", "bfloat16", "float32", "float64")


def two(low: float = -4, high: float = 4, **named: Any) -> Any:
    """Two tensors and a drawn keyword."""

    def samples(draw: Draw) -> Sample:
        kwargs = {k: draw(st.sampled_from(v)) for k, v in named.items()}
        return Sample(tuple(array(draw, s, low=low, high=high) for s in broadcastable(draw)), (), kwargs)

    return samples


def apart(draw: Draw) -> Sample:
    """Two tensors without ties: there the gradient is shared or goes to one."""
    x, y = two()(draw).arrays
    return Sample((x, np.asarray(y + 0.0123)))


def quotient(draw: Draw, dtype: str = "float64") -> Sample:
    """Dividends between whole multiples of divisors, so that no difference crosses a jump."""
    a, b = broadcastable(draw)
    divisor = np.asarray(array(draw, b, "int64", 1, 4) * draw(st.sampled_from([-1, 1])))
    whole = np.asarray(array(draw, a, "int64", -3, 3))
    if dtype == "int64":
        return Sample((whole * 7 + 1, divisor))
    return Sample((np.asarray(whole * 12 + 0.3), divisor.astype(np.float64)))


def integers(count: int = 2, low: int = -40, high: int = 40, dtype: str = "int32") -> Any:
    return lambda draw: Sample(
        tuple(array(draw, s, dtype, low, high) for s in (broadcastable(draw, count) if count > 1 else [shapes(draw)]))
    )


def limits(draw: Draw) -> Sample:
    a, b = broadcastable(draw)
    return Sample((array(draw, a), array(draw, b, low=-2, high=-0.5), array(draw, b, low=0.5, high=2)))


def numbers(*values: Any, **named: Any) -> Any:
    def samples(draw: Draw) -> Sample:
        return Sample(
            (array(draw, shapes(draw)),),
            tuple(draw(st.sampled_from(v)) for v in values),
            {k: draw(st.sampled_from(v)) for k, v in named.items()},
        )

    return samples


def weird(draw: Draw) -> Sample:
    shape = shapes(draw)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return Sample(
        (
            np.where(
                rng.random(shape) < 0.5,
                rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], shape),
                rng.uniform(-2, 2, shape),
            ),
        )
    )


def three(draw: Draw) -> Sample:
    return Sample(
        tuple(array(draw, s, low=0.5) for s in broadcastable(draw, 3)),
        (),
        {"value": draw(st.sampled_from([1, -0.5, 2]))},
    )


def shifts(draw: Draw) -> Sample:
    a, b = broadcastable(draw)
    return Sample((array(draw, a, "int32", -99, 99), array(draw, b, "int32", 0, 9)))


def ldexp(draw: Draw) -> Sample:
    a, b = broadcastable(draw)
    return Sample((array(draw, a), array(draw, b, "int32", -5, 5)))


INT = {"dtypes": ("float32",), "grad": False}  # integer arrays keep their type

CASES = [
    Case("Tensor.add", lambda x, y, alpha: x + alpha * y, two(alpha=[1, 2, -0.5]), dtypes=ALL),
    Case("Tensor.sub", lambda x, y, alpha: x - alpha * y, two(alpha=[1, 3]), dtypes=ALL),
    Case("Tensor.subtract", np.subtract, two()), Case("Tensor.mul", np.multiply, two(), dtypes=ALL),
    Case("Tensor.multiply", np.multiply, two()),
    Case("Tensor.div", np.divide, two(), dtypes=ALL), Case("Tensor.divide", np.divide, two()),
    Case("Tensor.true_divide", np.divide, two()),
    Case("Tensor.div", lambda x, y, rounding_mode: np.trunc(x / y),
         lambda d: Sample(quotient(d).arrays, (), {"rounding_mode": "trunc"}), variant="trunc"),
    Case("Tensor.div", lambda x, y, rounding_mode: np.floor(x / y),
         lambda d: Sample(quotient(d).arrays, (), {"rounding_mode": "floor"}), variant="floor"),
    Case("Tensor.floor_divide", np.floor_divide, quotient), Case("Tensor.remainder", np.remainder, quotient),
    Case("Tensor.fmod", np.fmod, quotient),
    Case("Tensor.floor_divide", np.floor_divide, lambda d: quotient(d, "int64"), variant="integers", **INT),
    Case("Tensor.remainder", np.remainder, lambda d: quotient(d, "int64"), variant="integers", **INT),
    Case("Tensor.fmod", np.fmod, lambda d: quotient(d, "int64"), variant="integers", **INT),
    Case("Tensor.gcd", np.gcd, integers(), **INT), Case("Tensor.lcm", np.lcm, integers(), **INT),
    Case("Tensor.addcmul", lambda x, a, b, value: x + value * a * b, three),
    Case("Tensor.addcdiv", lambda x, a, b, value: x + value * a / b, three),
    Case("Tensor.lerp", lambda x, y, w: x + w * (y - x), elementwise(3)),
    Case("Tensor.lerp", lambda x, y, w: x + w * (y - x), lambda d: Sample(two()(d).arrays, (0.3,)), variant="number"),
    Case("Tensor.neg", np.negative, elementwise()), Case("Tensor.negative", np.negative, elementwise()),
    Case("Tensor.positive", np.positive, elementwise()),
    Case("Tensor.abs", np.abs, elementwise(), dtypes=ALL), Case("Tensor.absolute", np.abs, elementwise()),
    Case("Tensor.sign", np.sign, elementwise()),
    Case("Tensor.abs", np.abs, integers(1), variant="integers", **INT), Case("Tensor.sgn", np.sign, elementwise()),
    Case("Tensor.signbit", np.signbit, weird, grad=False),
    Case("Tensor.copysign", np.copysign, two()), Case("Tensor.heaviside", np.heaviside, two(), grad=False),
    Case("Tensor.nextafter", np.nextafter, two(), grad=False, dtypes=("float64",)),
    Case("Tensor.ldexp", np.ldexp, ldexp),
    Case("Tensor.frexp", lambda x: np.frexp(x), elementwise(), dtypes=("float64", "float32")),
    Case("Tensor.floor", np.floor, elementwise(), grad=False), Case("Tensor.ceil", np.ceil, elementwise(), grad=False),
    Case("Tensor.trunc", np.trunc, elementwise(), grad=False), Case("Tensor.fix", np.trunc, elementwise(), grad=False),
    Case("Tensor.frac", lambda x: x - np.trunc(x),
         lambda d: Sample((np.asarray(np.round(array(d, shapes(d))) + 0.3),))),
    Case("Tensor.round", np.round, elementwise(), grad=False),
    Case("Tensor.round", lambda x, decimals: np.round(x, decimals), numbers(decimals=[-1, 0, 2]), variant="decimals",
         grad=False, dtypes=("float64",)),
    Case("Tensor.clamp", np.clip, limits), Case("Tensor.clip", np.clip, limits),
    Case("Tensor.clamp", np.clip, numbers([-1.5, None], [1.5]), variant="numbers"),
    Case("Tensor.clamp_min", np.maximum, numbers([-1.01, 0.4567])),
    Case("Tensor.clamp_max", np.minimum, numbers([-1.01, 0.4567])),
    Case("Tensor.maximum", np.maximum, apart), Case("Tensor.minimum", np.minimum, apart),
    Case("Tensor.fmax", np.fmax, apart), Case("Tensor.fmin", np.fmin, apart),
    Case("Tensor.nan_to_num", lambda x, nan, posinf, neginf: np.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf),
         lambda d: Sample(weird(d).arrays, (), {"nan": 0.5, "posinf": 9.0, "neginf": -9.0}), grad=False),
    Case("Tensor.bitwise_and", np.bitwise_and, integers(), **INT),
    Case("Tensor.bitwise_or", np.bitwise_or, integers(), **INT),
    Case("Tensor.bitwise_xor", np.bitwise_xor, integers(), **INT),
    Case("Tensor.bitwise_not", np.bitwise_not, integers(1), **INT),
    Case("Tensor.bitwise_left_shift", np.left_shift, shifts, **INT),
    Case("Tensor.bitwise_right_shift", np.right_shift, shifts, **INT),
]  # fmt: skip
