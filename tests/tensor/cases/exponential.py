"""Exponentials, logarithms, powers, trigonometric and hyperbolic functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.tensor.cases.case import Case, Draw, Sample, array, elementwise, shapes

ALL = ("float16", "bfloat16", "float32", "float64")


def f(name: str, oracle: Callable[..., Any], low: float = -4, high: float = 4, **options: Any) -> Case:
    return Case(f"Tensor.{name}", oracle, elementwise(low=low, high=high), **options)


def two(name: str, oracle: Callable[..., Any], low: float = -4, high: float = 4, **options: Any) -> Case:
    return Case(f"Tensor.{name}", oracle, elementwise(2, low, high), **options)


def by_number(*numbers: float, low: float = 0.1, high: float = 3) -> Callable[[Draw], Sample]:
    from hypothesis import strategies as st

    return lambda draw: Sample((array(draw, shapes(draw), low=low, high=high),), (draw(st.sampled_from(numbers)),))


def logaddexp2(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.logaddexp(x * np.log(2), y * np.log(2)) / np.log(2)


CASES = [
    f("exp", np.exp, dtypes=ALL), f("exp2", np.exp2, -9, 9), f("expm1", np.expm1), f("log", np.log, 0.06, 9),
    f("log2", np.log2, 0.06, 9),
    f("log10", np.log10, 0.06, 9), f("log1p", np.log1p, -0.9, 4), two("logaddexp", np.logaddexp),
    two("logaddexp2", logaddexp2),
    two("xlogy", lambda x, y: x * np.log(y), 0.06, 4), f("sqrt", np.sqrt, 0.06, 9),
    f("rsqrt", lambda x: 1 / np.sqrt(x), 0.06, 9),
    f("square", np.square), f("reciprocal", np.reciprocal),
    two("pow", np.power, 0.1, 3),
    Case("Tensor.pow", np.power, by_number(0, 1, 2, 5, -1, -3, 0.5, -0.5, 1.5, -2.25), variant="number"),
    Case("Tensor.float_power", lambda x, p: np.float64(x) ** p, by_number(2, -1.5), grad=False, dtypes=("float64",)),
    f("sin", np.sin), f("cos", np.cos, -30, 30), f("tan", np.tan, -1.3, 1.3), f("asin", np.arcsin, -0.95, 0.95),
    f("arcsin", np.arcsin, -0.95, 0.95),
    f("acos", np.arccos, -0.95, 0.95), f("arccos", np.arccos, -0.95, 0.95), f("atan", np.arctan),
    f("arctan", np.arctan), two("atan2", np.arctan2),
    two("arctan2", np.arctan2), two("hypot", np.hypot), f("sinh", np.sinh), f("cosh", np.cosh),
    f("tanh", np.tanh, dtypes=ALL), f("asinh", np.arcsinh),
    f("arcsinh", np.arcsinh), f("acosh", np.arccosh, 1.1, 9), f("arccosh", np.arccosh, 1.1, 9),
    f("atanh", np.arctanh, -0.9, 0.9),
    f("arctanh", np.arctanh, -0.9, 0.9), f("sinc", np.sinc, -0.9, 0.9), f("deg2rad", np.deg2rad, -180, 180),
    f("rad2deg", np.rad2deg, rtol={"float32": 1e-4}),
    f("angle", np.angle),
]  # fmt: skip
