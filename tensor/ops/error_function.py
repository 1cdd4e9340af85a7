"""erf, erfc and erfinv, to a few units in the last place.

For |x| < 1, erf(x) = x·p(x²). Beyond, erfc(x) = exp(−x²)·p((4 − x) / (4 + x)) / (1 + 2x). The polynomials are Chebyshev
expansions of these quotients, turned into powers (the highest first). Where the digits of a small erfc(x) do not count,
that of float32 is exp(p(x)).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.elementary import elementary, polynomial
from manygrad.tensor.ops.representation import bits_of, magnitude

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

ERF64 = (-4.23203767648745923e-12, 8.70975523285178972e-11, -1.21647643372245056e-9, 1.4792435426962471e-8,
    -1.63646458548163877e-7, 1.64620457110130252e-6, -0.000014925647581008593, 0.000120553329033506683,
    -0.000854832702194542732, 0.00522397762542345435, -0.0268661706451298545, 0.112837916709551203,
    -0.376126389031837524, 1.12837916709551257)  # fmt: skip
ERF32 = (7.88249711e-5, -0.0008018854993, 0.005189311943, -0.0268543288, 0.1128359746, -0.376126269, 1.128379166)
ERFC64 = (1.37691302114768664e-10, -2.66066846372743034e-10, -1.79169803205125789e-9, 3.17021051568489265e-9,
    1.47131710326809792e-8, -2.05622300675668165e-8, -1.10102910215591507e-7, 7.74722268844304981e-8,
    8.24925245547330596e-7, 2.91971223313512924e-7, -5.70920956377700247e-6, -0.0000112212857327027892,
    0.0000243989460850263344, 0.000150621489497759425, 0.000199256775311129242, -0.000757773261237407387,
    -0.00503196999258350221, -0.0161977340598218432, -0.0371675155359392825, -0.0663303658121847715,
    -0.0937328349984376003, -0.101039066036300665, -0.0680970542546904113, 0.0153796521026196061, 0.139621116840562497,
    1.23299511862555251)  # fmt: skip
ERFC32 = (0.0002484367303, -0.0003665082687, -0.005082269578, -0.01661584457, -0.03714045869, -0.06611917979,
    -0.0937402055, -0.101087784, -0.06809617491, 0.01538378385, 0.1396210865, 1.232995062)  # fmt: skip
# first guesses of erfinv(x) / x in w = −log(1 − x²): powers of w − 2.5 below 5, of √w − 3 beyond (Giles 2010)
ERFINV_MIDDLE = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
ERFINV_TAIL = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)
NORMAL_TAIL32 = (
    -1.040805497e-6,
    1.696480668e-5,
    -8.396896894e-5,
    -1.933283841e-4,
    0.005010251435,
    -0.0364567652,
    -0.3182790381,
    -0.7978874522,
    -0.693147138,
)
FAR = 10.0
SLOPE = 2 / math.sqrt(math.pi)


def _is_wide(x: Tensor) -> bool:
    return x.dtype is dtypes.float64


def normal_tail(a: Tensor) -> Tensor:
    """Φ(−a), of the normal distribution, in float32 for 0 <= a < FAR; beyond, exp would underflow, which is slow.

    exp of a polynomial, fitted such that up to 6 the error is at most 2e-8 or 0.003 of the result;
    further out it falls as far as it should.
    """
    return polynomial(a, NORMAL_TAIL32).exp()


def _erf_near(x: Tensor) -> Tensor:
    return x * polynomial(x * x, ERF64 if _is_wide(x) else ERF32)


def _erfc_far(a: Tensor, exact: bool = True) -> Tensor:
    """erfc(a) for a >= 0. `exact`: of small results every digit: a² is split,
    as its rounding error is magnified by exp."""
    if not exact and not _is_wide(a):
        return 2 * normal_tail(a * math.sqrt(2))
    if exact:
        a = a.minimum(28.0 if _is_wide(a) else 11.0)
        decay = exp_of_square(a, -1)
    else:
        decay = (-a * a).exp()
    return decay * scaled_tail(a)


def exp_of_square(a: Tensor, sign: int) -> Tensor:
    """exp(sign · a²), a² in two parts."""
    dropped = 27 if _is_wide(a) else 12
    short = ((bits_of(a) >> dropped) << dropped).bitcast(a.dtype)
    return (sign * short * short).exp() * (sign * (a - short) * (a + short)).exp()


def scaled_tail(a: Tensor) -> Tensor:
    """exp(a²) · erfc(a) for a >= 0."""
    return polynomial((4 - a) / (4 + a), ERFC64 if _is_wide(a) else ERFC32) / (2 * a + 1)


class ErrorFunctionMixin:
    @elementary(lambda x: SLOPE * (-x * x).exp())
    def erf(self: Tensor) -> Tensor:
        """2/√π ∫₀ˣ exp(−t²) dt."""
        a = magnitude(self).clamp(max=6.0)  # erf is 1 from there on; further out exp would underflow, which is slow
        return (a < 1)._where(_erf_near(a), 1 - _erfc_far(a, exact=False)).copysign(self)

    @elementary(lambda x: -SLOPE * (-x * x).exp())
    def erfc(self: Tensor) -> Tensor:
        """1 − erf(x), with all its digits where it is small."""
        a = self.abs()
        far = _erfc_far(a)
        return (a < 0.5)._where(1 - _erf_near(self.clamp(-1, 1)), (self < 0)._where(2 - far, far))

    @elementary(lambda x: (x.erfinv().square()).exp() / SLOPE)
    def erfinv(self: Tensor) -> Tensor:
        """The y with erf(y) = x: a polynomial, in float64 corrected three times by Halley's method;
        ±inf at ±1, NaN beyond."""
        a = self.abs()
        w = -((1 - a) * (1 + a)).log()
        tail = w >= 5
        y = a * tail._where(polynomial(tail._where(w, 5.0).sqrt() - 3, ERFINV_TAIL), polynomial(w - 2.5, ERFINV_MIDDLE))
        if _is_wide(self):
            for _ in range(3):
                error = (a < 0.5)._where(_erf_near(y) - a, (1 - a) - _erfc_far(y))
                step = error / (SLOPE * (-y * y).exp())
                y = y - step / (1 + y * step)
        return a.eq(1)._where(math.inf, y).copysign(self).where_not(a > 1, math.nan)
