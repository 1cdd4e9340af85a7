"""EXP, LOG and SIN as polynomials that vectorise: at most 2 ulp in float32, about 1e-15 relative in float64.

Over the full range, with infinities, NaN and denormals. Sources of the kernels: Cephes (float32; EXP's polynomials are
our own), FDLIBM (float64, Sun Microsystems 1993). The range reduction of SIN is by Cody and Waite for moderate
arguments; for large ones, in a branch, the product x * 2/pi is formed exactly, 24 bits of 2/pi at a time, and its
multiples of 4 are dropped (after Payne and Hanek).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.serial import register
from manygrad.tensor.uop.uop import UOp

f32, f64 = dtypes.float32, dtypes.float64
INT = {f32: dtypes.int32, f64: dtypes.int64}
FRACTION_BITS = {f32: 23, f64: 52}
BIAS = {f32: 127, f64: 1023}


def c(d: DType, v: Any) -> UOp:
    return UOp.const(d, v)


def add(a: UOp, b: UOp | float) -> UOp:
    return a.alu(Ops.ADD, b if isinstance(b, UOp) else c(a.dtype, b))


def sub(a: UOp, b: UOp | float) -> UOp:
    return a.alu(Ops.SUB, b if isinstance(b, UOp) else c(a.dtype, b))


def mul(a: UOp, b: UOp | float) -> UOp:
    return a.alu(Ops.MUL, b if isinstance(b, UOp) else c(a.dtype, b))


def less(a: UOp, b: UOp | float) -> UOp:
    return a.alu(Ops.CMPLT, b if isinstance(b, UOp) else c(a.dtype, b))


def where(condition: UOp, a: UOp | float, b: UOp | float) -> UOp:
    d = a.dtype if isinstance(a, UOp) else b.dtype  # type: ignore[union-attr]
    return condition.alu(Ops.WHERE, a if isinstance(a, UOp) else c(d, a), b if isinstance(b, UOp) else c(d, b))


def fma(a: UOp, b: UOp | float, addend: UOp | float) -> UOp:
    return a.alu(Ops.FMA, *(x if isinstance(x, UOp) else c(a.dtype, x) for x in (b, addend)))


def polynomial(x: UOp, *coefficients: float) -> UOp:
    """The highest power first."""
    total = c(x.dtype, coefficients[0])
    for k in coefficients[1:]:
        total = fma(x, total, k)
    return total


def power_of_two(n: UOp, d: DType) -> UOp:
    """2**n for integers n of a normal float."""
    shift = c(n.dtype, FRACTION_BITS[d])
    return add(n, BIAS[d]).alu(Ops.SHL, shift).bitcast(d)


def nearest(x: UOp, factor: float) -> tuple[UOp, UOp]:
    """x * factor rounded to an integer, as float and as integer; right for results under 2**22 (2**51)."""
    magic = 1.5 * 2.0 ** FRACTION_BITS[x.dtype]
    shifted = fma(x, factor, magic)
    integer = sub(shifted.bitcast(INT[x.dtype]), c(x.dtype, magic).bitcast(INT[x.dtype]))
    return sub(shifted, magic), integer


STEPS = 32  # of exp's table in one power of two: two registers


@register
class Lookup(NamedTuple):
    """The arg of a CUSTOM that chooses one of `values` by the lowest bits of its source."""

    values: tuple[float, ...]


def exp_by_table(x: UOp) -> UOp:
    """2**k * e**r: k, a multiple of 1/32, has its fraction looked up, its integer part scales.

    Where x is not finite, or so large that k is not the nearest, r may be anything; within its bounds it does no harm,
    as k decides then.
    """
    magic = 1.5 * 2.0 ** FRACTION_BITS[f32] / STEPS  # sums with it are rounded to steps, counted in the lowest bits
    shifted = fma(x, math.log2(math.e), magic)
    k = sub(shifted, magic)
    r = fma(k, 2.12194440e-4, fma(k, -0.693359375, x))
    r = UOp(Ops.CUSTOM, f32, (r, c(f32, 0.25)), "within")
    power = UOp(Ops.CUSTOM, f32, (shifted,), Lookup(tuple(2.0 ** (i / STEPS) for i in range(STEPS))))
    # (e**r - 1) / r with the least error of e**r, 5e-8, where |r| <= ln(2) / 64
    found = UOp(Ops.CUSTOM, f32, (fma(mul(power, r), fma(r, 0.5, 1.0000146622), power), k), "scale")
    return where(less(x, -104.0), 0.0, found)  # scaling as far down takes forty times as long


def exp(x: UOp, scales: bool = False) -> UOp:
    """`scales`: the machine looks up in registers, and multiplies by a power of two in one instruction instead of
    nine."""
    d = x.dtype
    if scales and d is f32:
        return exp_by_table(x)
    lo, hi = (-104.0, 89.0) if d is f32 else (-746.0, 710.0)
    clamped = where(less(c(d, hi), x), hi, x)
    clamped = where(less(clamped, lo), lo, clamped)
    n, k = nearest(clamped, math.log2(math.e))
    if d is f32:
        r = fma(n, 2.12194440e-4, fma(n, -0.693359375, clamped))
        # (e**r - 1 - r) / r**2 with the least relative error of e**r, 3e-9, where |r| <= ln(2) / 2
        tail = polynomial(r, 1.3814539881e-3, 8.3687451271e-3, 4.1668390790e-2, 1.6666520399e-1, 4.9999993432e-1)
    else:
        r = fma(n, -1.90821492927058770002e-10, fma(n, -6.93147180369123816490e-01, clamped))
        tail = polynomial(r, *(1.0 / math.factorial(i) for i in range(13, 1, -1)))
    p = fma(r, fma(r, tail, 1.0), 1.0)
    return scaled(p, n, k, scales)


def scaled(p: UOp, n: UOp, k: UOp, scales: bool) -> UOp:
    """p * 2**n, where k is n as an integer."""
    if scales:
        return UOp(Ops.CUSTOM, p.dtype, (p, n), "scale")
    half = k.alu(Ops.SHR, c(k.dtype, 1))  # in two steps, so that results may overflow or be denormal
    return mul(mul(p, power_of_two(half, p.dtype)), power_of_two(sub(k, half), p.dtype))


def split(x: UOp) -> tuple[UOp, UOp]:
    """(m, k), m in [sqrt(1/2), sqrt(2)), with x = m * 2**k of a positive, finite x."""
    d, i = x.dtype, INT[x.dtype]
    bits = FRACTION_BITS[d]
    tiny = less(x, 2.0 ** (1 - BIAS[d]))
    normal = where(tiny, mul(x, 2.0**bits), x)
    offset = add(normal.bitcast(i), -int(_bits(math.sqrt(0.5), d)))
    k = add(offset.alu(Ops.SHR, c(i, bits)), where(tiny, c(i, -bits), c(i, 0)))
    m = add(offset.alu(Ops.AND, c(i, (1 << bits) - 1)), int(_bits(math.sqrt(0.5), d))).bitcast(d)
    return m, k.cast(d)


def log(x: UOp) -> UOp:
    d = x.dtype
    m, n = split(x)
    f = sub(m, 1.0)
    if d is f32:
        p = polynomial(
            f,
            7.0376836292e-2,
            -1.1514610310e-1,
            1.1676998740e-1,
            -1.2420140846e-1,
            1.4249322787e-1,
            -1.6668057665e-1,
            2.0000714765e-1,
            -2.4999993993e-1,
            3.3333331174e-1,
        )
        z = mul(f, f)
        y = fma(n, -2.12194440e-4, mul(mul(f, z), p))
        found = fma(n, 0.693359375, add(f, fma(z, -0.5, y)))
    else:
        s = f.alu(Ops.FDIV, add(f, 2.0))
        z = mul(s, s)
        r = mul(
            z,
            polynomial(
                z,
                1.479819860511658591e-01,
                1.531383769920937332e-01,
                1.818357216161805012e-01,
                2.222219843214978396e-01,
                2.857142874366239149e-01,
                3.999999999940941908e-01,
                6.666666666666735130e-01,
            ),
        )
        half_square = mul(mul(f, f), 0.5)
        low = fma(s, add(half_square, r), mul(n, 1.90821492927058770002e-10))
        found = sub(mul(n, 6.93147180369123816490e-01), sub(sub(half_square, low), f))
    found = where(x.alu(Ops.CMPEQ, c(d, math.inf)), math.inf, found)
    found = where(x.alu(Ops.CMPEQ, c(d, 0.0)), -math.inf, found)
    return where(less(x, 0.0), math.nan, where(x.alu(Ops.CMPNE, x), x, found))


def _bits(value: float, d: DType) -> Any:
    return d.np.type(value).view(INT[d].np)


TWO_OVER_PI = int(
    "A2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A424DD2E006492EEA09D1921CFE1D"
    "EB1CB129A73EE88235F52EBB4484E99C7026B45F7E413991D639835339F49C845F8BBDF9283B1FF897FFDE05980FEF2F118B"
    "5A0A6D1F6D367ECF27CB09B74F463F669E5FEA2D7527BAC7EBE5F17B3D0739F78A5292EA6BFB5FB11F8D5D08",
    16,
)
TWO_OVER_PI_BITS = 1152
PI_OVER_2 = {  # as a sum
    f32: (1.57079637050628662109375, -4.37113882867379149e-8, -1.71512451306160767e-15),
    f64: (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33),
}
MODERATE = {f32: 2.0**16, f64: 2.0**28}  # up to here the products of n and what pi/2 is a sum of lose nothing
SELDOM = "seldom"


def _round(x: UOp) -> UOp:
    """To the nearest integer; exact for every magnitude (a float from 2**52 on is one)."""
    return UOp(Ops.CUSTOM, x.dtype, (x,), "round")


def _quadrant_of_large(x: UOp, significant_bits: int) -> tuple[UOp, UOp, UOp]:
    """(n, f, g) with x * 2/pi = n + f + g up to a multiple of 4, |f| <= 1/2, g tiny; x float64 of up to
    `significant_bits`."""
    parts = [(x, c(dtypes.bool, False))]
    highest, twice = 128, significant_bits > 24
    if twice:
        highest = 1024
        large = less(c(f64, 2.0**500), x)
        x = where(large, mul(x, 2.0**-600), x)
        upper = x.bitcast(dtypes.int64).alu(Ops.AND, c(dtypes.int64, -(1 << 27))).bitcast(f64)
        parts = [(upper, large), (sub(x, upper), large)]
    n, f, g = c(f64, 0.0), c(f64, 0.0), c(f64, 0.0)
    for i in range((highest + 100) // 24 + 1):
        chunk = (TWO_OVER_PI >> (TWO_OVER_PI_BITS - 24 * (i + 1))) & 0xFFFFFF
        for part, large in parts:
            k = c(f64, math.ldexp(chunk, -24 * (i + 1)))
            if twice:
                k = where(large, c(f64, math.ldexp(chunk, 600 - 24 * (i + 1))), k)
            p = mul(part, k)  # exact: 24 bits by at most 27
            t = fma(_round(mul(p, 0.25)), -4.0, p)
            total = add(f, t)
            if twice:  # what the sum loses (Knuth)
                back = sub(total, f)
                g = add(g, add(sub(f, sub(total, back)), sub(t, back)))
            whole = _round(total)
            n, f = add(n, whole), sub(total, whole)
    return n, f, g


def sin(x: UOp) -> UOp:
    d = x.dtype
    mask = c(INT[d], int(_bits(math.inf, d)) | ((1 << FRACTION_BITS[d]) - 1))
    magnitude = x.bitcast(INT[d]).alu(Ops.AND, mask).bitcast(d)
    return seldom(less(c(d, MODERATE[d]), magnitude), _sin_of_moderate(x), x, _sin_of_large(x))


def seldom(condition: UOp, usual: UOp, x: UOp, unusual: UOp) -> UOp:
    """`where(condition, unusual, usual)`. What is `unusual`, made of `x` alone, is computed only where a lane needs
    it."""
    return UOp(Ops.CUSTOM, usual.dtype, (condition, usual, x, unusual), SELDOM)


def _sin_of_moderate(x: UOp) -> UOp:
    """r = x - n * pi/2 in extended precision."""
    d = x.dtype
    n, k = nearest(x, 2.0 / math.pi)
    r = x
    for part in PI_OVER_2[d]:
        r = fma(n, -part, r)
    return where(x.alu(Ops.CMPEQ, c(d, 0.0)), x, _sin_in_quadrant(r, k))  # -0.0


def _sin_of_large(x: UOp) -> UOp:
    d, wide = x.dtype, x.cast(f64)
    negative = less(wide, 0.0)
    a = where(negative, wide.alu(Ops.NEG), wide)
    n, f, g = _quadrant_of_large(a, 24 if d is f32 else 53)
    half_pi = PI_OVER_2[f64]
    r = fma(f, half_pi[0], fma(f, half_pi[1], mul(g, half_pi[0])))
    found = _sin_in_quadrant(r.cast(d), n.cast(INT[d]))
    found = where(negative, found.alu(Ops.NEG), found)
    return where(a.alu(Ops.CMPEQ, c(f64, math.inf)), math.nan, found)


def _sin_in_quadrant(r: UOp, k: UOp) -> UOp:
    """sin(r + k * pi/2), |r| <= pi/4 or little more."""
    d, i = r.dtype, k.dtype
    z = mul(r, r)
    if d is f32:
        s = fma(mul(r, z), polynomial(z, -1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1), r)
        even = polynomial(z, 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
    else:
        s = fma(
            mul(r, z),
            polynomial(
                z,
                1.58969099521155010221e-10,
                -2.50507602534068634195e-08,
                2.75573137070700676789e-06,
                -1.98412698298579493134e-04,
                8.33333333332248946124e-03,
                -1.66666666666666324348e-01,
            ),
            r,
        )
        even = polynomial(
            z,
            -1.13596475577881948265e-11,
            2.08757232129817482790e-09,
            -2.75573143513906633035e-07,
            2.48015872894767294178e-05,
            -1.38888888888741095749e-03,
            4.16666666666666019037e-02,
        )
    cosine = fma(mul(z, z), even, fma(z, -0.5, 1.0))
    odd = k.alu(Ops.AND, c(i, 1)).alu(Ops.CMPNE, c(i, 0))
    sign = k.alu(Ops.AND, c(i, 2)).alu(Ops.SHL, c(i, d.bits - 2))
    return where(odd, cosine, s).bitcast(INT[d]).alu(Ops.XOR, sign).bitcast(d)
