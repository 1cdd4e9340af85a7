"""Powers and roots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes
from manygrad.tensor.ops.broadcast import result_type
from manygrad.tensor.ops.elementary import without_slope
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class PowerMixin:
    def pow(self: Tensor, exponent: Any) -> Tensor:
        """x ** exponent; small whole exponents become products, halves of them products of roots."""
        if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
            kind = result_type(self, exponent)
            whole = isinstance(exponent, int) or exponent.is_integer()
            if whole and 0 <= exponent <= 8:
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
                if whole and -8 <= exponent < 0:
                    return self._power_by_products(-int(exponent), self.dtype).reciprocal()
        x, y = self._pair(exponent)
        if not x.dtype.is_float:
            return x._integer_power(y)
        wide = accumulate_dtype(x.dtype)
        return x.cast(wide)._op(Ops.POW, None, y.cast(wide)).cast(x.dtype)

    def float_power(self: Tensor, exponent: Any) -> Tensor:
        """x ** exponent in float64."""
        return self.double().pow(exponent.double() if hasattr(exponent, "uop") else float(exponent))

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
