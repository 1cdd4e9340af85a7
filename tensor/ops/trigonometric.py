"""Sines, cosines, their inverses, angles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.elementary import elementary, polynomial, with_gradient
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

# In z = x²: asin(x) = x + x·z·p(z)/q(z) for |x| <= ½ and atan(x) = x + x·z·p(z)/q(z) for |x| below 0.66. Float32
# coefficients and the float64 ones of atan are of Cephes, those of asin of FDLIBM.
ASIN_32 = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
ASIN_P = (3.47933107596021167570e-05, 7.91534994289814532176e-04, -4.00555345006794114027e-02,
          2.01212532134862925881e-01, -3.25565818622400915405e-01, 1.66666666666666657415e-01)  # fmt: skip
ASIN_Q = (
    7.70381505559019352791e-02,
    -6.88283971605453293030e-01,
    2.02094576023350569471e00,
    -2.40339491173441421878e00,
    1.0,
)
ATAN_32 = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
ATAN_P = (
    -8.750608600031904122785e-1,
    -1.615753718733365076637e1,
    -7.500855792314704667340e1,
    -1.228866684490136173410e2,
    -6.485021904942025371773e1,
)
ATAN_Q = (
    1.0,
    2.485846490142306297962e1,
    1.650270098316988542046e2,
    4.328810604912902668951e2,
    4.853903996359136964868e2,
    1.945506571482613964425e2,
)
# π / 2 in parts (the float64 ones are FDLIBM's); k times all but the last is exact for |x| up to the limit.
HALF_PI_32, TAN_LIMIT_32 = (
    (1.5703125, 4.837512969970703e-4, 7.549533620476723e-8, 2.5633440682570896e-12),
    8192.0,
)
HALF_PI_64, TAN_LIMIT_64 = (
    (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21),
    float(2**19),
)


def _asin_of_small(x: Tensor) -> Tensor:
    z = x * x
    return x + x * z * (
        polynomial(z, ASIN_P) / polynomial(z, ASIN_Q) if x.dtype is dtypes.float64 else polynomial(z, ASIN_32)
    )


class TrigonometricMixin:
    def sin(self: Tensor) -> Tensor:
        return self._float()._op(Ops.SIN)

    @elementary(lambda x: -x.sin())
    def cos(self: Tensor) -> Tensor:
        """1 − 2 sin²(x / 2): exact halving keeps the argument, however large."""
        half = (self * 0.5).sin()
        return 1 - 2 * (half * half)

    @elementary(lambda x: x.tan().square() + 1)
    def tan(self: Tensor) -> Tensor:
        """The tangent of the distance to the nearest multiple k of π / 2, which is subtracted in parts so short that k
        times each is exact: sin / cos has the cosine's error near its zeros. Far out it is that quotient."""
        limit, parts = (TAN_LIMIT_64, HALF_PI_64) if self.dtype is dtypes.float64 else (TAN_LIMIT_32, HALF_PI_32)
        far = self.abs() > limit
        near = far._where(0.0, self)
        k = (near * (2 / math.pi)).round()
        rest = near
        for part in parts:
            rest = rest - k * part
        half = (rest * 0.5).sin()
        sine, cosine = rest.sin(), 1 - 2 * (half * half)
        odd = (k - (k * 0.5).floor() * 2).ne(0)
        out = odd._where(-cosine, sine) / odd._where(sine, cosine)
        return far._where(self.sin() / self.cos(), k.eq(0)._where(out.copysign(self), out))

    @elementary(lambda x: ((1 - x) * (1 + x)).rsqrt())
    def asin(self: Tensor) -> Tensor:
        a = self.abs()
        large = a > 0.5
        part = _asin_of_small(large._where(((1 - a) * 0.5).sqrt(), a))
        return large._where(math.pi / 2 - 2 * part, part).copysign(self)

    @elementary(lambda x: -((1 - x) * (1 + x)).rsqrt())
    def acos(self: Tensor) -> Tensor:
        a = self.abs()
        large = a > 0.5
        part = _asin_of_small(large._where(((1 - a) * 0.5).sqrt(), self))
        return large._where((self > 0)._where(2 * part, math.pi - 2 * part), math.pi / 2 - part)

    @elementary(lambda x: (x * x + 1).reciprocal())
    def atan(self: Tensor) -> Tensor:
        a = self.abs()
        far, middle = (
            a > math.tan(3 * math.pi / 8),
            a > (0.66 if self.dtype is dtypes.float64 else math.tan(math.pi / 8)),
        )
        x = far._where(-1 / a, middle._where((a - 1) / (a + 1), a))
        z = x * x
        p = polynomial(z, ATAN_P) / polynomial(z, ATAN_Q) if self.dtype is dtypes.float64 else polynomial(z, ATAN_32)
        turn = x + x * z * p
        return far._where(turn + math.pi / 2, middle._where(turn + math.pi / 4, turn)).copysign(self)

    def atan2(self: Tensor, other: Tensor) -> Tensor:
        """The angle of the point (other, self) from the x axis, in [−π, π]."""
        y, x, kind = self._wide_floats(other)
        a, b = y.abs(), x.abs()
        low, high = a.minimum(b), a.maximum(b)
        ratio = high.eq(low)._where(high.eq(0)._where(0.0, 1.0).cast(y.dtype), low / high)
        angle = ratio.atan()
        angle = (a > b)._where(math.pi / 2 - angle, angle)
        out = x.signbit()._where(math.pi - angle, angle).copysign(y).where_not(x.isnan() | y.isnan(), math.nan)

        def backward(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            square = x * x + y * y
            g = square.eq(0)._where(0.0, g / square)
            return g * x, -g * y

        return with_gradient(out, "atan2", None, backward, y, x).cast(kind)

    def hypot(self: Tensor, other: Tensor) -> Tensor:
        """√(x² + y²) without overflow of the squares; of an infinity and NaN the infinity."""
        x, y, kind = self._wide_floats(other)
        a, b = x.abs(), y.abs()
        low, high = a.minimum(b), a.maximum(b)
        ratio = high.eq(0)._where(0.0, low / high)
        out = (a.eq(math.inf) | b.eq(math.inf))._where(math.inf, high * (ratio * ratio + 1).sqrt())

        def backward(g: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = x.hypot(y)
            g = h.eq(0)._where(0.0, g / h)
            return g * x, g * y

        return with_gradient(out, "hypot", None, backward, x, y).cast(kind)

    @elementary(
        lambda x: x.eq(0)._where(0.0, ((x * math.pi).cos() * (x * math.pi) - (x * math.pi).sin()) / (x * x * math.pi))
    )
    def sinc(self: Tensor) -> Tensor:
        """sin(πx) / (πx), 1 at 0."""
        t = self * math.pi
        return t.eq(0)._where(1.0, t.sin() / t)

    def deg2rad(self: Tensor) -> Tensor:
        return self._float() * (math.pi / 180)

    def rad2deg(self: Tensor) -> Tensor:
        return self._float() * (180 / math.pi)

    def angle(self: Tensor) -> Tensor:
        """π where negative, else 0; NaN where NaN."""
        x = self._float()
        return x.isnan()._where(x, (x < 0)._where(math.pi, x._const_like(0.0, x.dtype)))

    arcsin, arccos, arctan, arctan2 = asin, acos, atan, atan2
