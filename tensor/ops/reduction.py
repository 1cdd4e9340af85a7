"""Sums, products and truth over dims. `dim` is one dim, several, or None (or ()) for all."""

from __future__ import annotations

import math
from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes, to_dtype
from manygrad.tensor.ops.elementary import with_gradient, without_slope
from manygrad.tensor.source import mark
from manygrad.tensor.uop import Ops, ReduceArg, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

Dims = int | tuple[int, ...] | list[int] | None


class ReductionMixin:
    def _axes(self: Tensor, dim: Dims) -> tuple[int, ...]:
        if dim is None or (not isinstance(dim, int) and not len(dim)):
            return tuple(range(self.ndim))
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        axes = tuple(sorted(self._dim(d) for d in dims))
        if len(set(axes)) != len(axes):
            raise ValueError(f"a dim stands twice in {dims} for shape {self.shape}")
        return axes if self.ndim else ()

    def _reduce(self: Tensor, op: Ops, dim: Dims, keepdim: bool) -> Tensor:
        axes = self._axes(dim)
        t = self
        work = tuple(a for a in axes if not (isinstance(t.shape[a], int) and t.shape[a] == 1))
        if any(isinstance(d, int) and d == 0 for d in t.shape):
            kept = tuple(1 if i in axes else d for i, d in enumerate(t.shape))
            nothing = t._new(UOp.const(t.dtype, {Ops.ADD: 0, Ops.MUL: 1, Ops.MAX: t.dtype.min}[op]))._broadcast(kept)
            t = without_slope(nothing, t)
        elif work:
            t = t._new(mark(UOp(Ops.REDUCE, t.dtype, (t.uop,), ReduceArg(op, work))))
        else:
            t = t._copied()
        return t if keepdim else t._without(axes)

    def _without(self: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The dims `axes`, of size 1, dropped."""
        return self.reshape(tuple(d for i, d in enumerate(self.shape) if i not in axes))

    def _needs_values(self: Tensor, name: str, dim: Dims) -> None:
        axes = self._axes(dim)
        if any(isinstance(self.shape[a], int) and self.shape[a] == 0 for a in axes):
            raise ValueError(f"{name} over dims {axes} of the empty shape {self.shape} has no value")

    def _count(self: Tensor, dim: Dims) -> Any:
        return prod(self.shape[a] for a in self._axes(dim))

    def sum(self: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | str | None = None) -> Tensor:
        """Sum; ints and bools give int64, half types accumulate in float32."""
        out = to_dtype(dtype) if dtype is not None else self.dtype if self.dtype.is_float else dtypes.int64
        return self.cast(accumulate_dtype(out))._reduce(Ops.ADD, dim, keepdim).cast(out)

    def nansum(self: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | str | None = None) -> Tensor:
        """Sum, NaNs counting as 0."""
        return (self.isnan()._where(0.0, self) if self.dtype.is_float else self).sum(dim, keepdim, dtype=dtype)

    def prod(self: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | str | None = None) -> Tensor:
        """Product; ints and bools give int64, half types accumulate in float32."""
        out = to_dtype(dtype) if dtype is not None else self.dtype if self.dtype.is_float else dtypes.int64
        return self.cast(accumulate_dtype(out))._reduce(Ops.MUL, dim, keepdim).cast(out)

    def any(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Whether one is not 0 (of uint8 as uint8)."""
        return (
            self.bool()._reduce(Ops.MAX, dim, keepdim).cast(dtypes.uint8 if self.dtype is dtypes.uint8 else dtypes.bool)
        )

    def all(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """Whether none is 0 (of uint8 as uint8)."""
        found = self.logical_not().any(dim, keepdim).logical_not()
        return found.cast(dtypes.uint8 if self.dtype is dtypes.uint8 else dtypes.bool)

    def count_nonzero(self: Tensor, dim: Dims = None) -> Tensor:
        """How many are not 0, int64."""
        return self.bool().sum(dim)

    def logsumexp(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """log Σ exp(x), with the largest taken out first."""
        x, axes = self._float(), self._axes(dim)
        if any(isinstance(d, int) and d == 0 for d in x.shape):
            return x.exp().sum(axes, keepdim).log()
        m = x.amax(axes, keepdim=True).detach()
        m = m.isfinite()._where(m, 0.0).cast(x.dtype)
        out = (x - m).exp().sum(axes, keepdim=True).log() + m

        def backward(g: Tensor, x: Tensor) -> tuple[Tensor]:
            total = x.logsumexp(axes, keepdim=True)
            return (g * (x - total.eq(-math.inf)._where(0.0, total)).exp(),)

        out = with_gradient(out, "logsumexp", axes, backward, x)
        return out if keepdim else out._without(axes)

    def trace(self: Tensor) -> Tensor:
        """The sum of a matrix's diagonal."""
        if self.ndim != 2:
            raise ValueError(f"trace needs a matrix, this tensor has shape {self.shape}")
        return self.diagonal().sum()
