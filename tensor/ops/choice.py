"""One value or another: conditions, the larger and the smaller, limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes, finfo
from manygrad.tensor.ops.broadcast import broadcast_shape, placed
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def _is_condition(x: Any) -> bool:
    from manygrad.tensor.tensor import Tensor

    return isinstance(x, Tensor) and bool(x.dtype.is_bool)


class _Where:
    """A method that the class has with the condition first: of two bool tensors only the way of the call says which is
    the condition."""

    def __init__(self, method: Callable[..., Any]):
        self.method = self.__wrapped__ = method
        self.__doc__, self.__name__ = method.__doc__, method.__name__

    def __get__(self, tensor: Any, kind: Any = None) -> Callable[..., Any]:
        return self._of_class if tensor is None else MethodType(self.method, tensor)

    def _of_class(self, condition: Any, x: Any = None, other: Any = None) -> Any:
        """`Tensor.where(condition, x, other)`; of a tensor that is no condition, its method. Of a condition alone, the
        indices of where it holds, a tensor a dim."""
        if x is None and other is None:
            return condition.nonzero(as_tuple=True)
        return condition._where(x, other) if _is_condition(condition) else self.method(condition, x, other)


class ChoiceMixin:
    def _where(self: Tensor, x: Any, y: Any) -> Tensor:
        """x where self (a condition) holds, else y."""
        from manygrad.tensor.tensor import Tensor

        cond = self.cast(dtypes.bool)
        if isinstance(x, Tensor):
            a, b = x._pair(x._fits(y))
        elif isinstance(y, Tensor):
            a, b = y._pair(y._fits(x), reverse=True)
        else:
            first = self._new(
                UOp.const(
                    dtypes.default_float
                    if isinstance(x, float) or isinstance(y, float)
                    else dtypes.bool
                    if isinstance(x, bool) and isinstance(y, bool)
                    else dtypes.default_int,
                    x,
                )
            )
            a, b = first._pair(y)
        shape = broadcast_shape(cond.shape, a.shape, b.shape)
        cond, a, b = cond._broadcast(shape), a._broadcast(shape), b._broadcast(shape)
        for p, q in ((cond, a), (cond, b), (a, b)):
            if p.uop.device is not None and q.uop.device is not None and p.uop.device != q.uop.device:
                raise ValueError(
                    f"where: operands are on different devices: {placed(p)} and {placed(q)}; move one with .to(...)"
                )
        return cond._op(Ops.WHERE, None, a, b, dtype=a.dtype)

    @_Where
    def where(self: Tensor, condition: Any, other: Any) -> Tensor:
        """`x.where(condition, other)`: x where the condition (a bool tensor) holds, else `other`, as in PyTorch.

        With anything but a bool tensor as its first argument, self is the condition: `condition.where(x, other)`,
        as in tinygrad. `Tensor.where(condition, x, other)` is torch.where.
        """
        return condition._where(self, other) if _is_condition(condition) else self._where(condition, other)

    def where_not(self: Tensor, cond: Tensor, value: Any) -> Tensor:
        """`value` where `cond` holds, else self."""
        return cond._where(value, self)

    def masked_fill(self: Tensor, mask: Tensor, value: Any) -> Tensor:
        """self with `value` (a number or 0-d tensor) where the mask holds."""
        if not mask.dtype.is_bool:
            raise TypeError(f"masked_fill needs a bool mask, not {mask.dtype.name}; compare, or cast with .bool()")
        if hasattr(value, "uop") and value.ndim:
            raise ValueError(
                f"masked_fill takes one value, not a tensor of shape {value.shape}; use value.where(mask, x)"
            )
        if isinstance(value, (int, float)):
            self.dtype.fits(value)
        return mask._where(value, self).cast(self.dtype)

    # *** the larger and the smaller ***

    def maximum(self: Tensor, other: Any) -> Tensor:
        """The larger of two; NaN where one is NaN."""
        x, y = self._pair(other)
        return x._op(Ops.OR if x.dtype.is_bool else Ops.MAX, None, y)

    def minimum(self: Tensor, other: Any) -> Tensor:
        """The smaller of two; NaN where one is NaN."""
        x, y = self._pair(other)
        if x.dtype.is_float:
            return -((-x).maximum(-y))
        return x.bitwise_not().maximum(y.bitwise_not()).bitwise_not()

    def fmax(self: Tensor, other: Any) -> Tensor:
        """The larger of two, the other one where one is NaN."""
        x, y = self._pair(other)
        return ((x >= y) | y.isnan())._where(x, y) if x.dtype.is_float else x.maximum(y)

    def fmin(self: Tensor, other: Any) -> Tensor:
        """The smaller of two, the other one where one is NaN."""
        x, y = self._pair(other)
        return ((x <= y) | y.isnan())._where(x, y) if x.dtype.is_float else x.minimum(y)

    # *** limits ***

    def clamp(self: Tensor, min: Any = None, max: Any = None) -> Tensor:
        """At least `min` and at most `max` (numbers or tensors; `max` wins); NaN where one of the three is.
        The gradient is 1 at the limits too."""
        if min is None and max is None:
            raise ValueError("clamp: give min, max or both")
        out = self
        if min is not None:
            out, low = out._pair(out._fits(min))
            out = _or_nan(out < low, low, min)._where(low, out)
        if max is not None:
            out, high = out._pair(out._fits(max))
            out = _or_nan(high < out, high, max)._where(high, out)
        return out

    def clamp_min(self: Tensor, min: Any) -> Tensor:
        return self.clamp(min=min)

    def clamp_max(self: Tensor, max: Any) -> Tensor:
        return self.clamp(max=max)

    clip = clamp

    def nan_to_num(self: Tensor, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
        """NaN and the infinities as numbers; by default 0, the largest and the lowest of the type."""
        if not self.dtype.is_float:
            return self._copied()
        info = finfo(self.dtype)
        out = self.isnan()._where(nan, self)
        out = self.eq(math.inf)._where(info.max if posinf is None else posinf, out)
        return self.eq(-math.inf)._where(info.min if neginf is None else neginf, out)


def _or_nan(beyond: Tensor, bound: Tensor, given: Any) -> Tensor:
    """`beyond`, and where the bound is NaN. Nothing is computed for a bound that was given as a number."""
    known = isinstance(given, (int, float)) and given == given
    return beyond if known or not bound.dtype.is_float else beyond | bound.isnan()
