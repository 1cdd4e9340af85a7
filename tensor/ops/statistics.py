"""Order statistics: median, mode, quantile, and their variants that leave out NaNs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.elementary import with_gradient
from manygrad.tensor.ops.extremum import ValuesAndIndices

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")


def _equal_share(g: Tensor, x: Tensor, value: Tensor) -> tuple[Tensor, None]:
    """To all that are the value in equal parts."""
    hit = (x.eq(value) | (x.isnan() & value.isnan())).cast(g.dtype)
    return g * hit / hit.sum(), None


class StatisticsMixin:
    def median(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        """The value in the middle (the lower of two); NaN where one is NaN. With `dim`: (values, indices) along it."""
        return self._middle("median", dim, keepdim, skip=False)

    def nanmedian(self: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        """The median of those that are not NaN; NaN where there are none."""
        return self._middle("nanmedian", dim, keepdim, skip=True)

    def _middle(self: Tensor, name: str, dim: int | None, keepdim: bool, skip: bool) -> Any:
        if dim is None:
            flat = self.flatten()
            if flat.shape[0] == 0:
                return self._const_like(math.nan if self.dtype.is_float else self.dtype.min, self.dtype)
            value = flat._middle(name, 0, False, skip).values
            return with_gradient(value, name, None, _equal_share, flat, value) if self.dtype.is_float else value
        d = self._dim(dim)
        if not self.ndim:
            return ValuesAndIndices(self._copied(), self._const_like(0, dtypes.int64))
        self._needs_values(name, d)
        n: Any = self.shape[d]
        rank = self._const_like((n - 1) // 2, dtypes.int64)
        if self.dtype.is_float:
            numbers = n - self.isnan().sum(d, keepdim=True)  # NaNs stand last, the first one at this rank
            rank = ((numbers - 1).clamp(min=0) // 2) if skip else numbers.eq(n)._where(rank, numbers)
        return self._at_rank(self.argsort(d), rank, d, keepdim)

    def mode(self: Tensor, dim: int = -1, keepdim: bool = False) -> ValuesAndIndices:
        """(values, indices) of the most frequent along `dim`: the smallest of equally frequent ones,
        at its last position."""
        d = self._dim(dim)
        if not self.ndim:
            return ValuesAndIndices(self._copied(), self._const_like(0, dtypes.int64))
        self._needs_values("mode", d)
        n: Any = self.shape[d]
        order = self.argsort(d)
        ordered = self._gather_along(d, order)
        places = ordered._places(d)
        late, early = ordered._take(d, 1, n), ordered._take(d, 0, n - 1)
        fresh = late.ne(early).pad(tuple((1, 0) if i == d else (0, 0) for i in range(self.ndim)))
        starts = fresh._where(places, 0).cummax(d).values  # where the run of equal values begins
        return self._at_rank(order, (places - starts).argmax(d, keepdim=True), d, keepdim)

    def quantile(
        self: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> Tensor:
        """The value below which a part q in [0, 1] lies, along `dim` or of all;
        a tensor q (k,) gives k of them in a first dim. NaN where one is NaN."""
        return self._quantile("quantile", q, dim, keepdim, interpolation, skip=False)

    def nanquantile(
        self: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> Tensor:
        """The quantile of those that are not NaN."""
        return self._quantile("nanquantile", q, dim, keepdim, interpolation, skip=True)

    def _quantile(
        self: Tensor, name: str, q: Any, dim: int | None, keepdim: bool, interpolation: str, skip: bool
    ) -> Tensor:
        if interpolation not in INTERPOLATIONS:
            raise ValueError(f"{name}: interpolation is one of {INTERPOLATIONS}, not {interpolation!r}")
        if not self.dtype.is_float:
            raise TypeError(f"{name} needs a float tensor, not {self.dtype.name}; cast with .float() first")
        many = hasattr(q, "uop")
        if not many and not 0 <= q <= 1:
            raise ValueError(f"{name}: q is in [0, 1], not {q}")
        if many and q.dtype is not self.dtype:
            raise TypeError(f"{name}: q is {q.dtype.name}, the tensor {self.dtype.name}; cast one")
        if many and q.ndim > 1:
            raise ValueError(f"{name}: q is a number or of 1 dim, not of shape {q.shape}")
        d = 0 if dim is None or not self.ndim else self._dim(dim)
        x = self.flatten() if dim is None or not self.ndim else self
        x._needs_values(name, d)
        n: Any = x.shape[d]
        x = x._gather_along(d, x.argsort(d)).transpose(d, -1)  # sorted along the last dim
        inside = ((q >= 0) & (q <= 1)).reshape(-1) if many else None
        parts = q.reshape(-1).double() if many else x._const_like(float(q), dtypes.float64).reshape(1)
        numbers = n - x.isnan().sum(-1, keepdim=True)
        last = (numbers - 1).clamp(min=0) if skip else (numbers * 0 + (n - 1))
        place = parts.clamp(0, 1) * last.double()  # (..., k)
        low, high = place.floor(), place.ceil()
        if interpolation in ("lower", "higher", "nearest"):
            out = x._gather_along(-1, {"lower": low, "higher": high, "nearest": place.round()}[interpolation].long())
        else:
            a, b = x._gather_along(-1, low.long()), x._gather_along(-1, high.long())
            out = a.lerp(b, (place - low).cast(x.dtype) if interpolation == "linear" else 0.5)
        if inside is not None:  # (what lies outside is no part)
            out = inside._where(out, math.nan)
        if not skip:
            out = numbers.eq(n)._where(out, math.nan)
        out = out.transpose(d, -1).unsqueeze(0).transpose(0, d + 1)  # the k quantiles first, the dim itself of size 1
        if dim is None:
            out = out.reshape(out.shape[0], *(1,) * self.ndim) if keepdim else out.reshape(out.shape[0])
        elif not keepdim and self.ndim:
            out = out._without((d + 1,))
        elif not self.ndim:
            out = out.reshape(out.shape[0])
        return out if many and q.ndim else out._without((0,))
