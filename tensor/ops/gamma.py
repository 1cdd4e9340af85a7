"""The gamma family: lgamma, digamma, polygamma, mvlgamma, the incomplete igamma and igammac. Computed in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.gradient import NoGradient
from manygrad.tensor.ops.elementary import elementary, polynomial, with_gradient

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

# the asymptotic series in 1/x², the highest power first: B(2k) / (2k·(2k − 1)) of Stirling's, B(2k) / 2k of digamma's
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
STIRLING = tuple(b / ((2 * k + 2) * (2 * k + 1)) for k, b in enumerate(BERNOULLI))[::-1]
DIGAMMA = tuple(b / (2 * k + 2) for k, b in enumerate(BERNOULLI))[::-1]
SIN_PI = tuple((-1) ** k * math.pi ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(12))[::-1]
COS_PI = tuple((-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k) for k in range(13))[::-1]
SHIFT = 10  # arguments below it are raised by it, where the series have all digits
NODES, NODE_STEP, FIRST_NODE = 160, 0.11, -4.0  # of the quadrature for igamma


def _whole_and_part(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.round()
    return whole, x - whole


def _sin_pi(part: Tensor) -> Tensor:
    """sin(π·part) for |part| <= ½: the Taylor polynomial."""
    return part * polynomial(part * part, SIN_PI)


def _cot_pi(part: Tensor) -> Tensor:
    return polynomial(part * part, COS_PI) / _sin_pi(part)


def _up(x: Tensor) -> Tensor:
    return (x < SHIFT)._where(x + SHIFT, x)


def _cotangent_powers(n: int) -> list[float]:
    """dⁿ/dxⁿ cot(x) as a polynomial in cot(x), the highest power first."""
    p = [1.0, 0.0]
    for _ in range(n):  # p(c)' = p'(c)·(−1 − c²)
        d = [k * a for k, a in zip(range(len(p) - 1, 0, -1), p)]
        p = [-a - b for a, b in zip([*d, 0.0, 0.0], [0.0, 0.0, *d])]
    return p


class GammaMixin:
    @elementary(lambda x: x.digamma(), wide=True)
    def lgamma(self: Tensor) -> Tensor:
        """log|Γ(x)|, by Stirling's series, below ½ reflected; inf at 0, −1, −2, ..."""
        reflect = self < 0.5
        x = reflect._where(1 - self, self)
        low, y = x < SHIFT, _up(x)
        product = x
        for k in range(1, SHIFT):
            product = product * (x + k)
        series = (y - 0.5) * y.log() - y + 0.5 * math.log(2 * math.pi) + polynomial(1 / (y * y), STIRLING) / y
        value = x.eq(math.inf)._where(math.inf, series - low._where(low._where(product, 1.0).log(), 0.0))
        _, part = _whole_and_part(self)
        reflected = math.log(math.pi) - _sin_pi(part).abs().log() - value
        return reflect._where(self.eq(-math.inf)._where(math.inf, reflected), value)

    @elementary(lambda x: x.polygamma(1), wide=True)
    def digamma(self: Tensor) -> Tensor:
        """Γ′(x) / Γ(x); −inf at 0, NaN at −1, −2, ..."""
        reflect = self < 0.5
        x = reflect._where(1 - self, self)
        low, y = x < SHIFT, _up(x)
        inverse = 1 / (y * y)
        value = y.log() - 0.5 / y - polynomial(inverse, DIGAMMA) * inverse
        terms = x.reciprocal()
        for k in range(1, SHIFT):
            terms = terms + (x + k).reciprocal()
        value = low._where(value - terms, value)
        whole, part = _whole_and_part(self)
        value = reflect._where(value - math.pi * _cot_pi(part), value)
        pole = part.eq(0) & (whole <= 0)
        return pole._where(self.eq(0)._where(-(1 / self), math.nan), value)

    def polygamma(self: Tensor, n: int | Tensor) -> Tensor:
        """The n-th derivative of digamma (`torch.polygamma(n, x)` takes n first)."""
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"polygamma: n is a whole number from 0, not {n!r}")
        return self.digamma() if n == 0 else self._polygamma(n)

    @elementary(lambda x, n: x.polygamma(n + 1), wide=True)
    def _polygamma(self: Tensor, n: int) -> Tensor:
        """(−1)ⁿ⁺¹ n! Σ (x + k)⁻ⁿ⁻¹ by Euler and Maclaurin, below ½ reflected."""
        reflect = self < 0.5
        x = reflect._where(1 - self, self)
        s = n + 1
        total = x.pow(-s)
        for k in range(1, SHIFT):
            total = total + (x + k)._power_by_products(s, x.dtype).reciprocal()
        y = x + SHIFT
        last = y._power_by_products(s, y.dtype).reciprocal()
        total = total + last * y / n + last * 0.5
        factor = float(s)
        for k, b in enumerate(BERNOULLI):  # B(2j)/(2j)! · s(s+1)...(s+2j−2) · y^(−s−2j+1)
            j = k + 1
            total = total + last * (b * factor / math.factorial(2 * j)) * (
                y._power_by_products(2 * j - 1, y.dtype).reciprocal()
            )
            factor *= (s + 2 * j - 1) * (s + 2 * j)
        value = total * ((-1) ** (n + 1) * math.factorial(n))
        _, part = _whole_and_part(self)
        cot = _cot_pi(part)
        turned = polynomial(cot, tuple(_cotangent_powers(n))) * math.pi ** (n + 1)
        return reflect._where(value * (-1) ** n - turned, value)

    def mvlgamma(self: Tensor, p: int) -> Tensor:
        """log of the multivariate gamma function of dimension p; x > (p − 1) / 2."""
        if p < 1:
            raise ValueError(f"mvlgamma: p is at least 1, not {p}")
        x = self._float()
        total = x.lgamma()
        for j in range(1, p):
            total = total + (x - j / 2).lgamma()
        return total + p * (p - 1) / 4 * math.log(math.pi)

    def igamma(self: Tensor, other: Tensor) -> Tensor:
        """The regularised lower incomplete gamma function P(a, x), a = self > 0, x = other >= 0; there is a gradient to
        x only, asking for the other is an error."""
        return _incomplete(self, other, lower=True)

    def igammac(self: Tensor, other: Tensor) -> Tensor:
        """The regularised upper incomplete gamma function Q(a, x) = 1 − P(a, x)."""
        return _incomplete(self, other, lower=False)


