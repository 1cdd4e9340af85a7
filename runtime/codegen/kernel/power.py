"""POW as arithmetic that vectorises: 2 ** (y · log2|x|), the exponent in two parts, of which the second has what
rounding takes from the first.

An error of the logarithm grows with the exponent: exp(y · log(x)) in float32 is off by 100 units in the last place
where the result is near the largest number. Here the error is less than 0.7 units (one, of denormal
results), so what can be given exactly is.
After Dekker (1971) and SLEEF's `powf`: log2(m) = s · P(s²), s = (m − 1) / (m + 1), its two highest terms in two parts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from manygrad.runtime.codegen.kernel.transcendental import (
    INT,
    add,
    c,
    f32,
    f64,
    fma,
    less,
    mul,
    nearest,
    polynomial,
    scaled,
    split,
    sub,
    where,
)
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


class Constants(NamedTuple):
    """Numbers of a type: a pair is one number in two parts."""

    first: tuple[float, float]  # log2(m) = s · (first + s² · (second + s² · Q(s²)))
    second: tuple[float, float]
    rest: tuple[float, ...]  # Q, the highest power first
    log_2: tuple[float, float]
    tail: tuple[float, ...]  # (e ** v − 1 − v) / v² where |v| <= log(2) / 2, the highest power first
    lowest: float  # exponents of 2 beyond which a result is 0, or infinite
    highest: float


CONSTANTS = {
    # the least relative error of log2(m), 4.2e-12, and of e ** v, 3e-9
    f32: Constants(
        (2.885390043258667, 3.8531485557768974e-08),
        (0.9617967009544373, -2.767876061682273e-08),
        (0.340740442276001, 0.41167211532592773, 0.5770835876464844),
        (0.6931471824645996, -1.904654299957768e-09),
        (1.3814598787576e-3, 8.368716575205326e-3, 4.166838899254799e-2, 1.666652113199234e-1, 4.999999403953552e-1),
        -151.0,
        129.0,
    ),
    # the series
    f64: Constants(
        (2.8853900817779268, 4.0710547481862066e-17),
        (0.9617966939259756, 5.0577616648125907e-17),
        tuple(2 / math.log(2) / k for k in range(25, 4, -2)),
        (0.6931471805599453, 2.3190468138462996e-17),
        tuple(1 / math.factorial(k) for k in range(13, 1, -1)),
        -1076.0,
        1025.0,
    ),
}
Pair = tuple[UOp, UOp]  # a number in two parts


def power(x: UOp, y: UOp, scales: bool = False) -> UOp:
    """x ** y with IEEE 754's special values; `scales` as for `exp`."""
    d, i = x.dtype, INT[x.dtype]
    sign = c(i, int(i.min))
    a = x.bitcast(i).alu(Ops.AND, c(i, int(i.max))).bitcast(d)
    found = exp2(times(y, log2(a)), scales)
    found = where(a.alu(Ops.CMPEQ, c(d, 1.0)), 1.0, found)  # (also to the power of infinity)
    whole, half = _is_whole(y), _is_whole(mul(y, 0.5))
    odd = whole.alu(Ops.AND, half.alu(Ops.NOT))
    of_x = where(odd, x.bitcast(i).alu(Ops.AND, sign), c(i, 0))
    found = found.bitcast(i).alu(Ops.OR, of_x).bitcast(d)
    negative = less(x, 0.0).alu(Ops.AND, less(a, math.inf))
    unknown = x.alu(Ops.CMPNE, x).alu(Ops.OR, y.alu(Ops.CMPNE, y))
    unknown = unknown.alu(Ops.OR, negative.alu(Ops.AND, whole.alu(Ops.NOT)))
    one = y.alu(Ops.CMPEQ, c(d, 0.0)).alu(Ops.OR, x.alu(Ops.CMPEQ, c(d, 1.0)))
    return where(one, 1.0, where(unknown, math.nan, found))


def _is_whole(y: UOp) -> UOp:
    return y.alu(Ops.TRUNC).alu(Ops.CMPEQ, y)


def log2(a: UOp) -> Pair:
    """log2(a) of a number that is not negative: −inf of 0, inf of inf."""
    d = a.dtype
    n = CONSTANTS[d]
    m, k = split(a)
    f = sub(m, 1.0)
    above = add(m, 1.0)  # and what it is short of m + 1:
    lost = sub(m, sub(above, 1.0))
    inverse = above.alu(Ops.RECIP)
    s = mul(f, inverse)
    s_low = mul(fma(_minus(s), lost, fma(_minus(s), above, f)), inverse)
    z, z_low = product(s, s)
    z_low = fma(add(s, s), s_low, z_low)
    # p = second · z + Q · z², then first + p
    p, p_low = product(z, c(d, n.second[0]))
    p_low = fma(z, n.second[1], fma(z_low, n.second[0], p_low))
    p, p_low = joined(p, fma(mul(z, z), polynomial(z, *n.rest), p_low))
    p, more = joined(c(d, n.first[0]), p)
    p_low = add(more, add(p_low, n.first[1]))
    high, low = product(s, p)
    low = fma(s_low, p, fma(s, p_low, low))
    high, more = joined(k, high)
    low = add(more, low)
    high = where(a.alu(Ops.CMPEQ, c(d, 0.0)), -math.inf, where(a.alu(Ops.CMPEQ, c(d, math.inf)), math.inf, high))
    return high, low


def times(y: UOp, x: Pair) -> Pair:
    """y · x, cut to where 2 ** it is neither 0 nor infinite."""
    n = CONSTANTS[y.dtype]
    whole = mul(y, x[0])
    high = where(less(c(y.dtype, n.highest), whole), n.highest, whole)
    high = where(less(high, n.lowest), n.lowest, high)
    low = fma(y, x[1], fma(y, x[0], _minus(high)))
    return high, where(high.alu(Ops.CMPEQ, whole), low, 0.0)


def exp2(t: Pair, scales: bool) -> UOp:
    n = CONSTANTS[t[0].dtype]
    whole, k = nearest(t[0], 1.0)
    r = sub(t[0], whole)
    v, v_low = product(r, c(r.dtype, n.log_2[0]))
    v_low = fma(t[1], n.log_2[0], fma(r, n.log_2[1], v_low))
    near = add(v, v_low)
    rest = fma(mul(near, near), polynomial(near, *n.tail), v_low)
    p, more = joined(c(r.dtype, 1.0), v)
    return scaled(add(p, add(more, rest)), whole, k, scales)


def product(a: UOp, b: UOp) -> Pair:
    """a · b, rounded, and what rounding took."""
    p = mul(a, b)
    return p, fma(a, b, _minus(p))


def joined(a: UOp, b: UOp) -> Pair:
    """a + b, rounded, and what rounding took, where a is 0 or has no smaller exponent than b."""
    s = add(a, b)
    return s, sub(b, sub(s, a))


def _minus(a: UOp) -> UOp:
    return a.alu(Ops.NEG)
