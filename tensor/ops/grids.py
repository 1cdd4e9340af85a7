"""Grids of coordinates, products and combinations of 1-d tensors."""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement
from typing import TYPE_CHECKING, Any

import numpy as np

from manygrad.tensor.ops.joining import one_dtype

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class GridsMixin:
    def meshgrid(self: Any, *others: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
        """For 1-d (or 0-d) tensors of sizes (n0, n1, ..) one view of shape (n0, n1, ..) each;
        "xy" swaps the first two dims."""
        tensors = [
            t.reshape(-1) if t.ndim == 0 else t
            for t in (list(self) if isinstance(self, (list, tuple)) else [self, *others])
        ]
        if indexing not in ("ij", "xy"):
            raise ValueError(f'meshgrid: indexing is "ij" or "xy", not {indexing!r}')
        if any(t.ndim != 1 for t in tensors):
            raise ValueError(f"meshgrid takes 1-d tensors, got shapes {[t.shape for t in tensors]}")
        shape = tuple(t.shape[0] for t in tensors)
        out = tuple(t._along(i, len(tensors))._broadcast(shape) for i, t in enumerate(tensors))
        return tuple(t.transpose(0, 1) for t in out) if indexing == "xy" and len(out) > 1 else out

    def cartesian_prod(self: Any, *others: Any) -> Tensor:
        """Rows of one element of each of the 1-d tensors, the last one fastest; of a single tensor, itself."""
        tensors = list(self) if isinstance(self, (list, tuple)) else [self, *others]
        if len(tensors) == 1:
            return tensors[0]
        columns = [t.flatten() for t in GridsMixin.meshgrid(one_dtype(tensors))]
        return columns[0].stack(*columns[1:], dim=1)

    def combinations(self: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
        """All choices of `r` elements of a 1-d tensor as rows, in the order of their positions."""
        if self.ndim != 1 or r < 0:
            raise ValueError(f"combinations of {r} of a tensor of shape {self.shape}: it takes a 1-d tensor and r >= 0")
        choose = combinations_with_replacement if with_replacement else combinations
        rows = np.array(list(choose(range(self.shape[0]), r)), dtype=np.int64).reshape(-1, r)
        if r == 0 or not rows.size:
            return self._take(0, 0, 0).reshape(0, r) if r else self._take(0, 0, 0)
        return self[self._listed_index(rows)]
