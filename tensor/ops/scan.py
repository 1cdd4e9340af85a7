"""Scans along a dim: cumsum, cumprod, cummax, cummin, logcumsumexp, diff.

A long dim is cut into blocks of `BLOCK`: each block is scanned by a masked reduction, the blocks' totals are scanned in
the same way, and what stands before a block is added to it. For n elements: 2n read, n written, BLOCK·n operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype, dtypes, to_dtype
from manygrad.tensor.ops.elementary import with_gradient
from manygrad.tensor.ops.extremum import ValuesAndIndices
from manygrad.tensor.products import running
from manygrad.tensor.uop import Ops

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

BLOCK = 16

Reduce = Callable[["Tensor"], "Tensor"]  # (..., n) -> (...)
Combine = Callable[["Tensor", "Tensor"], "Tensor"]


def scanned(x: Tensor, d: int, identity: Any, reduce: Reduce, combine: Combine) -> Tensor:
    """out[..., i, ...] = reduce(x[..., :i + 1, ...]) along dim d;
    `reduce` works on the last dim and ignores `identity`."""
    if not x.ndim or any(isinstance(s, int) and s == 0 for s in x.shape):
        return x
    return _scanned(x.transpose(d, -1), identity, reduce, combine).transpose(d, -1)


def _scanned(x: Tensor, identity: Any, reduce: Reduce, combine: Combine) -> Tensor:
    n: Any = x.shape[-1]
    if not isinstance(n, int) or n <= 2 * BLOCK:
        return _masked(x, identity, reduce)
    lead, count = x.shape[:-1], -(-n // BLOCK)
    padded = x.pad(((0, 0),) * len(lead) + ((0, count * BLOCK - n),), value=identity)
    blocks = padded.reshape(*lead, count, BLOCK)
    totals = reduce(blocks).contiguous()
    before = _scanned(totals, identity, reduce, combine)._take(len(lead), 0, count - 1)
    before = before.pad(((0, 0),) * len(lead) + ((1, 0),), value=identity).contiguous()
    return (
        combine(before.unsqueeze(-1), _masked(blocks, identity, reduce))
        .reshape(*lead, count * BLOCK)
        ._take(len(lead), 0, n)
    )


def _masked(x: Tensor, identity: Any, reduce: Reduce) -> Tensor:
    n: Any = x.shape[-1]
    keep = x.arange(n).unsqueeze(0) <= x.arange(n).unsqueeze(1)
    return reduce(keep._where(x.unsqueeze(-2), identity).cast(x.dtype))


def _backwards(x: Tensor, d: int, scan: Callable[[Tensor], Tensor]) -> Tensor:
    """The scan from the end."""
    return scan(x._flipped(d))._flipped(d)


class ScanMixin:
    def cumsum(self: Tensor, dim: int = 0, *, dtype: DType | str | None = None) -> Tensor:
        """out[i] = Σ x[:i + 1] along `dim`; ints and bools give int64."""
        x, d, out = _prepared(self, dim, dtype)
        if not x.ndim:
            return x._copied().cast(out)
        total = scanned(x, d, 0, lambda t: t._reduce(Ops.ADD, -1, False), lambda a, b: a + b)
        if x.dtype.is_float:
            total = with_gradient(total, "cumsum", d, lambda g, x: (_backwards(g, d, lambda t: t.cumsum(d)),), x)
        return total.cast(out)

    def cumprod(self: Tensor, dim: int, *, dtype: DType | str | None = None) -> Tensor:
        """out[i] = Π x[:i + 1] along `dim`; ints and bools give int64."""
        x, d, out = _prepared(self, dim, dtype)
        if not x.ndim:
            return x._copied().cast(out)
        total = scanned(x, d, 1, lambda t: t._reduce(Ops.MUL, -1, False), lambda a, b: a * b)
        if x.dtype.is_float:
            total = with_gradient(total, "cumprod", d, lambda g, x: (_cumprod_gradient(g, x, d),), x)
        return total.cast(out)

    def cummax(self: Tensor, dim: int) -> ValuesAndIndices:
        """(values, indices) of the last largest among x[:i + 1] along `dim`; NaN from the first one on."""
        return _running(self, dim, smallest=False)

    def cummin(self: Tensor, dim: int) -> ValuesAndIndices:
        """(values, indices) of the last smallest among x[:i + 1] along `dim`; NaN from the first one on."""
        return _running(self, dim, smallest=True)

    def logcumsumexp(self: Tensor, dim: int) -> Tensor:
        """out[i] = log Σ exp(x[:i + 1]) along `dim`."""
        if not self.dtype.is_float:
            raise TypeError(f"logcumsumexp needs a float tensor, not {self.dtype.name}; cast with .float() first")
        x, d, out = _prepared(self, dim, None)
        if not x.ndim:
            return self._copied()
        total = scanned(x, d, -math.inf, lambda t: t.logsumexp(-1), lambda a, b: a.logaddexp(b))

        def backward(g: Tensor, x: Tensor) -> tuple[Tensor]:
            size, whole = g.abs().log(), x.logcumsumexp(d)
            parts = [
                _backwards(keep._where(size - whole, -math.inf), d, lambda t: t.logcumsumexp(d))
                for keep in (g > 0, g < 0)
            ]
            return ((parts[0] + x).exp() - (parts[1] + x).exp(),)

        return with_gradient(total, "logcumsumexp", d, backward, x).cast(out)

    def diff(
        self: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
    ) -> Tensor:
        """x[i + 1] − x[i] along `dim`, n times, of what `prepend` and `append` add to it, too (if n is not 0); of bools
        whether they differ."""
        if not self.ndim:
            raise ValueError("diff needs at least 1 dim")
        if n < 0:
            raise ValueError(f"diff: n is at least 0, not {n}")
        d = self._dim(dim)
        if n == 0:
            return self._copied()
        parts = [t for t in (prepend, self, append) if t is not None]
        x = parts[0].cat(*parts[1:], dim=d) if len(parts) > 1 else self
        for _ in range(min(n, x.shape[d])):
            size = x.shape[d]
            late, early = x._take(d, min(1, size), size), x._take(d, 0, max(size - 1, 0))
            x = late ^ early if x.dtype.is_bool else late - early
        return x if x is not self else x._copied()


def _prepared(self: Tensor, dim: int, dtype: DType | str | None) -> tuple[Tensor, int, DType]:
    out = to_dtype(dtype) if dtype is not None else self.dtype if self.dtype.is_float else dtypes.int64
    return self.cast(accumulate_dtype(out)), self._dim(dim), out


def _cumprod_gradient(g: Tensor, x: Tensor, d: int) -> Tensor:
    """Before the first 0: Σ of what follows / x. At it: the same with it left out. After it: 0."""
    zeros = x.eq(0).long().cumsum(d)
    first = x.eq(0) & zeros.eq(1)
    whole, without = x.cumprod(d), first._where(1.0, x).cumprod(d)
    after = _backwards(g * whole, d, lambda t: t.cumsum(d))
    at = _backwards(g * without, d, lambda t: t.cumsum(d))
    return running(zeros.eq(0)._where(after / x.eq(0)._where(1.0, x), first._where(at, 0.0)), g, x, d)


def _running(self: Tensor, dim: int, smallest: bool) -> ValuesAndIndices:
    d = self._dim(dim)
    if not self.ndim:
        return ValuesAndIndices(self._copied(), self.zeros_like(dtype=dtypes.int64))
    x = self if not smallest else -self if self.dtype.is_float else self.bitwise_not()
    run = scanned(x, d, x.dtype.min, lambda t: t._reduce(Ops.MAX, -1, False), lambda a, b: a.maximum(b))
    values = run if not smallest else -run if self.dtype.is_float else run.bitwise_not()
    found = x.eq(run) | x.isnan() if x.dtype.is_float else x.eq(run)
    places = found._where(self._places(d), -1)
    indices = scanned(places, d, -1, lambda t: t._reduce(Ops.MAX, -1, False), lambda a, b: a.maximum(b))
    if self.dtype.is_float:

        def backward(g: Tensor, x: Tensor) -> tuple[Tensor]:
            return (x.zeros_like().scatter_add(d, _running(x, d, smallest).indices, g),)

        values = with_gradient(values, "cummin" if smallest else "cummax", d, backward, self)
    return ValuesAndIndices(values, indices)