def _incomplete(self: Tensor, other: Tensor, lower: bool) -> Tensor:
    """The smaller of P and Q by quadrature with doubly exponential nodes v = w·exp(u − exp(−u)), w the width of the
    integrand: P = xᵃe⁻ˣ/Γ(a) ∫₀^∞ exp(−av + x(1 − e⁻ᵛ)) dv for x < a + 1, Q = xᵃe⁻ˣ/Γ(a) ∫₀^∞ e^(−xv) (1 + v)^(a−1) dv
    beyond."""
    a, x = self._floats(other)
    kind, name = a.dtype, "igamma" if lower else "igammac"
    a, x = a.cast(dtypes.float64), x.cast(dtypes.float64)
    left, wide_a, wide_x = x < a + 1, a.unsqueeze(-1), x.unsqueeze(-1)
    width = 1 / ((x - a).abs() + left._where(a, x).sqrt()).unsqueeze(-1)
    u = a.arange(NODES).cast(dtypes.float64) * NODE_STEP + FIRST_NODE
    v = width * (u - (-u).exp()).exp()
    weight = v * (1 + (-u).exp()) * NODE_STEP
    power = left.unsqueeze(-1)._where(wide_x * -(-v).expm1() - wide_a * v, (wide_a - 1) * v.log1p() - wide_x * v)
    front = (a * x.log() - x - a.lgamma()).exp()
    small = front * (power.exp() * weight).sum(-1)
    small = x.eq(math.inf)._where(0.0, small)
    value = (left if lower else ~left)._where(small, 1 - small)
    value = x.eq(0)._where(0.0 if lower else 1.0, value).where_not((a <= 0) | (x < 0), math.nan)

    def backward(g: Tensor, a: Tensor, x: Tensor) -> tuple[NoGradient, Tensor]:
        slope = ((a - 1) * x.log() - x - a.lgamma()).exp()
        return NoGradient(f"{name}(a, x) has no gradient to a"), g * (slope if lower else -slope)

    return with_gradient(value, name, None, backward, a, x).cast(kind)
