"""Rules that functions of floats share: ints become floats, halves compute in float32 and round once,
derivatives may be given."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.gradient import FLAT, CustomGrad, pullback
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def with_gradient(out: Tensor, name: str, params: Any, backward: Callable[..., Any], *inputs: Tensor) -> Tensor:
    """`out`, a function of `inputs`, with `backward(gradient, *inputs)` in place of the rule
    that follows from how it is computed.

    `params` must tell apart all backward functions of this name.
    """
    return out._new(UOp(Ops.CUSTOM, out.dtype, (out.uop, *(t.uop for t in inputs)), CustomGrad(name, params, backward)))


def differentiated_as(out: Tensor, name: str, params: Any, f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`out`, the value of `f(*inputs)` computed with less work, with the gradient of that expression."""
    return with_gradient(out, name, params, lambda g, *inputs: pullback(f, g, *inputs), *inputs)


def without_slope(out: Tensor, *inputs: Tensor) -> Tensor:
    """`out`, whose gradient to `inputs` is zeros: it depends on them in steps, or only in its shape."""
    if not out.dtype.is_float:
        return out
    return with_gradient(out, "without_slope", len(inputs), lambda g, *inputs: (FLAT,) * len(inputs), *inputs)


def elementary(
    derivative: Callable[..., Tensor] | None = None, wide: bool = False
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Decorates a method on floats: `derivative(x, *params)` is d(out)/dx where the automatic one is wasteful or wrong.

    `wide`: computed in float64 always, for series that cancel in float32.
    """

    def decorate(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = f.__name__

        @wraps(f)
        def method(self: Tensor, *params: Any, **named: Any) -> Tensor:
            kind = self.dtype if self.dtype.is_float else dtypes.default_float
            x = self.cast(dtypes.float64 if wide else dtypes.float32 if kind.is_half else kind)
            out = f(x, *params, **named)
            if derivative is not None:
                key = (*params, *sorted(named.items()))
                out = with_gradient(out, name, key, lambda g, x: (g * derivative(x, *params, **named),), x)
            return out.cast(kind)

        return method

    return decorate


def polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """By Horner's rule, the highest power first."""
    total, *rest = (x._const_like(k, x.dtype)._broadcast(x.shape) for k in coefficients)
    for k in rest:
        total = fma(x, total, k)
    return total


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x · y + z of floats of one type and shape, rounded once."""
    return x._op(Ops.FMA, None, y, z)
