"""Elementwise operators with broadcasting and PyTorch's type promotion."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, category, dtypes, promote, to_dtype
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def result_type(x: Tensor, y: Tensor | bool | int | float) -> DType:
    """PyTorch's rule: a Python number, and a 0-d tensor beside one with dims, only raise the category."""
    if isinstance(y, (bool, int, float)):
        rank = 2 if isinstance(y, float) else 1 if not isinstance(y, bool) else 0
        if category(x.dtype) >= rank:
            return x.dtype
        return dtypes.default_float if rank == 2 else dtypes.default_int
    cx, cy = category(x.dtype), category(y.dtype)
    if cx == cy and (x.ndim == 0) != (y.ndim == 0):
        return y.dtype if x.ndim == 0 else x.dtype
    if cx != cy and (x.ndim == 0) != (y.ndim == 0):
        return promote(x.dtype, y.dtype)
    return promote(x.dtype, y.dtype)


def broadcast_shape(*shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    n = max(len(s) for s in shapes)
    out: list[Any] = []
    for dims in zip(*[(1,) * (n - len(s)) + tuple(s) for s in shapes]):
        wide = [d for d in dims if not (isinstance(d, int) and d == 1)]
        if any(d is not wide[0] and d != wide[0] for d in wide[1:]):
            raise ValueError(f"shapes {' and '.join(map(str, shapes))} do not broadcast: dims {dims} differ and none of them is 1")
        out.append(wide[0] if wide else 1)
    return tuple(out)


class ElementwiseMixin:
    def _const_like(self: Tensor, value: Any, dtype: DType) -> Tensor:
        return self._new(UOp.const(dtype, value))

    def _pair(self: Tensor, other: Any, reverse: bool = False, dtype: DType | None = None) -> tuple[Tensor, Tensor]:
        """Both operands in one dtype and shape."""
        from manygrad.tensor.tensor import Tensor

        if not isinstance(other, (Tensor, bool, int, float)):
            if isinstance(other, UOp):
                other = self._new(UOp(Ops.CAST, dtypes.int64, (other,)))
            else:
                other = Tensor(other, device=self.device if isinstance(self.device, str) else None)
                if isinstance(self.device, tuple):
                    other = other.to(self.device)
        kind = dtype or result_type(self, other)
        x = self.cast(kind)
        y = x._const_like(other, kind) if not isinstance(other, Tensor) else other.cast(kind)
        if x.uop.device is not None and y.uop.device is not None and x.uop.device != y.uop.device:
            raise ValueError(f"operands are on different devices: {_where(x)} and {_where(y)}; move one with .to(...) or .shard(...)")
        shape = broadcast_shape(x.shape, y.shape)
        x, y = x._broadcast(shape), y._broadcast(shape)
        if x.uop.device is None and y.uop.device is not None:
            x._device = y._device
        return (y, x) if reverse else (x, y)

    def _binary(self: Tensor, op: Ops, other: Any, reverse: bool = False, dtype: DType | None = None) -> Tensor:
        x, y = self._pair(other, reverse, dtype)
        return x._op(op, None, y, dtype=dtypes.bool if op in (Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ) else x.dtype)

    def _float(self: Tensor) -> Tensor:
        return self if self.dtype.is_float else self.cast(dtypes.default_float)

    # *** types ***

    def cast(self: Tensor, dtype: DType | str) -> Tensor:
        d = to_dtype(dtype)
        return self if d is self.dtype else self._op(Ops.CAST, dtype=d)

    def bitcast(self: Tensor, dtype: DType | str) -> Tensor:
        """The same bits as another type of the same width."""
        d = to_dtype(dtype)
        if d.itemsize != self.dtype.itemsize:
            raise ValueError(f"bitcast from {self.dtype.name} to {d.name}: widths differ ({self.dtype.itemsize} and {d.itemsize} bytes)")
        return self if d is self.dtype else self._op(Ops.BITCAST, dtype=d)

    def float(self: Tensor) -> Tensor: return self.cast(dtypes.float32)
    def double(self: Tensor) -> Tensor: return self.cast(dtypes.float64)
    def half(self: Tensor) -> Tensor: return self.cast(dtypes.float16)
    def bfloat16(self: Tensor) -> Tensor: return self.cast(dtypes.bfloat16)
    def int(self: Tensor) -> Tensor: return self.cast(dtypes.int32)
    def long(self: Tensor) -> Tensor: return self.cast(dtypes.int64)
    def bool(self: Tensor) -> Tensor: return self.cast(dtypes.bool)

    # *** arithmetic ***

    def add(self: Tensor, other: Any) -> Tensor: return self._binary(Ops.ADD, other)
    def sub(self: Tensor, other: Any) -> Tensor: return self._binary(Ops.SUB, other)
    def mul(self: Tensor, other: Any) -> Tensor: return self._binary(Ops.MUL, other)

    def div(self: Tensor, other: Any, rounding_mode: str | None = None) -> Tensor:
        """True division (floats), or with rounding_mode "trunc" / "floor" of the quotient."""
        if rounding_mode is None:
            kind = result_type(self, other)
            return self._binary(Ops.FDIV, other, dtype=kind if kind.is_float else dtypes.default_float)
        if rounding_mode == "floor":
            return self.floor_divide(other)
        if rounding_mode == "trunc":
            kind = result_type(self, other)
            return self._binary(Ops.FDIV, other).trunc() if kind.is_float else self._binary(Ops.IDIV, other)
        raise ValueError(f'div: rounding_mode is None, "trunc" or "floor", not {rounding_mode!r}')

    def floor_divide(self: Tensor, other: Any) -> Tensor:
        x, y = self._pair(other)
        if x.dtype.is_float:
            return x._op(Ops.FDIV, None, y).floor()
        q = x._op(Ops.IDIV, None, y)
        if x.dtype.is_unsigned:
            return q
        inexact = (q * y).ne(x) & ((x < 0) ^ (y < 0))
        return inexact.where(q - 1, q)

    def remainder(self: Tensor, other: Any) -> Tensor:
        """x − floor(x / y)·y: the sign of the divisor, as in Python."""
        x, y = self._pair(other)
        return x - x.floor_divide(y) * y

    def fmod(self: Tensor, other: Any) -> Tensor:
        x, y = self._pair(other)
        return x - x._op(Ops.FDIV, None, y).trunc() * y if x.dtype.is_float else x._op(Ops.MOD, None, y)

    def pow(self: Tensor, other: Any) -> Tensor:
        """x ** y; small whole exponents become products."""
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            if other == int(other) and 0 <= other <= 8:
                return self._power_by_products(int(other), result_type(self, other))
            if self.dtype.is_float:
                if other == 0.5:
                    return self.sqrt()
                if other == -0.5:
                    return self.rsqrt()
                if other == int(other) and -8 <= other < 0:
                    return self._power_by_products(-int(other), self.dtype).reciprocal()
        x, y = self._pair(other)
        if not x.dtype.is_float:
            return x._integer_power(y)
        magnitude = (x.abs().log() * y).exp()
        whole = y.trunc().eq(y)
        odd = (y * 0.5).trunc().ne(y * 0.5)
        signed = (x < 0).where(whole.where(odd.where(-magnitude, magnitude), math.nan), magnitude)
        at_zero = (y > 0).where(x._const_like(0.0, x.dtype)._broadcast(x.shape), y.eq(0).where(x._const_like(1.0, x.dtype)._broadcast(x.shape), math.inf))
        return (y.eq(0) | x.eq(1)).where(1.0, x.eq(0).where(at_zero, signed)).cast(x.dtype)

    def _power_by_products(self: Tensor, n: int, dtype: DType) -> Tensor:
        x = self.cast(dtype)
        if n == 0:
            return x.ones_like()
        out: Tensor | None = None
        while n:
            if n & 1:
                out = x if out is None else out * x
            n >>= 1
            x = x * x if n else x
        assert out is not None
        return out

    def _integer_power(self: Tensor, exponent: Tensor) -> Tensor:
        """By squaring, exact modulo 2**bits; a negative exponent gives 0, but ±1 for the bases 1 and −1 (as in PyTorch)."""
        if self.dtype.is_bool:
            return self | exponent.logical_not()
        base, out = self, self.ones_like()
        for bit in range(self.dtype.bits):
            out = (exponent >> bit & 1).bool().where(out * base, out)
            base = base * base
        return out if self.dtype.is_unsigned else ((exponent < 0) & self.abs().ne(1)).where(0, out)

    def neg(self: Tensor) -> Tensor: return self._op(Ops.NEG) if not self.dtype.is_bool else self.logical_not()
    def reciprocal(self: Tensor) -> Tensor: return self._float()._op(Ops.RECIP)
    def sqrt(self: Tensor) -> Tensor: return self._float()._op(Ops.SQRT)
    def rsqrt(self: Tensor) -> Tensor: return self.sqrt().reciprocal()
    def square(self: Tensor) -> Tensor: return self * self
    def exp(self: Tensor) -> Tensor: return self._float()._op(Ops.EXP)
    def exp2(self: Tensor) -> Tensor: return (self._float() * math.log(2)).exp()
    def log(self: Tensor) -> Tensor: return self._float()._op(Ops.LOG)
    def log2(self: Tensor) -> Tensor: return self.log() * (1 / math.log(2))
    def log10(self: Tensor) -> Tensor: return self.log() * (1 / math.log(10))
    def log1p(self: Tensor) -> Tensor:
        """log(1 + x), accurate near 0 (Goldberg's correction)."""
        x = self._float()
        u = x + 1
        return u.eq(1).where(x, u.log() * x / (u - 1)).where_not(u.eq(math.inf), math.inf)

    def where_not(self: Tensor, cond: Tensor, value: Any) -> Tensor:
        """`value` where `cond` holds, else self."""
        return cond.where(value, self)

    def sin(self: Tensor) -> Tensor: return self._float()._op(Ops.SIN)
    def cos(self: Tensor) -> Tensor: return (self._float() + math.pi / 2).sin()
    def tan(self: Tensor) -> Tensor: return self.sin() / self.cos()

    def abs(self: Tensor) -> Tensor:
        if self.dtype.is_unsigned or self.dtype.is_bool:
            return self
        return (self < 0).where(-self, self)

    def sign(self: Tensor) -> Tensor:
        if self.dtype.is_bool:
            return self
        return (self > 0).cast(self.dtype) - (self < 0).cast(self.dtype)

    def trunc(self: Tensor) -> Tensor: return self._op(Ops.TRUNC) if self.dtype.is_float else self

    def floor(self: Tensor) -> Tensor:
        t = self.trunc()
        return (self < t).where(t - 1, t) if self.dtype.is_float else self

    def ceil(self: Tensor) -> Tensor:
        t = self.trunc()
        return (t < self).where(t + 1, t) if self.dtype.is_float else self

    def round(self: Tensor) -> Tensor:
        """To the nearest whole number, halves to even."""
        if not self.dtype.is_float:
            return self
        t = self.trunc()
        away = (self - t).abs()
        odd = (t * 0.5).trunc().ne(t * 0.5)
        up = (away > 0.5) | (away.eq(0.5) & odd)
        return up.where(t + self.sign(), t)

    # *** comparisons and logic ***

    def lt(self: Tensor, other: Any) -> Tensor: return self._binary(Ops.CMPLT, other)
    def gt(self: Tensor, other: Any) -> Tensor: return self._binary(Ops.CMPLT, other, reverse=True)
    def eq(self: Tensor, other: Any) -> Tensor: return self._binary(Ops.CMPEQ, other)
    def ne(self: Tensor, other: Any) -> Tensor: return self._binary(Ops.CMPNE, other)
    def le(self: Tensor, other: Any) -> Tensor:
        kind = result_type(self, other) if not isinstance(other, UOp) else self.dtype
        return self.lt(other) | self.eq(other) if kind.is_float else self.gt(other).logical_not()

    def ge(self: Tensor, other: Any) -> Tensor:
        kind = result_type(self, other) if not isinstance(other, UOp) else self.dtype
        return self.gt(other) | self.eq(other) if kind.is_float else self.lt(other).logical_not()

    def logical_not(self: Tensor) -> Tensor: return self.cast(dtypes.bool)._op(Ops.NOT)
    def isnan(self: Tensor) -> Tensor: return self.ne(self)
    def isinf(self: Tensor) -> Tensor: return self.eq(math.inf) | self.eq(-math.inf) if self.dtype.is_float else self.ne(self)
    def isfinite(self: Tensor) -> Tensor: return (self.isnan() | self.isinf()).logical_not()

    def _bits(self: Tensor, op: Ops, other: Any) -> Tensor:
        x, y = self._pair(other)
        if x.dtype.is_float:
            raise TypeError(f"bitwise {op.name} needs bool or integer operands, not {x.dtype.name}; cast first")
        return x._op(op, None, y)

    def bitwise_and(self: Tensor, other: Any) -> Tensor: return self._bits(Ops.AND, other)
    def bitwise_or(self: Tensor, other: Any) -> Tensor: return self._bits(Ops.OR, other)
    def bitwise_xor(self: Tensor, other: Any) -> Tensor: return self._bits(Ops.XOR, other)
    def lshift(self: Tensor, other: Any) -> Tensor: return self._bits(Ops.SHL, other)
    def rshift(self: Tensor, other: Any) -> Tensor: return self._bits(Ops.SHR, other)
    def bitwise_not(self: Tensor) -> Tensor: return self._op(Ops.NOT)
    def logical_and(self: Tensor, other: Tensor) -> Tensor: return self.bool() & other.bool()
    def logical_or(self: Tensor, other: Tensor) -> Tensor: return self.bool() | other.bool()

    # *** choice ***

    def where(self: Tensor, x: Any, y: Any) -> Tensor:
        """x where self (a condition) holds, else y."""
        from manygrad.tensor.tensor import Tensor

        cond = self.cast(dtypes.bool)
        if isinstance(x, Tensor):
            a, b = x._pair(y)
        elif isinstance(y, Tensor):
            a, b = y._pair(x, reverse=True)
        else:
            first = self._new(UOp.const(dtypes.default_float if isinstance(x, float) or isinstance(y, float) else dtypes.default_int, x))
            a, b = first._pair(y)
        shape = broadcast_shape(cond.shape, a.shape, b.shape)
        cond, a, b = cond._broadcast(shape), a._broadcast(shape), b._broadcast(shape)
        for p, q in ((cond, a), (cond, b), (a, b)):
            if p.uop.device is not None and q.uop.device is not None and p.uop.device != q.uop.device:
                raise ValueError(f"where: operands are on different devices: {_where(p)} and {_where(q)}; move one with .to(...)")
        return cond._op(Ops.WHERE, None, a, b, dtype=a.dtype)

    def masked_fill(self: Tensor, mask: Tensor, value: Any) -> Tensor:
        return mask.where(value, self).cast(self.dtype)

    def maximum(self: Tensor, other: Any) -> Tensor: return self._binary(Ops.MAX, other)

    def minimum(self: Tensor, other: Any) -> Tensor:
        x, y = self._pair(other)
        if x.dtype.is_float:
            return -((-x).maximum(-y))
        return x.bitwise_not().maximum(y.bitwise_not()).bitwise_not()

    def clamp(self: Tensor, min: Any = None, max: Any = None) -> Tensor:
        if min is None and max is None:
            raise ValueError("clamp: give min, max or both")
        out = self
        if min is not None:
            out = out.maximum(min)
        return out.minimum(max) if max is not None else out

    clip = clamp

    def lerp(self: Tensor, end: Tensor, weight: Any) -> Tensor: return self + (end - self) * weight

    # *** Python's operators ***

    def __add__(self: Tensor, o: Any) -> Tensor: return self.add(o)
    def __radd__(self: Tensor, o: Any) -> Tensor: return self._binary(Ops.ADD, o, reverse=True)
    def __sub__(self: Tensor, o: Any) -> Tensor: return self.sub(o)
    def __rsub__(self: Tensor, o: Any) -> Tensor: return self._binary(Ops.SUB, o, reverse=True)
    def __mul__(self: Tensor, o: Any) -> Tensor: return self.mul(o)
    def __rmul__(self: Tensor, o: Any) -> Tensor: return self._binary(Ops.MUL, o, reverse=True)
    def __truediv__(self: Tensor, o: Any) -> Tensor: return self.div(o)

    def __rtruediv__(self: Tensor, o: Any) -> Tensor:
        kind = result_type(self, o)
        return self._binary(Ops.FDIV, o, reverse=True, dtype=kind if kind.is_float else dtypes.default_float)

    def __floordiv__(self: Tensor, o: Any) -> Tensor: return self.floor_divide(o)
    def __mod__(self: Tensor, o: Any) -> Tensor: return self.remainder(o)

    def __rfloordiv__(self: Tensor, o: Any) -> Tensor:
        x, y = self._pair(o, reverse=True)
        return x.floor_divide(y)

    def __rmod__(self: Tensor, o: Any) -> Tensor:
        x, y = self._pair(o, reverse=True)
        return x.remainder(y)

    def __pow__(self: Tensor, o: Any) -> Tensor: return self.pow(o)

    def __rpow__(self: Tensor, o: Any) -> Tensor:
        x, y = self._pair(o, reverse=True)
        return x.pow(y)

    def __neg__(self: Tensor) -> Tensor: return self.neg()
    def __pos__(self: Tensor) -> Tensor: return self
    def __abs__(self: Tensor) -> Tensor: return self.abs()
    def __invert__(self: Tensor) -> Tensor: return self.bitwise_not()
    def __and__(self: Tensor, o: Any) -> Tensor: return self.bitwise_and(o)
    def __or__(self: Tensor, o: Any) -> Tensor: return self.bitwise_or(o)
    def __xor__(self: Tensor, o: Any) -> Tensor: return self.bitwise_xor(o)
    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__
    def __lshift__(self: Tensor, o: Any) -> Tensor: return self.lshift(o)
    def __rshift__(self: Tensor, o: Any) -> Tensor: return self.rshift(o)
    def __lt__(self: Tensor, o: Any) -> Tensor: return self.lt(o)
    def __gt__(self: Tensor, o: Any) -> Tensor: return self.gt(o)
    def __le__(self: Tensor, o: Any) -> Tensor: return self.le(o)
    def __ge__(self: Tensor, o: Any) -> Tensor: return self.ge(o)
    def __eq__(self: Tensor, o: Any) -> Tensor: return self.eq(o)
    def __ne__(self: Tensor, o: Any) -> Tensor: return self.ne(o)
    __hash__ = object.__hash__

    def __iadd__(self: Tensor, o: Any) -> Tensor: return self.assign(self.add(o))
    def __isub__(self: Tensor, o: Any) -> Tensor: return self.assign(self.sub(o))
    def __imul__(self: Tensor, o: Any) -> Tensor: return self.assign(self.mul(o))
    def __itruediv__(self: Tensor, o: Any) -> Tensor: return self.assign(self.div(o))


def _where(t: Tensor) -> str:
    d = t.uop.device
    return f"{t.shape} on {d if isinstance(d, str) or d is None or len(d) <= 4 else f'{len(d)} devices {d[0]}..{d[-1]}'}"
