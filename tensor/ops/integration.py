"""Integrals of sampled values by the trapezoidal rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class IntegrationMixin:
    def trapezoid(self: Tensor, x: Tensor | None = None, *, dx: float | None = None, dim: int = -1) -> Tensor:
        """The integral along `dim` of the values at the places `x`, of self's shape or one dim, or at distances `dx`
        (1): Σ (y[i] + y[i + 1]) / 2 · (x[i + 1] − x[i]). Of one value or none it is 0.

        TypeError where both `x` and `dx` are given; ValueError where shapes do not fit.
        """
        d = self._dim(dim)
        return self._strips("trapezoid", x, dx, d).sum(d)

    def cumulative_trapezoid(
        self: Tensor, x: Tensor | None = None, *, dx: float | None = None, dim: int = -1
    ) -> Tensor:
        """The integrals, as `trapezoid`'s, up to each value but the first: one less along `dim` than there are values.

        TypeError where both `x` and `dx` are given; ValueError where shapes do not fit.
        """
        d = self._dim(dim)
        return self._strips("cumulative_trapezoid", x, dx, d).cumsum(d)

    def _strips(self: Tensor, name: str, x: Tensor | None, dx: float | None, d: int) -> Tensor:
        """The areas between neighbours along d."""
        if x is not None and dx is not None:
            raise TypeError(f"{name}: give x or dx, not both")
        if not self.ndim:
            raise ValueError(f"{name}: a tensor without dims has none to integrate along")
        n = self.shape[d]
        y = self._take(d, 1, n) + self._take(d, 0, n - 1) if n else self
        if x is None:
            return y * ((1.0 if dx is None else dx) / 2)
        at = x.ndim - 1 if x.ndim == 1 else x.ndim - (self.ndim - d)
        if at < 0 or x.shape[at] != n:
            raise ValueError(
                f"{name}: x of shape {x.shape} does not fit the values of shape {self.shape} along dim {d}"
            )
        width = x.diff(dim=at)
        if x.ndim == 1:
            width = width.reshape(tuple(width.shape[0] if i == d else 1 for i in range(self.ndim)))
        return (y * width) / 2

    trapz = trapezoid
