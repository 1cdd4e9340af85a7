"""Python's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class OperatorsMixin:
    """Python's operators of tensors. Large: Python has that many."""

    def __add__(self: Tensor, o: Any) -> Tensor:
        return self.add(o)

    def __radd__(self: Tensor, o: Any) -> Tensor:
        return self.add(o)

    def __sub__(self: Tensor, o: Any) -> Tensor:
        return self.sub(o)

    def __rsub__(self: Tensor, o: Any) -> Tensor:
        return self.rsub(o)

    def __mul__(self: Tensor, o: Any) -> Tensor:
        return self.mul(o)

    def __rmul__(self: Tensor, o: Any) -> Tensor:
        return self.mul(o)

    def __truediv__(self: Tensor, o: Any) -> Tensor:
        return self.div(o)

    def __rtruediv__(self: Tensor, o: Any) -> Tensor:
        x, y = self._floats(o)
        return y.div(x)

    def __floordiv__(self: Tensor, o: Any) -> Tensor:
        return self.floor_divide(o)

    def __mod__(self: Tensor, o: Any) -> Tensor:
        return self.remainder(o)

    def __rfloordiv__(self: Tensor, o: Any) -> Tensor:
        x, y = self._pair(o, reverse=True)
        return x.floor_divide(y)

    def __rmod__(self: Tensor, o: Any) -> Tensor:
        x, y = self._pair(o, reverse=True)
        return x.remainder(y)

    def __pow__(self: Tensor, o: Any) -> Tensor:
        return self.pow(o)

    def __rpow__(self: Tensor, o: Any) -> Tensor:
        x, y = self._pair(o, reverse=True)
        return x.pow(y)

    def __neg__(self: Tensor) -> Tensor:
        return self.neg()

    def __pos__(self: Tensor) -> Tensor:
        return self.positive()

    def __abs__(self: Tensor) -> Tensor:
        return self.abs()

    def __invert__(self: Tensor) -> Tensor:
        return self.bitwise_not()

    def __and__(self: Tensor, o: Any) -> Tensor:
        return self.bitwise_and(o)

    def __or__(self: Tensor, o: Any) -> Tensor:
        return self.bitwise_or(o)

    def __xor__(self: Tensor, o: Any) -> Tensor:
        return self.bitwise_xor(o)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lshift__(self: Tensor, o: Any) -> Tensor:
        return self.lshift(o)

    def __rshift__(self: Tensor, o: Any) -> Tensor:
        return self.rshift(o)

    def __rlshift__(self: Tensor, o: Any) -> Tensor:
        x, y = self._pair(o, reverse=True)
        return x.lshift(y)

    def __rrshift__(self: Tensor, o: Any) -> Tensor:
        x, y = self._pair(o, reverse=True)
        return x.rshift(y)

    def __lt__(self: Tensor, o: Any) -> Tensor:
        return self.lt(o)

    def __gt__(self: Tensor, o: Any) -> Tensor:
        return self.gt(o)

    def __le__(self: Tensor, o: Any) -> Tensor:
        return self.le(o)

    def __ge__(self: Tensor, o: Any) -> Tensor:
        return self.ge(o)

    def __eq__(self: Tensor, o: Any) -> Tensor:
        return self.eq(o)

    def __ne__(self: Tensor, o: Any) -> Tensor:
        return self.ne(o)

    __hash__ = object.__hash__
