"""Counting: distinct values, histograms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from manygrad.tensor.dtype import dtypes

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class Histogram(NamedTuple):
    hist: Tensor
    bin_edges: Tensor


def _of_range(low: Tensor, high: Tensor, counts: Tensor) -> Tensor:
    """Counts, NaN where the data's range, which is known when they are computed, is not finite."""
    return (low.isfinite() & high.isfinite())._where(counts, math.nan).cast(counts.dtype)


class CountingMixin:
    def unique(
        self: Tensor,
        sorted: bool = True,
        return_inverse: bool = False,
        return_counts: bool = False,
        dim: int | None = None,
        *,
        size: int | None = None,
    ) -> Any:
        """The distinct elements (or slices along `dim`) in order; with `return_inverse` also where each element went,
        with `return_counts` how many there are of each. The number of them is read on the host, unless `size` says it
        (see masking.py).
        """
        rows, whole = self._rows_along(dim)
        n = rows.shape[0]
        order = self.arange(n)
        for c in reversed(range(rows.shape[1])):  # by the last column first, stably
            column = rows.detach()._take(1, c, c + 1).squeeze(1)
            order = (
                column.argsort()
                if c == rows.shape[1] - 1
                else order._gather_along(0, column._gather_along(0, order).argsort())
            )
        return self._distinct("unique", rows, order, dim, whole, return_inverse, return_counts, size)

    def unique_consecutive(
        self: Tensor,
        return_inverse: bool = False,
        return_counts: bool = False,
        dim: int | None = None,
        *,
        size: int | None = None,
    ) -> Any:
        """The elements (or slices along `dim`) that differ from the one before."""
        rows, whole = self._rows_along(dim)
        return self._distinct("unique_consecutive", rows, None, dim, whole, return_inverse, return_counts, size)

    def _rows_along(self: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
        """(one row for each element or slice, the tensor that slices are taken from along dim 0)."""
        whole = self.flatten() if dim is None else self.movedim(self._dim(dim), 0)
        return whole.reshape(whole.shape[0], -1) if whole.numel() else whole.reshape(whole.shape[0], 0), whole

    def _distinct(
        self: Tensor,
        name: str,
        rows: Tensor,
        order: Tensor | None,
        dim: int | None,
        whole: Tensor,
        inverse: bool,
        counts: bool,
        size: int | None,
    ) -> Any:
        n = rows.shape[0]
        if n == 0 or rows.shape[1] == 0 or (n == 1 and size is None):  # (all are equal)
            count, group = min(n, 1), self._const_like(0, dtypes.int64)._broadcast((n,))
            values = whole._take(0, 0, count).clone()
            numbers = self._const_like(n, dtypes.int64)._broadcast((count,))
        else:
            ordered = rows if order is None else rows[order].contiguous()
            differs = ordered._take(0, 1, n).ne(ordered._take(0, 0, n - 1)).any(1)
            first = self._const_like(True, dtypes.bool)._broadcast((1,)).cat(differs)
            if size is None and first.uop.device is not None:  # the number is read: with it what is needed afterwards
                first, order = first.contiguous(), order if order is None else order.contiguous()
                first.realize(*([] if order is None else [order]))
            group = first.cast(dtypes.int64).cumsum(0) - 1
            starts = first._true_positions(name, size)
            values = whole._gather({0: starts if order is None else order._gather_along(0, starts.minimum(n - 1))})
            numbers = (
                starts._take(0, 1, starts.shape[0]).cat(self._const_like(n, dtypes.int64)._broadcast((1,))) - starts
            )
            if order is not None:
                group = self._const_like(0, dtypes.int64)._broadcast((n,))._scatter_at(group, [order], "place")
        out: list[Any] = [values if dim is None else values.movedim(0, self._dim(dim))]
        if inverse:
            out.append(group.reshape(self.shape) if dim is None else group)
        if counts:
            out.append(numbers)
        return out[0] if len(out) == 1 else tuple(out)

    # *** histograms ***

    def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0, *, size: int | None = None) -> Tensor:
        """How often (or with what total weight) each number 0, 1, .. stands in a 1-d integer tensor. The largest one is
        read on the host, unless `size` (then numbers from there on are left out) says how many there are.
        """
        if self.ndim != 1 or not self.dtype.is_int:
            raise ValueError(f"bincount takes a 1-d integer tensor, not {self.dtype.name} of shape {self.shape}")
        if weights is not None and weights.shape != self.shape:
            raise ValueError(f"bincount: weights of shape {weights.shape} for {self.shape}")
        if minlength < 0:
            raise ValueError(f"bincount: minlength must not be negative, got {minlength}")
        if size is None:
            least = self.amin()._count_now("bincount") if self.numel() and not self.dtype.is_unsigned else 0
            if least < 0:
                raise ValueError(f"bincount: the numbers must not be negative, the smallest is {least}")
            size = max(minlength, self.amax()._count_now("bincount") + 1 if self.numel() else 0)
        kind = dtypes.int64 if weights is None else weights.dtype if weights.dtype.is_float else dtypes.float64
        base = self._const_like(0, kind)._broadcast((size,))
        if not size or not self.numel():
            return base
        value = self._const_like(1, kind)._broadcast(self.shape) if weights is None else weights.cast(kind)
        return base._scatter_at(value, [self.cast(dtypes.int64)], "add")

    def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
        """How many elements lie in each of `bins` equal parts of [min, max] (if they are equal: of the data's range),
        in this type."""
        if not self.dtype.is_float:
            raise TypeError(f"histc needs a float tensor, not {self.dtype.name}; cast first")
        low, high = self._range_of("histc", bins, None if min == max and math.isfinite(min) else (min, max))
        return self.flatten()._bins(low, high, bins, None)

    def _range_of(self: Tensor, name: str, bins: int, range: Any) -> tuple[Tensor, Tensor]:
        if bins <= 0:
            raise ValueError(f"{name}: the number of bins must be positive, got {bins}")
        if range is not None:
            if not range[0] <= range[1]:
                raise ValueError(
                    f"{name}: the range ({range[0]}, {range[1]}) is empty; the second number must not be smaller"
                )
            if not all(math.isfinite(r) for r in range):
                raise ValueError(f"{name}: the range {tuple(range)} is not finite")
            low, high = (self._const_like(float(r), self.dtype) for r in range)
        elif self.numel():
            low, high = self.detach().amin(), self.detach().amax()
        else:
            low, high = self._const_like(0.0, self.dtype), self._const_like(1.0, self.dtype)
        same = low.eq(high)
        return same._where(low - (1 if name == "histc" else 0.5), low).cast(self.dtype), same._where(
            high + (1 if name == "histc" else 0.5), high
        ).cast(self.dtype)

    def _bins(self: Tensor, low: Tensor, high: Tensor, bins: int, weight: Tensor | None) -> Tensor:
        base = self._const_like(0, self.dtype)._broadcast((bins,))
        if not self.numel():
            return base
        at = ((self - low) * bins / (high - low)).floor().cast(dtypes.int64).minimum(bins - 1)
        inside = (self >= low) & (self <= high)
        value = self._const_like(1, self.dtype)._broadcast(self.shape) if weight is None else weight
        return _of_range(low, high, base._scatter_at(value, [inside._where(at, bins)], "add"))

    def histogram(
        self: Tensor,
        bins: Any,
        *,
        range: tuple[float, float] | None = None,
        weight: Tensor | None = None,
        density: bool = False,
    ) -> Histogram:
        """(hist, bin_edges): elements, or their weight, between edges; the last bin holds its right edge. `bins`: a
        number of equal ones over `range` (default: the data's), or a tensor of edges. `density`: the integral is 1.
        """
        x = self.flatten()
        if weight is not None and weight.shape != self.shape:
            raise ValueError(f"histogram: weight of shape {weight.shape} for {self.shape}")
        w = self._const_like(1, self.dtype)._broadcast(x.shape) if weight is None else weight.flatten().cast(self.dtype)
        if isinstance(bins, int):
            low, high = x._range_of("histogram", bins, range)
            place = self.arange(bins + 1).cast(self.dtype) / bins
            edges = place.eq(1)._where(high, low + (high - low) * place)  # (the last is the maximum, unrounded)
            count = bins
        else:
            edges, count = bins.cast(self.dtype), bins.shape[0] - 1
        base = self._const_like(0, self.dtype)._broadcast((count,))
        hist = base
        if x.numel() and count:
            at = edges.contiguous().searchsorted(x, right=True) - 1
            at = x.eq(edges._take(0, count, count + 1))._where(count - 1, at)  # the last edge belongs to the last bin
            hist = base._scatter_at(w, [(at < 0)._where(count, at)], "add")
            if isinstance(bins, int):
                hist = _of_range(low, high, hist)
        if density:
            hist = hist / (hist.sum() * (edges._take(0, 1, count + 1) - edges._take(0, 0, count)))
        return Histogram(hist, edges)
