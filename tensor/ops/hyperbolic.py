"""Hyperbolic functions and their inverses, to full precision near 0 and without overflow before the result does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.elementary import elementary, polynomial

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

# tanh(x) = x + x·z·p(z)/q(z) for z = x², |x| < 0.625 (Cephes)
TANH_32 = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
TANH_P = (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
TANH_Q = (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)


class HyperbolicMixin:
    @elementary(lambda x: 1 - x.tanh().square())
    def tanh(self: Tensor) -> Tensor:
        near = self.clamp(-0.625, 0.625)
        z = near * near
        p = polynomial(z, TANH_P) / polynomial(z, TANH_Q) if self.dtype is dtypes.float64 else polynomial(z, TANH_32)
        # -1 from there on; further out exp would underflow, which is slow
        far = 1 - 2 / ((self.maximum(-20.0) * 2).exp() + 1)
        return (self.abs() < 0.625)._where(near * (z * p + 1), far)

    @elementary(lambda x: x.cosh())
    def sinh(self: Tensor) -> Tensor:
        a = self.abs()
        u, half = a.clamp(max=30).expm1(), (a * 0.5).exp()
        return (a < 30)._where((u + u / (u + 1)) * 0.5, half * 0.5 * half).copysign(self)

    @elementary(lambda x: x.sinh())
    def cosh(self: Tensor) -> Tensor:
        a = self.abs()
        e, half = a.clamp(max=30).exp(), (a * 0.5).exp()
        return (a < 30)._where((e + 1 / e) * 0.5, half * 0.5 * half)

    @elementary(lambda x: (x * x + 1).rsqrt())
    def asinh(self: Tensor) -> Tensor:
        a = self.abs()
        near = a.clamp(max=1e6)
        return (
            (a > 1e6)
            ._where(a.log() + math.log(2), (near + near * near / ((near * near + 1).sqrt() + 1)).log1p())
            .copysign(self)
        )

    @elementary(lambda x: (x - 1).rsqrt() * (x + 1).rsqrt())
    def acosh(self: Tensor) -> Tensor:
        t = self.clamp(max=1e6) - 1
        return (self < 1)._where(
            math.nan, (self > 1e6)._where(self.log() + math.log(2), (t + (t * (t + 2)).sqrt()).log1p())
        )

    @elementary(lambda x: ((1 - x) * (1 + x)).reciprocal())
    def atanh(self: Tensor) -> Tensor:
        a = self.abs()
        return (0.5 * (2 * a / (1 - a)).log1p()).copysign(self)

    arcsinh, arccosh, arctanh = asinh, acosh, atanh
