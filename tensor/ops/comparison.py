"""Comparisons; the result is of bools."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.ops.broadcast import result_type
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class ComparisonMixin:
    def lt(self: Tensor, other: Any) -> Tensor:
        return self._binary(Ops.CMPLT, other)

    def gt(self: Tensor, other: Any) -> Tensor:
        return self._binary(Ops.CMPLT, other, reverse=True)

    def eq(self: Tensor, other: Any) -> Tensor:
        return self._binary(Ops.CMPEQ, other)

    def ne(self: Tensor, other: Any) -> Tensor:
        return self._binary(Ops.CMPNE, other)

    def le(self: Tensor, other: Any) -> Tensor:
        kind = result_type(self, other)
        return self.lt(other) | self.eq(other) if kind.is_float else self.gt(other).logical_not()

    def ge(self: Tensor, other: Any) -> Tensor:
        kind = result_type(self, other)
        return self.gt(other) | self.eq(other) if kind.is_float else self.lt(other).logical_not()

    less, greater, less_equal, greater_equal, not_equal = lt, gt, le, ge, ne

    def isnan(self: Tensor) -> Tensor:
        return self.ne(self)

    def isinf(self: Tensor) -> Tensor:
        return self.eq(math.inf) | self.eq(-math.inf) if self.dtype.is_float else self.ne(self)

    def isfinite(self: Tensor) -> Tensor:
        return (self.isnan() | self.isinf()).logical_not()

    def isposinf(self: Tensor) -> Tensor:
        return self.eq(math.inf) if self.dtype.is_float else self.ne(self)

    def isneginf(self: Tensor) -> Tensor:
        return self.eq(-math.inf) if self.dtype.is_float else self.ne(self)

    def isreal(self: Tensor) -> Tensor:
        return self.eq(self) | self.ne(self)

    def isclose(
        self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
    ) -> Tensor:
        """|x − y| <= atol + rtol·|y|, or both are the same infinity (with equal_nan: both NaN)."""
        if self.dtype is not other.dtype:
            raise TypeError(f"isclose: {self.dtype.name} and {other.dtype.name} differ; cast one")
        if not (rtol >= 0 and atol >= 0):
            raise ValueError(f"isclose: rtol and atol are not negative, got {rtol} and {atol}")
        x, y = self._pair(other)
        if x.dtype.is_bool:
            return x.eq(y)
        if not x.dtype.is_float:
            x, y = x.double(), y.double()
        near = x.eq(y) | (y.isfinite() & ((x - y).abs() <= y.abs() * rtol + atol))
        return near | (x.isnan() & y.isnan()) if equal_nan else near

    def allclose(
        self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
    ) -> bool:
        """Whether all elements are close; computes it now."""
        return bool(self.isclose(other, rtol, atol, equal_nan).all().item())

    def equal(self: Tensor, other: Tensor) -> bool:
        """Whether shape and all elements are the same; computes it now."""
        return self.shape == other.shape and bool(self.eq(other).all().item())
