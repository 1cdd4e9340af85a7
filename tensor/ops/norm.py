"""Norms of vectors: (Σ |x|ᵖ)^(1/p)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype
from manygrad.tensor.ops.elementary import with_gradient, without_slope
from manygrad.tensor.ops.reduction import Dims

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class NormMixin:
    def norm(
        self: Tensor,
        p: float | str | None = "fro",
        dim: Dims = None,
        keepdim: bool = False,
        dtype: DType | str | None = None,
    ) -> Tensor:
        """(Σ |x|ᵖ)^(1/p) over `dim`, the elements as one vector: "fro" is 2, inf the largest, −inf the smallest,
        0 the count of those not 0.

        The gradient is 0 where the norm is 0.
        """
        x = self if dtype is None else self.cast(dtype)
        if not x.dtype.is_float:
            raise TypeError(f"norm needs a float tensor, not {x.dtype.name}; cast with .float() first")
        if p == "nuc":
            return _nuclear_norm(x, dim, keepdim)
        if p in ("fro", None):
            p = 2.0
        if isinstance(p, str):
            raise ValueError(f'norm: p is a number, "fro" or "nuc", not {p!r}')
        axes = x._axes(dim)
        out = _power_norm(x.cast(accumulate_dtype(x.dtype)), float(p), axes).cast(x.dtype)
        return out if keepdim else out._without(axes)

    def dist(self: Tensor, other: Tensor, p: float = 2) -> Tensor:
        """The p-norm of self − other."""
        return (self - other).norm(p)

    def renorm(self: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
        """Each slice along `dim` of a p-norm above `maxnorm` scaled down to it."""
        d = self._dim(dim)
        if not maxnorm >= 0:
            raise ValueError(f"renorm: maxnorm is at least 0, not {maxnorm}")
        if self.ndim < 2:
            raise ValueError(f"renorm needs at least 2 dims, this tensor has shape {self.shape}")
        size = self.norm(p, tuple(i for i in range(self.ndim) if i != d), keepdim=True)
        return self * (size > maxnorm)._where(maxnorm / (size + 1e-7), 1.0).cast(self.dtype)


def _nuclear_norm(x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    """The sum of the singular values of the matrices in two dims."""
    axes = x._axes(dim)
    if len(axes) != 2:
        raise ValueError(f'norm: p="nuc" is of matrices: give two dims of {x.shape}, not {dim}')
    rows, columns = axes if dim is None else [x._dim(d) for d in dim]  # type: ignore[union-attr]
    rest = [i for i in range(x.ndim) if i not in axes]
    out = x.permute(*rest, rows, columns).svd().S.sum(-1)
    return out if not keepdim else out.reshape(tuple(1 if i in axes else n for i, n in enumerate(x.shape)))


def _power_norm(x: Tensor, p: float, axes: tuple[int, ...]) -> Tensor:
    """The dims are kept."""
    if p == 0:
        return without_slope(x.ne(0).cast(x.dtype).sum(axes, keepdim=True), x)
    a = x.abs()
    if not axes:
        return a
    if p == math.inf:
        return a.amax(axes, keepdim=True) if all(x.shape[i] != 0 for i in axes) else a.sum(axes, keepdim=True)
    if p == -math.inf:
        return a.amin(axes, keepdim=True)
    if p == 1:
        return a.sum(axes, keepdim=True)
    out = x.square().sum(axes, keepdim=True).sqrt() if p == 2 else a.pow(p).sum(axes, keepdim=True).pow(1 / p)

    def backward(g: Tensor, x: Tensor) -> tuple[Any]:
        size = _power_norm(x, p, axes)
        none = x.eq(0)
        size = size.eq(0)._where(1.0, size)
        slope = x / size if p == 2 else x.sign() * (none._where(1.0, x.abs()) / size).pow(p - 1)
        return (none._where(0.0, g * slope),)

    return with_gradient(out, "norm", (p, axes), backward, x)
