"""Diagonals: read as views, embedded in zeros, written; triangles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, dtypes, to_dtype

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class DiagonalMixin:
    def diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """The elements [.., i, .., i + offset, ..] as a last dim: a view."""
        a, b = self._two_dims("diagonal", dim1, dim2)
        t = self.movedim((a, b), (-2, -1))
        rows, cols = t.shape[-2:]
        n = max(min(rows + min(offset, 0), cols - max(offset, 0)), 0)
        if n == 0:
            return t._take(t.ndim - 2, 0, 0)._take(t.ndim - 1, 0, 1 if cols else 0).reshape(*t.shape[:-2], 0)
        r, c = max(-offset, 0), max(offset, 0)
        t = t._take(t.ndim - 2, r, r + n)._take(t.ndim - 1, c, c + n)
        return self._strided(t.flatten(-2)._every(t.ndim - 2, n + 1))

    def _two_dims(self: Tensor, name: str, dim1: int, dim2: int) -> tuple[int, int]:
        if self.ndim < 2:
            raise ValueError(f"{name} needs at least 2 dims, got shape {self.shape}")
        a, b = self._dim(dim1), self._dim(dim2)
        if a == b:
            raise ValueError(f"{name}: dim1 and dim2 are both {a}; they must differ")
        return a, b

    def diag(self: Tensor, diagonal: int = 0) -> Tensor:
        """Matrix with a vector on a diagonal, or the diagonal of a matrix."""
        if self.ndim not in (1, 2):
            raise ValueError(f"diag is for 1 or 2 dims, not {self.shape}; use diagonal or diag_embed")
        return self.diag_embed(diagonal) if self.ndim == 1 else self.diagonal(diagonal)._copied()

    def diag_embed(self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        """(.., n) to matrices of side n + |offset| in dims `dim1`, `dim2` of the result, zero off the diagonal."""
        a, b = self._dim(dim1, 1), self._dim(dim2, 1)
        if a == b:
            raise ValueError(f"diag_embed: dim1 and dim2 are both {a}; they must differ")
        if a > b:
            a, b, offset = b, a, -offset
        n, k = self.shape[-1], abs(offset)
        # n rows of (x, n zeros) cut to n * n: row i starts one further right; then rows and columns for the offset
        t = (
            self.unsqueeze(-1)
            .pad((0, n))
            .reshape(*self.shape[:-1], n * (n + 1))
            ._take(self.ndim - 1, 0, n * n)
            .reshape(*self.shape[:-1], n, n)
        )
        t = t.pad((k, 0, 0, k) if offset > 0 else (0, k, k, 0)) if k else t
        return t.movedim((-2, -1), (a, b))

    def diagflat(self: Tensor, offset: int = 0) -> Tensor:
        """A matrix with the flat tensor on a diagonal."""
        return self.flatten().diag_embed(offset)

    def diagonal_scatter(self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
        """A copy whose `diagonal(offset, dim1, dim2)` is `src`."""
        a, b = self._two_dims("diagonal_scatter", dim1, dim2)
        rows, cols = self.shape[a], self.shape[b]
        n = max(min(rows + min(offset, 0), cols - max(offset, 0)), 0)
        want = (*(d for i, d in enumerate(self.shape) if i not in (a, b)), n)
        if src.shape != want:
            raise ValueError(f"diagonal_scatter: the diagonal has shape {want}, src {src.shape}")
        if n == 0:
            return self._copied()
        r, c = max(-offset, 0), max(offset, 0)
        wide = src.cast(self.dtype).diag_embed().pad((c, cols - n - c, r, rows - n - r)).movedim((-2, -1), (a, b))
        return self._on_diagonal(rows, cols, offset, a, b)._where(wide, self)

    def _on_diagonal(self: Tensor, rows: int, cols: int, offset: int, a: int, b: int) -> Tensor:
        return (self.arange(rows)._along(a, self.ndim) + offset).eq(self.arange(cols)._along(b, self.ndim))

    def fill_diagonal(self: Tensor, fill_value: bool | int | float, wrap: bool = False) -> Tensor:
        """A copy with `fill_value` at [i, i, ..]; `wrap` goes on below a tall matrix, after one row left out."""
        if self.ndim < 2 or (self.ndim > 2 and len(set(self.shape)) > 1):
            raise ValueError(f"fill_diagonal needs a matrix, or more dims all of one size; got {self.shape}")
        if self.ndim > 2:
            i = self.arange(self.shape[0])
            hit = i._along(0, self.ndim).eq(i._along(1, self.ndim))
            for d in range(2, self.ndim):
                hit = hit & i._along(0, self.ndim).eq(i._along(d, self.ndim))
        else:
            rows, cols = self.shape
            row = self.arange(rows) % (cols + 1) if wrap and rows > cols else self.arange(rows)
            hit = row.unsqueeze(1).eq(self.arange(cols).unsqueeze(0))
        return hit._where(self._const_like(fill_value, self.dtype), self)

    # *** triangles ***

    def triu(self: Tensor, diagonal: int = 0) -> Tensor:
        """Zeros below the diagonal of the last two dims."""
        return self._triangle(diagonal, upper=True)

    def tril(self: Tensor, diagonal: int = 0) -> Tensor:
        """Zeros above the diagonal of the last two dims."""
        return self._triangle(diagonal, upper=False)

    def _triangle(self: Tensor, diagonal: int, upper: bool) -> Tensor:
        if self.ndim < 2:
            raise ValueError(f"{'triu' if upper else 'tril'} needs at least 2 dims, got shape {self.shape}")
        row = self.arange(self.shape[-2]).unsqueeze(1)
        col = self.arange(self.shape[-1]).unsqueeze(0)
        keep = col >= row + diagonal if upper else col <= row + diagonal
        return keep._where(self, self._const_like(0, self.dtype))

    @staticmethod
    def tril_indices(
        row: int, col: int, offset: int = 0, *, dtype: DType | str = dtypes.int64, device: Any = None
    ) -> Tensor:
        """(2, n): the rows and columns of the lower triangle of a (row, col) matrix, row by row."""
        return _triangle_indices(
            [(r, c) for r in range(row) for c in range(max(min(r + offset + 1, col), 0))], dtype, device
        )

    @staticmethod
    def triu_indices(
        row: int, col: int, offset: int = 0, *, dtype: DType | str = dtypes.int64, device: Any = None
    ) -> Tensor:
        """(2, n): the rows and columns of the upper triangle of a (row, col) matrix, row by row."""
        return _triangle_indices([(r, c) for r in range(row) for c in range(max(r + offset, 0), col)], dtype, device)


def _triangle_indices(pairs: list[tuple[int, int]], dtype: DType | str, device: Any) -> Tensor:
    import numpy as np

    from manygrad.tensor.tensor import Tensor

    return Tensor(np.array(pairs, dtype=np.int64).reshape(-1, 2).T, dtype=to_dtype(dtype), device=device)
