"""To whole numbers; the gradient is 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class RoundingMixin:
    def trunc(self: Tensor) -> Tensor:
        return self._op(Ops.TRUNC) if self.dtype.is_float else self._copied()

    fix = trunc

    def floor(self: Tensor) -> Tensor:
        t = self.trunc()
        return (self < t)._where(t - 1, t) if self.dtype.is_float else self._copied()

    def ceil(self: Tensor) -> Tensor:
        t = self.trunc()
        return (t < self)._where(t + 1, t) if self.dtype.is_float else self._copied()

    def round(self: Tensor, *, decimals: int = 0) -> Tensor:
        """To the nearest multiple of 10 ** −decimals, halves to even."""
        if not self.dtype.is_float:
            if decimals:
                raise TypeError(
                    f"round(decimals={decimals}) needs a float tensor, not {self.dtype.name}; cast with .float() first"
                )
            return self._copied()
        if decimals:
            scale = 10.0 ** abs(decimals)
            return (self * scale).round() / scale if decimals > 0 else (self / scale).round() * scale
        t = self.trunc()
        away = (self - t).abs()
        odd = (t * 0.5).trunc().ne(t * 0.5)
        up = (away > 0.5) | (away.eq(0.5) & odd)
        return up._where(t + self.sign(), t)

    def frac(self: Tensor) -> Tensor:
        """x − trunc(x), with the sign of x; the gradient is 1."""
        if not self.dtype.is_float:
            raise TypeError(f"frac needs a float tensor, not {self.dtype.name}")
        return self - self.trunc()
