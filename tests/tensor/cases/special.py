"""Special functions; the oracles are `math`'s, and slow convergent sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.tensor.cases.case import Case, Draw, Sample, array, broadcastable, elementwise, shapes


def each(f: Any) -> Any:
    """A function of numbers on arrays."""
    return lambda *arrays: (
        np.asarray(np.vectorize(f, otypes=[np.float64])(*arrays))
        if all(a.size for a in arrays)
        else np.zeros(np.broadcast_shapes(*(a.shape for a in arrays)))
    )


def zeta(s: float, x: float, terms: int = 40) -> float:
    """Σ (x + k)^−s by Euler and Maclaurin."""
    total = math.fsum((x + k) ** -s for k in range(terms))
    y = x + terms
    return (
        total
        + y ** (1 - s) / (s - 1)
        + y**-s / 2
        + s * y ** (-s - 1) / 12
        - s * (s + 1) * (s + 2) * y ** (-s - 3) / 720
    )


def digamma(x: float) -> float:
    if x < 0:
        return digamma(1 - x) - math.pi / math.tan(math.pi * x)
    y = x + 40
    return (
        math.log(y)
        - 1 / (2 * y)
        - 1 / (12 * y**2)
        + 1 / (120 * y**4)
        - 1 / (252 * y**6)
        - math.fsum(1 / (x + k) for k in range(40))
    )


def polygamma(n: int, x: float) -> float:
    return digamma(x) if n == 0 else (-1) ** (n + 1) * math.factorial(n) * zeta(n + 1, x)


def i0(x: float) -> float:
    return math.fsum((x / 2) ** (2 * k) / math.factorial(k) ** 2 for k in range(40))


def igamma(a: float, x: float) -> float:
    return math.exp(a * math.log(x) - x) * math.fsum(x**n * math.exp(-math.lgamma(a + n + 1)) for n in range(80))


def erfinv(y: float) -> float:
    low, high = -6.0, 6.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < y else (low, middle)
    return low


def numbered(*numbers: int, low: float, high: float) -> Any:
    return lambda draw: Sample((array(draw, shapes(draw), low=low, high=high),), (draw(st.sampled_from(numbers)),))


def incomplete(draw: Draw) -> Sample:
    a, x = broadcastable(draw)
    return Sample((array(draw, a, low=0.2, high=9), array(draw, x, low=0.1, high=15)))


def mvlgamma(x: np.ndarray, p: int) -> np.ndarray:
    return p * (p - 1) / 4 * math.log(math.pi) + sum(each(math.lgamma)(x - j / 2) for j in range(p))


FAR = {"float32": 2e-5}  # the sum of the oracle in float64 is compared with a result rounded to float32 of up to 1000

CASES = [
    Case("Tensor.erf", each(math.erf), elementwise(), dtypes=("float16", "bfloat16", "float32", "float64")),
    Case("Tensor.erfc", each(math.erfc), elementwise()),
    Case("Tensor.erfinv", each(erfinv), elementwise(low=-0.95, high=0.95)),
    Case("Tensor.lgamma", each(math.lgamma), elementwise(low=0.1, high=20)),
    Case("Tensor.lgamma", each(math.lgamma), elementwise(low=-2.9, high=-2.1), variant="negative"),
    Case("Tensor.digamma", each(digamma), elementwise(low=0.1, high=20)),
    Case("Tensor.digamma", each(digamma), elementwise(low=-2.8, high=-2.2), variant="negative"),
    Case(
        "Tensor.polygamma",
        lambda x, n: each(lambda v: polygamma(n, v))(x),
        numbered(0, 1, 2, 4, low=0.5, high=9),
        rtol=FAR,
        call=lambda lib, x, n: x.polygamma(n),
    ),
    Case("Tensor.mvlgamma", mvlgamma, numbered(1, 2, 4, low=2.1, high=9)),
    Case("Tensor.i0", each(i0), elementwise(low=-12, high=12), rtol=FAR),
    Case("Tensor.igamma", each(igamma), incomplete, grad=False),
    Case("Tensor.igammac", each(lambda a, x: 1 - igamma(a, x)), incomplete, grad=False),
]
