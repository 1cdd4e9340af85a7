"""Distances and similarities of vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manygrad.tensor.dtype import dtypes

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class DistanceMixin:
    def cdist(self: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
        """The p-norms of the differences of all pairs of rows: (..., P, M) and (..., R, M) -> (..., P, R).

        Differences are summed up without being stored, so there is one way of computing: `compute_mode` changes
        nothing. The gradient at equal rows is 0. TypeError for whole numbers; ValueError where shapes do not fit and
        for a negative p.
        """
        if self.ndim < 2 or x2.ndim < 2 or self.shape[-1] != x2.shape[-1]:
            raise ValueError(f"cdist: expected (..., P, M) and (..., R, M), got {self.shape} and {x2.shape}")
        if not p >= 0:
            raise ValueError(f"cdist: p is not negative, got {p}")
        return (self.unsqueeze(-2) - x2.unsqueeze(-3)).norm(p, -1)


def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    """‖x1 − x2 + eps‖ₚ over the last dim."""
    return (x1 - x2 + eps).norm(p, -1, keepdim)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """x1 · x2 / (max(‖x1‖, eps) · max(‖x2‖, eps)) along `dim`."""
    x, y = x1._floats(x2)
    return (x / x.norm(2, dim, keepdim=True).clamp(min=eps) * (y / y.norm(2, dim, keepdim=True).clamp(min=eps))).sum(
        dim
    )


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """(N, M) -> (N·(N − 1) / 2,): the distances of all pairs of rows i < j, in order."""
    if input.ndim != 2:
        raise ValueError(f"pdist needs a matrix, the input has shape {input.shape}")
    n = input.shape[0]
    if n < 2:
        return input.reshape(-1)._take(0, 0, 0)
    k = input.arange(n * (n - 1) // 2)
    b = 2 * n - 1  # row i starts at i·(2n − 1 − i) / 2
    i = ((b - (b * b - 8 * k.cast(dtypes.float64)).sqrt()) * 0.5).floor().cast(dtypes.int64)
    i = (i + 1).mul(b - (i + 1)).div(2, rounding_mode="floor").le(k)._where(i + 1, i)  # where the root was rounded down
    j = k - i * (b - i) // 2 + i + 1
    return (input[i] - input[j]).norm(p, -1)
