"""Sums and products with broadcasting and promotion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class ArithmeticMixin:
    def add(self: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
        """self + alpha · other; for two bool tensors "or"."""
        x, y = self._pair(_scaled(self, other, alpha))
        return x._op(Ops.OR if x.dtype.is_bool else Ops.ADD, None, y)

    def sub(self: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
        """self − alpha · other."""
        x, y = self._pair(_scaled(self, other, alpha))
        if x.dtype.is_bool:
            raise TypeError("- of two bool tensors; use x ^ y or x.logical_xor(y), or cast to a number type first")
        return x._op(Ops.SUB, None, y)

    def mul(self: Tensor, other: Any) -> Tensor:
        """self · other; for two bool tensors "and"."""
        x, y = self._pair(other)
        return x._op(Ops.AND if x.dtype.is_bool else Ops.MUL, None, y)

    subtract, multiply = sub, mul

    def rsub(self: Tensor, other: Any, *, alpha: Any = 1) -> Tensor:
        """other − alpha · self."""
        x, y = (self if alpha == 1 else self * alpha)._pair(other, reverse=True)
        return x.sub(y)

    def square(self: Tensor) -> Tensor:
        """x²; of bools int64."""
        x = self.cast(dtypes.int64) if self.dtype.is_bool else self
        return x * x

    def reciprocal(self: Tensor) -> Tensor:
        return self._float()._op(Ops.RECIP)

    def addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
        """self + value · tensor1 · tensor2."""
        x, (a, b), kind = _widened(self, tensor1, tensor2)
        product = a * b
        return _rounded(x + (product if value == 1 else product * value), kind)

    def addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1) -> Tensor:
        """self + value · tensor1 / tensor2."""
        if not (self.dtype.is_float or tensor1.dtype.is_float or tensor2.dtype.is_float):
            raise TypeError("addcdiv of integer tensors; cast one with .float() first, or use div(rounding_mode=...)")
        x, (a, b), kind = _widened(self, tensor1, tensor2)
        return _rounded(x + (a if value == 1 else a * value) / b, kind)

    def lerp(self: Tensor, end: Tensor, weight: Any) -> Tensor:
        """self + weight · (end − self), from the nearer end, so that weight 1 gives `end` exactly."""
        x, (end, *weights), kind = _widened(self, end, *([weight] if hasattr(weight, "uop") else []))
        gap = end - x
        if not weights:
            return _rounded(x + weight * gap if abs(weight) < 0.5 else end - gap * (1 - weight), kind)
        (w,) = weights
        return _rounded((w.abs() < 0.5)._where(x + w * gap, end - gap * (1 - w)), kind)


def _widened(x: Tensor, *others: Tensor) -> tuple[Tensor, list[Tensor], DType | None]:
    """Operands of a compound op in the type that it computes in, and the type to round to at the end, if any: a result
    of a half type is rounded once, as PyTorch does."""
    kind = x.dtype
    if not kind.is_half or any(t.dtype is not kind for t in others):
        return x, list(others), None
    wide = accumulate_dtype(kind)
    return x.cast(wide), [t.cast(wide) for t in others], kind


def _rounded(x: Tensor, kind: DType | None) -> Tensor:
    return x if kind is None else x.cast(kind)


def _scaled(x: Tensor, other: Any, alpha: Any) -> Any:
    if alpha == 1:
        return other
    if (
        isinstance(alpha, float)
        and not x.dtype.is_float
        and not (other.dtype.is_float if hasattr(other, "uop") else isinstance(other, float))
    ):
        raise TypeError(f"alpha={alpha} for integer operands; pass a whole alpha, or cast to a float type first")
    return other * alpha
