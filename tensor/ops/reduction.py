"""Reductions over dims."""

from __future__ import annotations

import math
from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes, to_dtype
from manygrad.tensor.source import mark
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

Dims = int | tuple[int, ...] | list[int] | None


class ReductionMixin:
    def _axes(self: Tensor, dim: Dims) -> tuple[int, ...]:
        if dim is None:
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
            t = t._new(UOp.const(t.dtype, {Ops.ADD: 0, Ops.MUL: 1, Ops.MAX: t.dtype.min}[op]))._broadcast(kept)
        elif work:
            t = t._new(mark(UOp(Ops.REDUCE, t.dtype, (t.uop,), (op, work))))
        return t if keepdim else t.reshape(tuple(d for i, d in enumerate(t.shape) if i not in axes))

    def sum(self: Tensor, dim: Dims = None, keepdim: bool = False, dtype: DType | str | None = None) -> Tensor:
        """Sum; ints and bools give int64, half types accumulate in float32."""
        out = to_dtype(dtype) if dtype is not None else self.dtype if self.dtype.is_float else dtypes.int64
        return self.cast(accumulate_dtype(out))._reduce(Ops.ADD, dim, keepdim).cast(out)

    def prod(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        out = self.dtype if self.dtype.is_float else dtypes.int64
        return self.cast(accumulate_dtype(out))._reduce(Ops.MUL, dim, keepdim).cast(out)

    def max(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        self._needs_values("max", dim)
        return self._reduce(Ops.MAX, dim, keepdim)

    amax = max

    def min(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        self._needs_values("min", dim)
        if self.dtype.is_float:
            return -((-self).max(dim, keepdim))
        return self.bitwise_not().max(dim, keepdim).bitwise_not()

    amin = min

    def _needs_values(self: Tensor, name: str, dim: Dims) -> None:
        axes = self._axes(dim)
        if any(isinstance(self.shape[a], int) and self.shape[a] == 0 for a in axes):
            raise ValueError(f"{name} over dims {axes} of the empty shape {self.shape} has no value")

    def _count(self: Tensor, dim: Dims) -> int:
        n = prod(self.shape[a] for a in self._axes(dim))
        return n

    def mean(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        if not self.dtype.is_float:
            raise TypeError(f"mean needs a float tensor, not {self.dtype.name}; cast with .float() first")
        n = self._count(dim)
        acc = self.cast(accumulate_dtype(self.dtype)).sum(dim, keepdim)
        return (acc * (1.0 / n if n else math.nan)).cast(self.dtype)

    def var(self: Tensor, dim: Dims = None, keepdim: bool = False, correction: int = 1) -> Tensor:
        n = self._count(dim)
        centred = self - self.mean(dim, keepdim=True)
        total = (centred * centred).sum(dim, keepdim)
        return total * (1.0 / (n - correction)) if n > correction else total * math.nan

    def std(self: Tensor, dim: Dims = None, keepdim: bool = False, correction: int = 1) -> Tensor:
        return self.var(dim, keepdim, correction).sqrt()

    def any(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return self.bool()._reduce(Ops.MAX, dim, keepdim)

    def all(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return self.bool().logical_not().any(dim, keepdim).logical_not()

    def argmax(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The first position of the largest value, int64."""
        if dim is None:
            return self.flatten().argmax(0)
        d = self._dim(dim)
        n = self.shape[d]
        is_max = self.eq(self.max(d, keepdim=True))
        if self.dtype.is_float:
            is_max = is_max | self.isnan()
        places = self.arange(n).reshape(tuple(n if i == d else 1 for i in range(self.ndim)))
        return (n - 1) - is_max.where((n - 1) - places, -1).max(d, keepdim)

    def argmin(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return (-self if self.dtype.is_float else self.bitwise_not()).argmax(dim, keepdim)

    def logsumexp(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        m = self.max(dim, keepdim=True).detach()
        m = m.isfinite().where(m, 0.0).cast(self.dtype)
        out = (self - m).exp().sum(dim, keepdim=True).log() + m
        return out if keepdim else out.reshape(tuple(d for i, d in enumerate(out.shape) if i not in self._axes(dim)))

    def norm(self: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return self.square().sum(dim, keepdim).sqrt()

    def cumsum(self: Tensor, dim: int = 0) -> Tensor:
        """Running sum: for each i the sum of the first i + 1 (as a masked reduction)."""
        d = self._dim(dim)
        n: Any = self.shape[d]
        t = self.transpose(d, -1)
        keep = self.arange(n).unsqueeze(0) <= self.arange(n).unsqueeze(1)
        return keep.where(t.unsqueeze(-2), 0).sum(-1).transpose(d, -1)
