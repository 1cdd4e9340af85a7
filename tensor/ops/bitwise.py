"""Logic on truth values, and operators on the bits of integers and bools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class BitwiseMixin:
    def _bits(self: Tensor, op: Ops, other: Any) -> Tensor:
        x, y = self._pair(other)
        if x.dtype.is_float:
            raise TypeError(f"bitwise {op.name} needs bool or integer operands, not {x.dtype.name}; cast first")
        return x._op(op, None, y)

    def _shift(self: Tensor, op: Ops, other: Any) -> Tensor:
        """Shifts by the width or more: 0, or −1 to the right of a negative number."""
        if isinstance(other, int) and 0 <= other < self.dtype.bits:
            return self._bits(op, other)
        x, y = self._pair(other)
        if x.dtype.is_float or x.dtype.is_bool:
            raise TypeError(f"a shift needs integer operands, not {x.dtype.name}; cast first")
        inside = (y >= 0) & (y < x.dtype.bits)
        beyond: Any = 0 if op is Ops.SHL or x.dtype.is_unsigned else (x < 0)._where(-1, 0).cast(x.dtype)
        return inside._where(x._op(op, None, inside._where(y, 0)), beyond)

    def bitwise_and(self: Tensor, other: Any) -> Tensor:
        return self._bits(Ops.AND, other)

    def bitwise_or(self: Tensor, other: Any) -> Tensor:
        return self._bits(Ops.OR, other)

    def bitwise_xor(self: Tensor, other: Any) -> Tensor:
        return self._bits(Ops.XOR, other)

    def bitwise_left_shift(self: Tensor, other: Any) -> Tensor:
        return self._shift(Ops.SHL, other)

    def bitwise_right_shift(self: Tensor, other: Any) -> Tensor:
        return self._shift(Ops.SHR, other)

    lshift, rshift = bitwise_left_shift, bitwise_right_shift

    def bitwise_not(self: Tensor) -> Tensor:
        if self.dtype.is_float:
            raise TypeError(f"bitwise_not (~) needs a bool or integer tensor, not {self.dtype.name}; cast first")
        return self._op(Ops.NOT)

    def logical_not(self: Tensor) -> Tensor:
        return self.cast(dtypes.bool)._op(Ops.NOT)

    def logical_and(self: Tensor, other: Tensor) -> Tensor:
        return self.bool() & other.bool()

    def logical_or(self: Tensor, other: Tensor) -> Tensor:
        return self.bool() | other.bool()

    def logical_xor(self: Tensor, other: Tensor) -> Tensor:
        return self.bool() ^ other.bool()
