"""Gradients of products where factors are 0.

The gradient to a factor is the product of the others. Where no factor is 0 that is the product divided by the factor,
with derivatives of any order; a 0 has to be left out of the quotient, and then nothing tells what a change of it does.
So a gradient's gradient is that of `Product.whole`, in which factors that are 0 stand as sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manygrad.tensor.gradient import pullback
from manygrad.tensor.ops.elementary import differentiated_as, with_gradient
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class Product:
    """`product(*factors, *at)`; `total` adds up, at each place of the result, what that multiplies there. `at` are
    `count` tensors of positions; `key` tells apart products of one name."""

    def __init__(
        self, name: str, key: Any, product: Callable[..., Tensor], total: Callable[..., Tensor], count: int = 0
    ):
        self.name, self.key, self.product, self.total, self.count = name, key, product, total, count

    def _parted(self, tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        n = len(tensors) - self.count
        return list(tensors[:n]), list(tensors[n:])

    def regular(self, *tensors: Tensor) -> Tensor:
        """The product of factors of which none is 0: its gradient is a quotient."""

        def backward(g: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
            factors, at = self._parted(tensors)
            sums = pullback(self.total, g * self.regular(*tensors), *tensors)
            return (*(s / f for s, f in zip(sums, factors)), *(None for _ in at))

        return with_gradient(self.product(*tensors), f"{self.name} of factors", self.key, backward, *tensors)

    def whole(self, *tensors: Tensor) -> Tensor:
        """The product, with right first and second derivatives.

        Of factors that are 0 there are none, one (s is it), two (then their product is (s² − q) / 2, s their sum and q
        that of their squares) or more, when a second derivative is 0, too.
        """
        factors, at = self._parted(tensors)
        zero = [f.eq(0) for f in factors]
        only = [z._where(f, 0.0) for z, f in zip(zero, factors)]
        rest = self.regular(*(z._where(1.0, f) for z, f in zip(zero, factors)), *at)
        count = self.total(*(z.cast(rest.dtype) for z in zero), *at)
        s, q = self.total(*only, *at), self.total(*(x * x for x in only), *at)
        two = count.eq(2)._where((s * s - q) * 0.5, 0.0)
        return rest * count.eq(0)._where(1.0, count.eq(1)._where(s, two))

    def gradient(self, out: Tensor, which: int, g: Tensor, *tensors: Tensor) -> Tensor:
        """`out`, what reaches factor `which` where g reached the product, with a gradient of its own."""

        def f(g: Tensor, *tensors: Tensor) -> Tensor:
            return pullback(self.whole, g, *tensors)[which]

        return differentiated_as(out, f"gradient of {self.name}", (self.key, which), f, g, *tensors)


def reduced(g: Tensor, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Gradient of `x` where g is that of its product over `axes`, which are kept: g times the product of the others."""
    zero = x.eq(0)
    zeros, rest = zero.sum(axes, keepdim=True), zero._where(1.0, x)
    product = rest._reduce(Ops.MUL, axes, True)
    others = zero._where(zeros.eq(1)._where(product, 0.0), zeros.eq(0)._where(product / rest, 0.0))
    kind = Product("prod", axes, lambda x: x._reduce(Ops.MUL, axes, True), lambda x: x.sum(axes, keepdim=True))
    return kind.gradient(g._broadcast(x.shape) * others, 0, g, x)


def scattered(g: Tensor, base: Tensor, v: Tensor, indices: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradients of `base` and `v` where g is that of base._scatter_at(v, indices, "mul"):
    times the product of the others at the same place."""

    def read(x: Tensor) -> Tensor:
        return x._new(UOp(Ops.GATHER, x.dtype, (x.uop, *(i.uop for i in indices))))

    zero, full = v.eq(0), base.eq(0)
    # of what is not 0
    product = full._where(1.0, base).cast(v.dtype)._scatter_at(zero._where(1.0, v).cast(v.dtype), indices, "mul")
    zeros = full.cast(g.dtype)._scatter_at(zero.cast(g.dtype), indices, "add")
    others = read(zeros) - zero.cast(g.dtype)
    rest = others.eq(0)._where(read(product) / zero._where(1.0, v), 0.0).cast(g.dtype)
    kind = Product(
        "scatter",
        len(indices),
        lambda base, v, *at: base._scatter_at(v, list(at), "mul"),
        lambda base, v, *at: base._scatter_at(v, list(at), "add"),
        len(indices),
    )
    ones = base.ones_like()._scatter_at(v, indices, "mul")
    return (
        kind.gradient(g * ones, 0, g, base, v, *indices),
        kind.gradient(read(g) * rest, 1, g, base, v, *indices),
    )


def running(out: Tensor, g: Tensor, x: Tensor, d: int) -> Tensor:
    """`out`, what reaches `x` where g reached x.cumprod(d), with a gradient of its own."""
    return Product("cumprod", d, lambda x: x.cumprod(d), lambda x: x.cumsum(d)).gradient(out, 0, g, x)
