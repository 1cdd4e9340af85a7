"""One place or a range along a dim: read as a view, or written into a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class SlicingMixin:
    def _take(self: Tensor, dim: int, begin: Any, end: Any) -> Tensor:
        return self.shrink(tuple((begin, end) if i == dim else None for i in range(self.ndim)))

    def narrow(self: Tensor, dim: int, start: Any, length: int) -> Tensor:
        """[start, start + length) along `dim`; a negative start counts from the end."""
        d = self._dim(dim)
        if not self.ndim:
            raise ValueError("narrow: a tensor without dims has nothing to cut")
        n = self.shape[d]
        if hasattr(start, "numpy"):
            if not start.dtype.is_int:
                raise TypeError(f"narrow: start is a whole number, not a {start.dtype.name} tensor")
            start = int(start.item())
        begin = start + n if isinstance(start, int) and start < 0 else start
        if isinstance(begin, int) and isinstance(n, int) and not (0 <= begin and 0 <= length and begin + length <= n):
            raise IndexError(
                f"narrow: [{start}, {start} + {length}) is outside dim {d} of size {n}, shape {self.shape}"
            )
        return (
            self._take(d, begin, begin + length)
            if isinstance(begin, int)
            else self[(slice(None),) * d + (slice(begin, begin + length),)]
        )

    def narrow_copy(self: Tensor, dim: int, start: Any, length: int) -> Tensor:
        """`narrow` as a copy."""
        return self.narrow(dim, start, length)._copied()

    def select(self: Tensor, dim: int, index: Any) -> Tensor:
        """The slice at `index` of `dim`, without that dim."""
        if not self.ndim:
            raise IndexError("select: a tensor without dims has nothing to select from")
        return self[(slice(None),) * self._dim(dim) + (index,)]

    def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
        """A copy whose `select(dim, index)` is `src`."""
        d = self._dim(dim)
        n = self.shape[d]
        if not -n <= index < n:
            raise IndexError(f"select_scatter: index {index} is outside dim {d} of size {n}, shape {self.shape}")
        want = self.shape[:d] + self.shape[d + 1 :]
        if src.shape != want:
            raise ValueError(f"select_scatter: the slice has shape {want}, src {src.shape}")
        return self.arange(n)._along(d, self.ndim).eq(index % n)._where(src.cast(self.dtype).unsqueeze(d), self)

    def slice_scatter(
        self: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> Tensor:
        """A copy whose `[start:end:step]` along `dim` is `src`."""
        if step <= 0:
            raise ValueError(f"slice_scatter: step must be positive, got {step}")
        d = self._dim(dim)
        n = self.shape[d]
        begin, stop, _ = slice(start, end, step).indices(n)
        count = len(range(begin, stop, step))
        want = (*self.shape[:d], count, *self.shape[d + 1 :])
        if src.shape != want:
            raise ValueError(f"slice_scatter: the slice has shape {want}, src {src.shape}")
        if not count:
            return self._copied()
        # each element of src, then step - 1 zeros; moved to where the slice begins
        wide = (
            src.cast(self.dtype)
            .unsqueeze(d + 1)
            ._pad_constant(tuple((0, step - 1 if i == d + 1 else 0) for i in range(self.ndim + 1)), 0)
        )
        wide = wide.reshape(*self.shape[:d], count * step, *self.shape[d + 1 :])._take(d, 0, (count - 1) * step + 1)
        wide = wide._pad_constant(
            tuple((begin, n - begin - wide.shape[d]) if i == d else (0, 0) for i in range(self.ndim)), 0
        )
        at = self.arange(n)
        hit = (at >= begin) & (at < stop) & ((at - begin) % step).eq(0)
        return hit._along(d, self.ndim)._where(wide, self)
