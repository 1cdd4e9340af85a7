"""Powers and roots."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes
from manygrad.tensor.ops.broadcast import result_type
from manygrad.tensor.ops.elementary import with_gradient, without_slope
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class PowerMixin:
    def pow(self: Tensor, exponent: Any) -> Tensor:
        """x ** exponent; small whole exponents become products, halves of them products of roots."""
        if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
            kind = result_type(self, exponent)
            if exponent == int(exponent) and 0 <= exponent <= 8:
                return self._power_by_products(int(exponent), kind)
            if not kind.is_float and exponent < 0:
                raise ValueError(
                    f"pow: integers to the negative power {exponent} are no integers; "
                    "cast with .float() first, or use float_power"
                )
            if self.dtype.is_float:
                if exponent == 0.5:
                    return self.sqrt()
                if exponent == -0.5:
                    return self.rsqrt()
                if exponent == int(exponent) and -8 <= exponent < 0:
                    return self._power_by_products(-int(exponent), self.dtype).reciprocal()
        x, y = self._pair(exponent)
        if not x.dtype.is_float:
            return x._integer_power(y)
        kind = x.dtype  # (an error of the logarithm grows with the exponent: exp(88) in float32 keeps 4 digits less)
        wide = dtypes.float64 if kind is dtypes.float32 else accumulate_dtype(kind)
        x, y = x.cast(wide), y.cast(wide)
        return with_gradient(x._float_power(y), "pow", None, _pow_gradient, x, y).cast(kind)

    def float_power(self: Tensor, exponent: Any) -> Tensor:
        """x ** exponent in float64."""
        return self.double().pow(exponent.double() if hasattr(exponent, "uop") else float(exponent))

    def _float_power(self: Tensor, y: Tensor) -> Tensor:
        """exp(y · log|x|) with the sign of x where y is odd; NaN for a negative base and a fraction."""
        x = self
        magnitude = (x.abs().log() * y).exp()
        whole = y.trunc().eq(y)
        odd = whole & (y * 0.5).trunc().ne(y * 0.5)
        negative = (x < 0) & x.ne(-math.inf)
        signed = (negative & ~whole)._where(math.nan, (x.signbit() & odd)._where(-magnitude, magnitude))
        if x.dtype is dtypes.float64:  # (nothing wider rounds the error of the logarithm away)
            few = y.abs() < 64
            signed = (whole & few)._where(x._few_products(few._where(y, 0.0)), signed)
        one = y.eq(0) | x.eq(1) | (x.eq(-1) & y.abs().eq(math.inf))
        return one._where(1.0, signed)

    def _few_products(self: Tensor, y: Tensor) -> Tensor:
        """x ** y for whole y of less than 64 by squaring, exact where the products are."""
        base, out, bits = self, self.ones_like(), y.abs().cast(dtypes.int32)
        for bit in range(6):
            out = (bits >> bit & 1).bool()._where(out * base, out)
            base = base * base
        return (y < 0)._where(out.reciprocal(), out)

    def _power_by_products(self: Tensor, n: int, dtype: DType) -> Tensor:
        x = self.cast(dtype)
        if n > 2:
            x = x.cast(accumulate_dtype(dtype))
        if n == 0:
            return without_slope(x.ones_like(), x)
        if n == 1:
            return x._copied() if x is self else x
        out: Tensor | None = None
        while n:
            if n & 1:
                out = x if out is None else out * x
            n >>= 1
            x = x * x if n else x
        assert out is not None
        return out.cast(dtype)

    def _integer_power(self: Tensor, exponent: Tensor) -> Tensor:
        """By squaring, exact modulo 2**bits; a negative exponent gives 0, but ±1 for the bases 1 and −1
        (as in PyTorch)."""
        if self.dtype.is_bool:
            return self | exponent.logical_not()
        base, out = self, self.ones_like()
        for bit in range(self.dtype.bits):
            out = (exponent >> bit & 1).bool()._where(out * base, out)
            base = base * base
        return out if self.dtype.is_unsigned else ((exponent < 0) & self.abs().ne(1))._where(0, out)

    def sqrt(self: Tensor) -> Tensor:
        return self._float()._op(Ops.SQRT)

    def rsqrt(self: Tensor) -> Tensor:
        if self.dtype.is_half:
            return self.cast(dtypes.float32).rsqrt().cast(self.dtype)
        return self.sqrt().reciprocal()


def _pow_gradient(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """y · x ** (y − 1), 0 where y is 0; x ** y · log(x), 0 where x is 0 and y is not negative."""
    return y.eq(0)._where(0.0, g * y * x.pow(y - 1)), (x.eq(0) & (y >= 0))._where(0.0, g * x.pow(y) * x.log())
