"""The parts of a floating-point number: sign, exponent, mantissa, neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.gradient import FLAT, NoGradient
from manygrad.tensor.ops.elementary import with_gradient

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

INT = {2: dtypes.int16, 4: dtypes.int32, 8: dtypes.int64}
FRACTION_BITS = {dtypes.float16: 10, dtypes.bfloat16: 7, dtypes.float32: 23, dtypes.float64: 52}


class MantissaAndExponent(NamedTuple):
    mantissa: Tensor
    exponent: Tensor


def bits_of(x: Tensor) -> Tensor:
    """The bits of a float tensor as signed integers of its width."""
    return x.detach().bitcast(INT[x.dtype.itemsize])


def magnitude(x: Tensor) -> Tensor:
    """|x|, of NaN too, by its bits; the gradient is that of x, or of −x where the sign is minus, at ±0 too: what is the
    same of x and −x has the derivatives of the half where x lies."""
    out = (bits_of(x) & int(INT[x.dtype.itemsize].max)).bitcast(x.dtype)
    return with_gradient(out, "magnitude", None, lambda g, x: (x.signbit()._where(-g, g),), x)


def exponent_bias(d: DType) -> int:
    return (1 << (d.itemsize * 8 - 2 - FRACTION_BITS[d])) - 1


def power_of_two(n: Tensor, d: DType) -> Tensor:
    """2 ** n in type `d` for integers n of a normal number."""
    return ((n + exponent_bias(d)).cast(INT[d.itemsize]) << FRACTION_BITS[d]).bitcast(d)


def times_power_of_two(x: Tensor, n: Tensor) -> Tensor:
    """x · 2 ** n in two steps, so that neither factor leaves the normal numbers; n may be up to twice their range."""
    n = n.clamp(-2 * exponent_bias(x.dtype), 2 * exponent_bias(x.dtype))
    half = n >> 1
    return x * power_of_two(half, x.dtype) * power_of_two(n - half, x.dtype)


def mantissa_and_exponent(x: Tensor) -> tuple[Tensor, Tensor]:
    """|x| = m · 2 ** e with m in [√½, √2) and a float e, for positive finite x (denormals too)."""
    d, width = x.dtype, FRACTION_BITS[x.dtype]
    tiny = x.abs() < 2.0 ** (2 - exponent_bias(d))
    bits = bits_of(tiny._where(x * 2.0 ** (width + 1), x))
    field = (bits >> width) & ((1 << (d.itemsize * 8 - 1 - width)) - 1)
    m = ((bits & ((1 << width) - 1)) | (exponent_bias(d) << width)).bitcast(d)
    large = m > 2**0.5
    e = field - exponent_bias(d) - tiny._where(width + 1, 0).cast(field.dtype) + large.cast(field.dtype)
    return large._where(m * 0.5, m), e.cast(d)


class RepresentationMixin:
    def signbit(self: Tensor) -> Tensor:
        """Whether the sign is minus: that of −0.0 too."""
        return bits_of(self) < 0 if self.dtype.is_float else self < 0

    def copysign(self: Tensor, other: Any) -> Tensor:
        """|x| with the sign of `other` (of −0.0 too); the gradient to `other` is 0."""
        x, y = self._floats(other)
        out = (bits_of(magnitude(x)) | (bits_of(y) & int(INT[y.dtype.itemsize].min))).bitcast(x.dtype)
        return with_gradient(
            out,
            "copysign",
            None,
            lambda g, x, y: (x.eq(0)._where(0.0, x.signbit().eq(y.signbit())._where(g, -g)), FLAT),
            x,
            y,
        )

    def ldexp(self: Tensor, other: Tensor) -> Tensor:
        """x · 2 ** other."""
        return self * other.exp2()

    def frexp(self: Tensor) -> MantissaAndExponent:
        """(mantissa, exponent): x = mantissa · 2 ** exponent, |mantissa| in [0.5, 1), the exponent int32; 0, inf and
        NaN have exponent 0. The exponent counts as constant in the gradient."""
        if not self.dtype.is_float:
            raise TypeError(f"frexp needs a float tensor, not {self.dtype.name}; cast with .float() first")
        x = self.cast(dtypes.float32) if self.dtype.is_half else self
        m, e = mantissa_and_exponent(x.abs())
        below = m < 1
        usual = x.ne(0) & x.isfinite()
        exponent = usual._where(below._where(e, e + 1), 0).cast(dtypes.int32)
        m = below._where(m, m * 0.5)
        mantissa = usual._where(m.copysign(x), x).cast(self.dtype)

        def backward(g: Tensor, x: Tensor) -> tuple[Tensor]:
            return (g * (-x.frexp().exponent).cast(g.dtype).exp2(),)

        return MantissaAndExponent(with_gradient(mantissa, "frexp", (), backward, self), exponent)

    def nextafter(self: Tensor, other: Tensor) -> Tensor:
        """The neighbour of x towards `other` among the numbers of their type."""
        x, y = self._floats(other)
        bits = bits_of(x)
        outward = (x < y).eq(x > 0)
        smallest = (bits_of(y) < 0)._where(int(bits.dtype.min) + 1, 1).cast(bits.dtype).bitcast(x.dtype)
        moved = x.eq(0)._where(smallest, (bits + outward._where(1, -1).cast(bits.dtype)).bitcast(x.dtype))
        out = (x.isnan() | y.isnan())._where(float("nan"), x.eq(y)._where(y, moved))
        unknown = NoGradient("nextafter() has no gradient")
        return with_gradient(out, "nextafter", None, lambda g, x, y: (unknown, unknown), x, y)
