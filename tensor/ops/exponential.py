"""Exponentials and logarithms, exact where the result is and accurate where a difference would cancel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.elementary import elementary, polynomial, with_gradient
from manygrad.tensor.ops.representation import mantissa_and_exponent, times_power_of_two
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

# a short part, whose product with an exponent is exact, and the rest
LOG10_OF_2 = (0.301025390625, 4.605038981195213738895e-06)


class ExponentialMixin:
    def exp(self: Tensor) -> Tensor:
        return self._float()._op(Ops.EXP)

    def log(self: Tensor) -> Tensor:
        return self._float()._op(Ops.LOG)

    @elementary(lambda x: x.exp2() * math.log(2))
    def exp2(self: Tensor) -> Tensor:
        """2 to the power of self; whole exponents give exact results."""
        n = self.clamp(-1100, 1100).round()
        return times_power_of_two(((self - n).clamp(-2000, 2000) * math.log(2)).exp(), n.cast(dtypes.int32))

    @elementary(lambda x: x.exp())
    def expm1(self: Tensor) -> Tensor:
        """exp(x) − 1, to full precision near 0 (there a Taylor polynomial)."""
        near = self.clamp(-0.35, 0.35)
        terms = range(14 if self.dtype is dtypes.float64 else 8, 0, -1)
        return (self.abs() < 0.35)._where(
            near * polynomial(near, tuple(1 / math.factorial(k) for k in terms)), self.exp() - 1
        )

    @elementary(lambda x: (x + 1).reciprocal())
    def log1p(self: Tensor) -> Tensor:
        """log(1 + x), to full precision near 0 (Goldberg's correction)."""
        u = self + 1
        return u.eq(1)._where(self, u.log() * (self / (u - 1))).where_not(u.eq(math.inf), math.inf)

    @elementary(lambda x: (x * math.log(2)).reciprocal())
    def log2(self: Tensor) -> Tensor:
        """log(x) / log(2); exact for powers of two."""
        m, e = mantissa_and_exponent(self)
        usual = (self > 0) & (self < math.inf)
        return usual._where(e + m.log() * (1 / math.log(2)), self.log())

    @elementary(lambda x: (x * math.log(10)).reciprocal())
    def log10(self: Tensor) -> Tensor:
        m, e = mantissa_and_exponent(self)
        usual = (self > 0) & (self < math.inf)
        return usual._where(e * LOG10_OF_2[0] + (e * LOG10_OF_2[1] + m.log() * (1 / math.log(10))), self.log())

    def logaddexp(self: Tensor, other: Tensor) -> Tensor:
        """log(exp(x) + exp(y)) without overflow."""
        x, y, kind = self._wide_floats(other)
        gap = (x - y).abs()
        out = x.maximum(y) + gap.isnan()._where(0.0, (-gap).exp().log1p())  # inf − inf: both are the result
        return with_gradient(
            out, "logaddexp", None, lambda g, x, y: (g * (x - y).sigmoid(), g * (y - x).sigmoid()), x, y
        ).cast(kind)

    def logaddexp2(self: Tensor, other: Tensor) -> Tensor:
        """log2(2 ** x + 2 ** y) without overflow."""
        x, y, kind = self._wide_floats(other)
        return ((x * math.log(2)).logaddexp(y * math.log(2)) * (1 / math.log(2))).cast(kind)

    def xlogy(self: Tensor, other: Any) -> Tensor:
        """x · log(y), and 0 where x is 0 (NaN where y is)."""
        x, y = self._floats(other)
        out = (x.eq(0) & y.isnan().logical_not())._where(0.0, x * y.log())
        return with_gradient(
            out, "xlogy", None, lambda g, x, y: ((x.eq(0) & (y <= 0))._where(0.0, g * y.log()), g * x / y), x, y
        )
