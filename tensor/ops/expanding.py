"""Dims of size 1 seen as larger ones, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.broadcast import broadcast_shape
from manygrad.tensor.ops.movement import _flat, _is_one

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class ExpandingMixin:
    def expand(self: Tensor, *shape: Any) -> Tensor:
        """Dims of size 1 repeated; -1 keeps a dim; new dims in front."""
        want = _flat(shape)
        have = (1,) * (len(want) - self.ndim) + self.shape
        if len(want) < self.ndim:
            raise ValueError(f"expand {self.shape} to {want}: fewer dims than it has")
        out = tuple(h if isinstance(w, int) and w == -1 else w for h, w in zip(have, want))
        for h, w in zip(have, out):
            if not _is_one(h) and h != w:
                raise ValueError(
                    f"expand {self.shape} to {out}: a dim of {h} cannot become {w}; only dims of size 1 expand"
                )
        return self._viewed_whole() if out == self.shape else self._broadcast(out)

    def expand_as(self: Tensor, other: Tensor) -> Tensor:
        return self.expand(other.shape)

    def broadcast_to(self: Tensor, shape: Any) -> Tensor:
        return self.expand(*shape)

    def broadcast_tensors(self: Any, *others: Any) -> tuple[Tensor, ...]:
        """Each expanded to the shape that all broadcast to."""
        tensors = list(self) if isinstance(self, (list, tuple)) else [self, *others]
        shape = broadcast_shape(*[t.shape for t in tensors])
        return tuple(t._broadcast(shape) for t in tensors)

    @staticmethod
    def broadcast_shapes(*shapes: Any) -> tuple[Any, ...]:
        """The shape that tensors of `shapes` broadcast to."""
        return broadcast_shape(*[(s,) if isinstance(s, int) else tuple(s) for s in shapes])

    def sum_to_size(self: Tensor, *size: Any) -> Tensor:
        """Summed over the dims in which `size` is 1 or has no dim:
        what broadcasting from `size` to this shape undoes."""
        want = _flat(size)
        lead = self.ndim - len(want)
        if lead < 0 or any(w != 1 and w != d for w, d in zip(want, self.shape[lead:])):
            raise ValueError(f"sum_to_size: {want} does not broadcast to {self.shape}")
        kept = tuple(i + lead for i, w in enumerate(want) if _is_one(w) and not _is_one(self.shape[i + lead]))
        dims = (*range(lead), *kept)
        if not dims and want:  # (bools that are not added up stay bools; without dims they are summed, as in PyTorch)
            return self.reshape(want)
        return self.sum(dims, keepdim=True, dtype=dtypes.int64 if self.dtype.is_bool else self.dtype).reshape(want)
