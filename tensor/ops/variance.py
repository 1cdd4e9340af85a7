"""Means, variances, covariances."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes
from manygrad.tensor.ops.broadcast import result_type
from manygrad.tensor.ops.elementary import with_gradient
from manygrad.tensor.ops.reduction import Dims
from manygrad.tensor.uop import UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class VarianceMixin:
    def mean(self: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | str | None = None) -> Tensor:
        """Σ x / n."""
        if dtype is not None:
            return self.cast(dtype).mean(dim, keepdim)
        if not self.dtype.is_float:
            raise TypeError(f"mean needs a float tensor, not {self.dtype.name}; cast with .float() first")
        n = self._count(dim)
        acc = self.cast(accumulate_dtype(self.dtype)).sum(dim, keepdim)
        if isinstance(n, UOp):
            return (acc / n).cast(self.dtype)
        return (acc * (1.0 / n if n else math.nan)).cast(self.dtype)

    def nanmean(self: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DType | str | None = None) -> Tensor:
        """The mean of those that are not NaN."""
        x = self if dtype is None else self.cast(dtype)
        return x.nansum(dim, keepdim) / x.isnan().logical_not().sum(dim, keepdim)

    def var(
        self: Tensor,
        dim: Dims | bool = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Tensor:
        """Σ (x − mean)² / (n − correction), correction 1 by default; `unbiased` is PyTorch's old form of it."""
        return self._var(dim, unbiased, keepdim, correction)[0]

    def std(
        self: Tensor,
        dim: Dims | bool = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Tensor:
        """√var; the gradient is 0 where it is 0."""
        return _root(self._var(dim, unbiased, keepdim, correction)[0])

    def var_mean(
        self: Tensor,
        dim: Dims | bool = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._var(dim, unbiased, keepdim, correction)

    def std_mean(
        self: Tensor,
        dim: Dims | bool = None,
        unbiased: bool | None = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        var, mean = self._var(dim, unbiased, keepdim, correction)
        return _root(var), mean

    def _var(
        self: Tensor, dim: Any, unbiased: bool | None, keepdim: bool, correction: float | None
    ) -> tuple[Tensor, Tensor]:
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        if unbiased is not None and correction is not None:
            raise ValueError("var/std: give unbiased or correction, not both")
        if not self.dtype.is_float:
            raise TypeError(f"var and std need a float tensor, not {self.dtype.name}; cast with .float() first")
        off = correction if correction is not None else 1 if unbiased is None else int(unbiased)
        x, axes, n = self.cast(accumulate_dtype(self.dtype)), self._axes(dim), self._count(dim)
        mean = x.mean(axes, keepdim=True) if axes else x
        total = (x - mean).square().sum(axes, keepdim) if axes else x * 0
        if isinstance(n, UOp):
            out = total / (self._const_like(-off, total.dtype) + n).maximum(0)
        else:
            out = total * (1.0 / (n - off)) if n > off else total / 0.0
        return out.cast(self.dtype), (mean if keepdim else mean._without(axes)).cast(self.dtype)

    def cov(
        self: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
    ) -> Tensor:
        """(variables, observations) -> their covariances; of one variable its variance, without dims. `fweights`
        count observations, `aweights` weigh them; NaN where a weight is negative or all are 0."""
        if self.ndim > 2:
            raise ValueError(f"cov needs at most 2 dims (variables, observations), this tensor has shape {self.shape}")
        for name, t, kind in (("fweights", fweights, "integers"), ("aweights", aweights, "floats")):
            if t is not None and not (t.dtype.is_int if kind == "integers" else t.dtype.is_float):
                raise TypeError(f"cov: {name} are {kind}, not {t.dtype.name}")
        x = self._float().reshape(1, -1) if self.ndim < 2 else self._float()
        if aweights is not None:
            x = x.cast(result_type(x, aweights))
        n: Any = x.shape[1]
        w = fweights if aweights is None else aweights if fweights is None else fweights * aweights
        if w is not None and w.shape != (n,):
            raise ValueError(f"cov: the weights have shape {w.shape}, expected ({n},): one for each observation")
        if w is None:
            mean, norm = x.sum(1, keepdim=True) / n if n else x.sum(1, keepdim=True) / 0.0, max(n - correction, 0)
            centred = x - mean
            out = centred.matmul(centred.T) / norm
        else:
            sound = (w >= 0).all()  # (what no weight can be is not taken for one)
            w = sound._where(w.cast(x.dtype), math.nan).cast(x.dtype)
            total = w.sum()
            centred = x - (x * w).sum(1, keepdim=True) / total
            lost = 1 if aweights is None else (w * aweights.cast(x.dtype)).sum() / total
            out = centred.matmul((centred * w).T) / (total - correction * lost).clamp(min=0)
        return out.reshape(()) if x.shape[0] == 1 else out

    def corrcoef(self: Tensor) -> Tensor:
        """cov scaled to 1 on its diagonal."""
        c = self.cov()
        if not c.ndim:
            return c / c
        d = c.diagonal().sqrt()
        return (c / d.unsqueeze(1) / d.unsqueeze(0)).clamp(-1, 1)


def _root(var: Tensor) -> Tensor:
    x = var.cast(dtypes.float32) if var.dtype.is_half else var
    out = with_gradient(x.sqrt(), "std", None, lambda g, x: (x.eq(0)._where(0.0, g / (2 * x.sqrt())),), x)
    return out.cast(var.dtype)
