"""The normal distribution with all digits in its tails. Computed in float64."""

from __future__ import annotations

import math

from manygrad.tensor.ops.elementary import elementary, polynomial
from manygrad.tensor.ops.error_function import exp_of_square, scaled_tail
from manygrad.tensor.tensor import Tensor

ROOT_HALF = math.sqrt(0.5)
SLOPE = math.sqrt(2 / math.pi)
# the first guess of ndtri, off by at most 4.5e-4 (Abramowitz and Stegun 26.2.23), and steps of Newton's method from it
GUESS_P = (0.010328, 0.802853, 2.515517)
GUESS_Q = (0.001308, 0.189269, 1.432788, 1.0)
STEPS = 4


def ndtr(x: Tensor) -> Tensor:
    """The part of a normal distribution below x."""
    return _ndtr(x)


@elementary(lambda x: (x.square() * -0.5).exp() / math.sqrt(2 * math.pi), wide=True)
def _ndtr(x: Tensor) -> Tensor:
    return (x * -ROOT_HALF).erfc() * 0.5


def erfcx(x: Tensor) -> Tensor:
    """exp(x²) · erfc(x), which does not underflow."""
    return _erfcx(x)


@elementary(lambda x: 2 * (x * erfcx(x) - 1 / math.sqrt(math.pi)), wide=True)
def _erfcx(x: Tensor) -> Tensor:
    a = x.abs()
    tail = a.eq(math.inf)._where(0.0, scaled_tail(a))
    return (x < 0)._where(2 * exp_of_square(a.minimum(28.0), 1) - tail, tail)


def log_ndtr(x: Tensor) -> Tensor:
    """log(ndtr(x)), which does not underflow."""
    return _log_ndtr(x)


@elementary(lambda x: SLOPE / erfcx(x * -ROOT_HALF), wide=True)
def _log_ndtr(x: Tensor) -> Tensor:
    return (x < -1)._where(_log_of_tail(x), (-0.5 * (x * ROOT_HALF).erfc()).log1p())


def _log_of_tail(x: Tensor) -> Tensor:
    return x.square() * -0.5 + (erfcx(x * -ROOT_HALF) * 0.5).log()


def ndtri(p: Tensor) -> Tensor:
    """The x with ndtr(x) = p: ±inf at 0 and 1, NaN beyond."""
    return _ndtri(p)


@elementary(lambda p: (ndtri(p).square() * 0.5).exp() / (SLOPE * 0.5), wide=True)
def _ndtri(p: Tensor) -> Tensor:
    """In the middle by erfinv; in the tails Newton's method on log_ndtr, which is nearly a parabola."""
    middle = (2 * p - 1).erfinv() * math.sqrt(2)
    part = p.minimum(1 - p)
    part_log = part.log()
    t = (part_log * -2).sqrt()
    x = polynomial(t, GUESS_P) / polynomial(t, GUESS_Q) - t
    for _ in range(STEPS):
        x = x - (_log_of_tail(x) - part_log) * erfcx(x * -ROOT_HALF) / SLOPE
    tail = (p > 0.5)._where(-x, x)
    return ((part < 0.2) & (part > 0))._where(tail, middle)


__all__ = ["erfcx", "log_ndtr", "ndtr", "ndtri"]
