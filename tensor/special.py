"""Special functions by torch.special's names. Most are methods of tensors; those that are not stand here."""

from __future__ import annotations

import math

from manygrad.tensor import polynomials
from manygrad.tensor.gradient import NoGradient
from manygrad.tensor.normal import erfcx, log_ndtr, ndtr, ndtri
from manygrad.tensor.ops.elementary import elementary, with_gradient
from manygrad.tensor.ops.gamma import BERNOULLI, SHIFT
from manygrad.tensor.polynomials import *  # noqa: F403
from manygrad.tensor.tensor import Tensor

digamma, erf, erfc, erfinv, exp2, expm1 = (
    Tensor.digamma, Tensor.erf, Tensor.erfc, Tensor.erfinv, Tensor.exp2, Tensor.expm1)  # fmt: skip
gammainc, gammaincc, gammaln, i0, log1p = Tensor.igamma, Tensor.igammac, Tensor.lgamma, Tensor.i0, Tensor.log1p
log_softmax, logit, logsumexp, multigammaln = Tensor.log_softmax, Tensor.logit, Tensor.logsumexp, Tensor.mvlgamma
expit, psi, round, sinc, softmax, xlogy = (
    Tensor.sigmoid, Tensor.digamma, Tensor.round, Tensor.sinc, Tensor.softmax, Tensor.xlogy)  # fmt: skip


def polygamma(n: int, x: Tensor) -> Tensor:
    """The n-th derivative of `digamma`."""
    return x.polygamma(n)


def i0e(x: Tensor) -> Tensor:
    """exp(−|x|) · i0(x), which does not overflow."""
    return x._i0e()


def i1(x: Tensor) -> Tensor:
    """The modified Bessel function of the first kind, of order 1."""
    return x._i1()


def i1e(x: Tensor) -> Tensor:
    """exp(−|x|) · i1(x), which does not overflow."""
    return x._i1e()


def entr(x: Tensor) -> Tensor:
    """−x · log(x), 0 at 0, −inf below."""
    return _entr(x)


@elementary(lambda x: -x.log() - 1)
def _entr(x: Tensor) -> Tensor:
    inside = (x > 0)._where(x, 1.0)
    return (x < 0)._where(-math.inf, x.isnan()._where(x, -inside * inside.log())).where_not(x.eq(0), 0.0)


def xlog1py(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x · log(1 + y), and 0 where x is 0 (NaN where y is)."""
    a = x if isinstance(x, Tensor) else y.full_like(x)  # type: ignore[union-attr]
    p, q = a._floats(y)
    return (p.eq(0) & q.isnan().logical_not())._where(0.0, p * (p.eq(0) & (q <= -1))._where(0.0, q).log1p())


def zeta(x: Tensor | float, q: Tensor | float) -> Tensor:
    """Hurwitz' Σ (q + k) ** −x over k = 0, 1, 2, ... for x > 1; inf at a pole q = 0, −1, ..., NaN at other negative q
    where x is no whole number."""
    a = x if isinstance(x, Tensor) else q.full_like(x)  # type: ignore[union-attr]
    s, p, kind = a._wide_floats(q)
    return _zeta(s.cast("float64"), p.cast("float64")).cast(kind)


def _zeta(s: Tensor, q: Tensor) -> Tensor:
    """`zeta` of float64. The terms of negative q + k are turned around: with s whole they are those of a positive q."""
    up = (q < 0)._where(q - q.floor(), q)
    below = (q < 0)._where(1 - q, 1.0)
    turned = _hurwitz(s, (q < 0)._where(1 - up, 1.0)) - _hurwitz(s, below)
    odd = (s * 0.5).floor().ne(s * 0.5)
    value = _hurwitz(s, up) + (q < 0)._where(odd._where(-turned, turned), 0.0)
    value = (q <= 0)._where(q.floor().eq(q)._where(math.inf, s.floor().eq(s)._where(value, math.nan)), value)
    first = (q < 1)._where(math.inf, q.eq(1)._where(1.0, 0.0))  # the largest term, to the power of infinity
    value = s.eq(math.inf)._where(first.cast(value.dtype), value)
    value = s.eq(1)._where(math.inf, (s < 1)._where(math.nan, value)).where_not(s.isnan() | q.isnan(), math.nan)

    def backward(g: Tensor, s: Tensor, q: Tensor) -> tuple[NoGradient, Tensor]:
        return NoGradient("zeta(x, q) has no gradient to x"), g * -s * _zeta(s + 1, q)

    return with_gradient(value, "zeta", None, backward, s, q)


def _hurwitz(s: Tensor, q: Tensor) -> Tensor:
    """The sum for positive q, by Euler and Maclaurin."""
    total = q.pow(-s)
    for k in range(1, SHIFT):
        total = total + (q + k).pow(-s)
    y = q + SHIFT
    last = y.pow(-s)
    total = total + last * y / (s - 1) + last * 0.5
    factor, power = s, y
    for k, b in enumerate(BERNOULLI):  # B(2j)/(2j)! · s(s+1)...(s+2j−2) · y^(−s−2j+1)
        j = k + 1
        total = total + last * (factor / power) * (b / math.factorial(2 * j))
        factor, power = factor * (s + 2 * j - 1) * (s + 2 * j), power * y * y
    return total


__all__ = [
    "digamma", "entr", "erf", "erfc", "erfcx", "erfinv", "exp2", "expit", "expm1", "gammainc", "gammaincc", "gammaln",
    "i0", "i0e", "i1", "i1e", "log1p", "log_ndtr", "log_softmax", "logit", "logsumexp", "multigammaln", "ndtr",
    "ndtri", "polygamma", "psi", "round", "sinc", "softmax", "xlog1py", "xlogy", "zeta",
]  # fmt: skip
__all__ += polynomials.__all__
