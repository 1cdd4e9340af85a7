"""Sign and magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manygrad.tensor.ops.elementary import with_gradient, without_slope
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class SignMixin:
    def abs(self: Tensor) -> Tensor:
        """|x|; the gradient at 0 is 0."""
        if self.dtype.is_unsigned or self.dtype.is_bool:
            return self
        if not self.dtype.is_float:
            return (self < 0)._where(-self, self)
        return with_gradient((self > 0)._where(self, 0 - self), "abs", None, lambda g, x: (g * x.sign(),), self)

    def sign(self: Tensor) -> Tensor:
        """−1, 0 or 1; 0 for NaN."""
        if self.dtype.is_bool:
            return self
        return without_slope((self > 0).cast(self.dtype) - (self < 0).cast(self.dtype), self)

    def heaviside(self: Tensor, values: Tensor) -> Tensor:
        """0 where x < 0, 1 where x > 0, `values` where x is 0; 0 for NaN."""
        x, y = self._pair(values)
        return x.eq(0)._where(y, (x > 0).cast(x.dtype))

    def positive(self: Tensor) -> Tensor:
        if self.dtype.is_bool:
            raise TypeError("positive (unary +) of a bool tensor; cast it to a number type first")
        return self

    def neg(self: Tensor) -> Tensor:
        if self.dtype.is_bool:
            raise TypeError("neg (unary -) of a bool tensor; use ~x or x.logical_not()")
        return self._op(Ops.NEG)

    absolute, sgn, negative = abs, sign, neg

    def isreal(self: Tensor) -> Tensor:
        return self.ones_like(dtype="bool")
