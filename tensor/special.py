"""Special functions by torch.special's names. Most are methods of tensors; those that are not stand here."""

from __future__ import annotations

import math

from manygrad.tensor.ops.elementary import elementary
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


def ndtr(x: Tensor) -> Tensor:
    """The part of a normal distribution below x, with all its digits where it is small."""
    return _ndtr(x)


@elementary(lambda x: (x.square() * -0.5).exp() / math.sqrt(2 * math.pi), wide=True)
def _ndtr(x: Tensor) -> Tensor:
    return (x * -math.sqrt(0.5)).erfc() * 0.5


def xlog1py(x: Tensor | float, y: Tensor | float) -> Tensor:
    """x · log(1 + y), and 0 where x is 0 (NaN where y is)."""
    a = x if isinstance(x, Tensor) else y.full_like(x)  # type: ignore[union-attr]
    p, q = a._floats(y)
    return (p.eq(0) & q.isnan().logical_not())._where(0.0, p * (p.eq(0) & (q <= -1))._where(0.0, q).log1p())


__all__ = [
    "digamma", "entr", "erf", "erfc", "erfinv", "exp2", "expit", "expm1", "gammainc", "gammaincc", "gammaln", "i0",
    "i0e", "i1", "i1e", "log1p", "log_softmax", "logit", "logsumexp", "multigammaln", "ndtr", "polygamma", "psi",
    "round", "sinc", "softmax", "xlog1py", "xlogy",
]  # fmt: skip
