"""Norms of vectors and matrices."""

from __future__ import annotations

import math
from typing import Any

from manygrad.tensor.dtype import DType
from manygrad.tensor.tensor import Tensor

Order = float | str


def vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: DType | str | None = None
) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) for p = `ord` over one or several dims (default: all of them): inf is the largest, −inf the
    smallest, 0 the count of those not 0. `dtype`: cast to first.

    TypeError for whole numbers; ValueError where the norm of no elements is not defined.
    """
    if isinstance(ord, str):
        raise TypeError(f"vector_norm: ord is a number, not {ord!r}; matrix_norm takes names")
    if isinstance(dim, (tuple, list)) and not dim:
        dim = None
    axes = x._axes(dim)
    if (ord < 0 or ord == math.inf) and any(x.shape[d] == 0 for d in axes):
        raise ValueError(f"vector_norm: of no elements there is no norm of order {ord}; shape {x.shape}, dim {dim}")
    return x.norm(float(ord), dim, keepdim, dtype)


def matrix_norm(
    a: Tensor, ord: Order = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: DType | str | None = None
) -> Tensor:
    """A norm of the matrices in two dims: (...). "fro" √Σ a²; "nuc" the sum of the singular values, 2 the largest, −2
    the smallest; 1 the largest sum of magnitudes of a column, −1 the smallest; inf, −inf of a row. `dtype`: cast
    to first.

    ValueError for other orders, for dims that are not two, and where no elements have no norm.
    """
    if not isinstance(dim, (tuple, list)) or len(dim) != 2:
        raise ValueError(f"matrix_norm: dim is two dims, not {dim!r}")
    if a.ndim < 2:
        raise ValueError(f"matrix_norm: expected matrices (..., m, n), got shape {a.shape}")
    x = a if dtype is None else a.cast(dtype)
    if not x.dtype.is_float:
        raise TypeError(f"matrix_norm needs a float tensor, not {x.dtype.name}; cast with .float() first")
    rows, columns = (x._dim(d) for d in dim)
    if rows == columns:
        raise ValueError(f"matrix_norm: dim {tuple(dim)} of {x.shape} is the same dim twice")
    if ord == "fro":
        return x.norm(2.0, (rows, columns), keepdim)
    if ord == "nuc":
        return x.norm("nuc", (rows, columns), keepdim)
    if isinstance(ord, str) or abs(ord) not in (1, 2, math.inf):
        raise ValueError(f'matrix_norm: ord is "fro", "nuc", inf, -inf, 1, -1, 2 or -2, not {ord!r}')
    if abs(ord) == 2:
        from manygrad.tensor.linalg.jacobi import svdvals

        s = svdvals(x.movedim((rows, columns), (-2, -1)))
        if not s.shape[-1]:
            if ord < 0:
                raise ValueError(f"matrix_norm: of no elements there is no norm of order {ord}; shape {a.shape}")
            return x.norm(2.0, (rows, columns), keepdim)  # (0)
        out = s[..., 0] if ord > 0 else s[..., -1]
        return out.reshape(tuple(1 if i in (rows, columns) else n for i, n in enumerate(x.shape))) if keepdim else out
    summed, compared = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = x.abs().sum(summed, keepdim=True)
    if not x.shape[compared]:
        if ord < 0:
            raise ValueError(f"matrix_norm: of no elements there is no norm of order {ord}; shape {a.shape}")
        return sums.sum(compared, keepdim=True) if keepdim else sums.sum((rows, columns))  # (0)
    out = sums.amax(compared, keepdim=True) if ord > 0 else sums.amin(compared, keepdim=True)
    return out if keepdim else out._without((rows, columns))


def norm(
    a: Tensor, ord: Order | None = None, dim: Any = None, keepdim: bool = False, *, dtype: DType | str | None = None
) -> Tensor:
    """`vector_norm` over one dim, `matrix_norm` over two. Without `dim`, of a vector or a matrix; without `ord` too,
    the root of the sum of all squares.

    ValueError for other dims, and for an `ord` of a tensor with neither one nor two dims.
    """
    if ord is None:
        return vector_norm(a, 2, dim, keepdim, dtype=dtype)
    dims = (dim,) if isinstance(dim, int) else tuple(range(a.ndim)) if dim is None else tuple(dim)
    if len(dims) not in (1, 2):
        raise ValueError(f"norm: of order {ord!r} there are norms over one dim or two, not over {dim} of {a.shape}")
    if len(dims) == 1 and not isinstance(ord, str):
        return vector_norm(a, ord, dims[0], keepdim, dtype=dtype)
    return matrix_norm(a, ord, dims, keepdim, dtype=dtype)
