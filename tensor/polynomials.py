"""Orthogonal polynomials of degree n, a number or a tensor of them, by their recurrences.

p(k + 1) = (a·x + b)·p(k) − c·p(k − 1), a, b and c of k; computed in float64. 0 for negative degrees, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.broadcast import result_type
from manygrad.tensor.tensor import Tensor

HIGHEST = 1024  # degree: the graph grows with it


class Family(NamedTuple):
    first: tuple[float, float]  # p(1) = first[0] · x + first[1]
    next: Callable[[int], tuple[float, float, float]]  # a, b, c


def _chebyshev(_: int) -> tuple[float, float, float]:
    return 2, 0, 1


CHEBYSHEV_T, CHEBYSHEV_U = Family((1, 0), _chebyshev), Family((2, 0), _chebyshev)
CHEBYSHEV_V, CHEBYSHEV_W = Family((2, -1), _chebyshev), Family((2, 1), _chebyshev)
HERMITE_H, HERMITE_HE = Family((2, 0), lambda k: (2, 0, 2 * k)), Family((1, 0), lambda k: (1, 0, k))
LAGUERRE = Family((-1, 1), lambda k: (-1 / (k + 1), (2 * k + 1) / (k + 1), k / (k + 1)))
LEGENDRE = Family((1, 0), lambda k: ((2 * k + 1) / (k + 1), 0, k / (k + 1)))


def _at(family: Family, x: Tensor | float, n: Tensor | float, shifted: bool = False) -> Tensor:
    """p(n) at x; where degrees are a tensor, the highest is read."""
    if not isinstance(x, Tensor):
        assert isinstance(n, Tensor)
        x = n.cast(dtypes.default_float if not n.dtype.is_float else n.dtype).full_like(x)
    kind = result_type(x, n)
    kind = kind if kind.is_float else dtypes.default_float
    if isinstance(n, Tensor):
        x, n = x.cast(dtypes.float64)._pair(n.cast(dtypes.float64))
        n = n.cast(dtypes.int64)
    highest = int(n.max().item()) if isinstance(n, Tensor) and n.numel() else 0 if isinstance(n, Tensor) else int(n)
    if highest > HIGHEST:
        raise ValueError(f"a polynomial of degree {highest}: the highest degree here is {HIGHEST}")
    x = x.cast(dtypes.float64)
    x = x * 2 - 1 if shifted else x
    before, p = x.zeros_like(), x.ones_like()
    out = before
    for k in range(highest + 1):
        if k == 1:
            before, p = p, x * family.first[0] + family.first[1]
        elif k:
            a, b, c = family.next(k - 1)
            before, p = p, (x * a + b) * p - before * c
        out = p if not isinstance(n, Tensor) else n.eq(k)._where(p, out)
    return out.cast(kind)


def chebyshev_polynomial_t(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Tₙ(x), of the first kind: cos(n·t) with x = cos(t)."""
    return _at(CHEBYSHEV_T, x, n)


def chebyshev_polynomial_u(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Uₙ(x), of the second kind: sin((n + 1)·t) / sin(t)."""
    return _at(CHEBYSHEV_U, x, n)


def chebyshev_polynomial_v(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Vₙ(x), of the third kind: cos((n + ½)·t) / cos(t / 2)."""
    return _at(CHEBYSHEV_V, x, n)


def chebyshev_polynomial_w(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Wₙ(x), of the fourth kind: sin((n + ½)·t) / sin(t / 2)."""
    return _at(CHEBYSHEV_W, x, n)


def shifted_chebyshev_polynomial_t(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Tₙ(2x − 1)."""
    return _at(CHEBYSHEV_T, x, n, shifted=True)


def shifted_chebyshev_polynomial_u(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Uₙ(2x − 1)."""
    return _at(CHEBYSHEV_U, x, n, shifted=True)


def shifted_chebyshev_polynomial_v(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Vₙ(2x − 1)."""
    return _at(CHEBYSHEV_V, x, n, shifted=True)


def shifted_chebyshev_polynomial_w(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Wₙ(2x − 1)."""
    return _at(CHEBYSHEV_W, x, n, shifted=True)


def hermite_polynomial_h(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Hₙ(x), the physicists'."""
    return _at(HERMITE_H, x, n)


def hermite_polynomial_he(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Heₙ(x), the probabilists'."""
    return _at(HERMITE_HE, x, n)


def laguerre_polynomial_l(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Lₙ(x)."""
    return _at(LAGUERRE, x, n)


def legendre_polynomial_p(x: Tensor | float, n: Tensor | float) -> Tensor:
    """Pₙ(x)."""
    return _at(LEGENDRE, x, n)


__all__ = [
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
    "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
]  # fmt: skip
