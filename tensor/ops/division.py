"""Quotients, remainders, common divisors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.broadcast import result_type
from manygrad.tensor.ops.elementary import with_gradient, without_slope
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class DivisionMixin:
    def div(self: Tensor, other: Any, *, rounding_mode: str | None = None) -> Tensor:
        """True division (floats), or with rounding_mode "trunc" / "floor" of the quotient."""
        if rounding_mode is None:
            x, y = self._floats(other)
            return x._op(Ops.FDIV, None, y)
        if rounding_mode == "floor":
            x, y = self._pair(other)
            return without_slope(x.floor_divide(y), x, y)
        if rounding_mode == "trunc":
            kind = result_type(self, other)
            return self._binary(Ops.FDIV, other).trunc() if kind.is_float else self._binary(Ops.IDIV, other)
        raise ValueError(f'div: rounding_mode is None, "trunc" or "floor", not {rounding_mode!r}')

    divide = div

    def true_divide(self: Tensor, other: Any) -> Tensor:
        return self.div(other)

    def floor_divide(self: Tensor, other: Any) -> Tensor:
        """floor(x / y) of the exact quotient (Python's //)."""
        x, y = self._pair(other)
        if x.dtype.is_float:
            x, y = x.detach(), y.detach()
            rest = x.fmod(y)
            whole = ((x - rest) / y).round()
            below = rest.ne(0) & (rest < 0).ne(y < 0)
            quotient = x / y
            return y.eq(0)._where(quotient, below._where(whole - 1, whole).copysign(quotient))
        q = x._op(Ops.IDIV, None, y)
        if x.dtype.is_unsigned:
            return q
        inexact = (q * y).ne(x) & ((x < 0) ^ (y < 0))
        return inexact._where(q - 1, q)

    def remainder(self: Tensor, other: Any) -> Tensor:
        """x − floor(x / y)·y: the sign of the divisor, as Python's %."""
        x, y = self._pair(other)
        if not x.dtype.is_float:
            return x - x.floor_divide(y) * y
        r = x.fmod(y)
        out = (r.ne(0) & (r < 0).ne(y < 0))._where(r + y, r)
        return with_gradient(out, "remainder", None, lambda g, x, y: (g, -g * x.floor_divide(y)), x, y)

    def fmod(self: Tensor, other: Any) -> Tensor:
        """x − trunc(x / y)·y: the sign of the dividend, as C's.
        For floats exact while the quotient is below 2^53; 0 beyond."""
        x, y = self._pair(other)
        if not x.dtype.is_float:
            return x._op(Ops.MOD, None, y)
        kind = x.dtype
        x, y = x.cast(dtypes.float64), y.cast(dtypes.float64)
        q = (x / y).trunc()
        product, rest = _exact_product(q, y)
        r = (x - product) - rest
        step = (x < 0)._where(-y.abs(), y.abs())
        r = ((r < 0).ne(x < 0) & r.ne(0))._where(r + step, r)  # the quotient was rounded up to a whole number
        # 0 for a quotient beyond that
        r = (r.abs() < y.abs())._where(r, (x.isfinite() & (y.abs() > 0))._where(0.0, math.nan))
        out = q.eq(0)._where(y.isnan()._where(math.nan, x), r.copysign(x))
        return with_gradient(out, "fmod", None, lambda g, x, y: (g, -g * (x / y).trunc()), x, y).cast(kind)

    def gcd(self: Tensor, other: Tensor) -> Tensor:
        """The greatest common divisor, by Euclid's algorithm in the most steps that the type can need."""
        x, y = self._pair(other)
        if not x.dtype.is_int:
            raise TypeError(f"gcd needs integer tensors, not {x.dtype.name}")
        a, b = x.abs(), y.abs()
        for _ in range(_euclid_steps(x.dtype.bits) // 2):
            a = b.eq(0)._where(a, a % b.maximum(1))
            b = a.eq(0)._where(b, b % a.maximum(1))
        return a.maximum(b)

    def lcm(self: Tensor, other: Tensor) -> Tensor:
        """The least common multiple; 0 where one is 0."""
        x, y = self._pair(other)
        return (x.div(x.gcd(y).maximum(1), rounding_mode="trunc") * y).abs()


def _euclid_steps(bits: int) -> int:
    """Steps of Euclid's algorithm for two numbers of `bits` (Lamé: consecutive Fibonacci
    numbers take the longest), made even."""
    a, b, steps = 1, 2, 1
    while b < 1 << bits:
        a, b, steps = b, a + b, steps + 1
    return steps + 1 + (steps + 1) % 2


def _exact_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(p, e) with a·b = p + e (Dekker 1971); e is 0 where splitting would overflow."""
    factor = 2.0**27 + 1 if a.dtype is dtypes.float64 else 2.0**12 + 1

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        t = x * factor
        high = t - (t - x)
        return high, x - high

    p = a * b
    (ah, al), (bh, bl) = split(a), split(b)
    e = ((ah * bh - p) + ah * bl + al * bh) + al * bl
    return p, e.isfinite()._where(e, 0.0)
