"""Reading at positions that are data: gather and its like. Gradients are scatter-adds into what was read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.checking import checked

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class GatheringMixin:
    def _picks(self: Tensor, name: str, dim: int, index: Tensor) -> dict[int, Tensor]:
        """For each dim of `self` the positions that element (i, j, ..) of `index` names: itself along `dim`, i, j, ..
        along the others."""
        if index.ndim != self.ndim:
            raise ValueError(
                f"{name}: index has {index.ndim} dims, the tensor {self.ndim}; shapes {index.shape} and {self.shape}"
            )
        if not index.dtype.is_int:
            raise TypeError(f"{name}: the index must be of integers, not {index.dtype.name}")
        wrong = next((i for i, (a, b) in enumerate(zip(index.shape, self.shape)) if i != dim and a > b), None)
        if wrong is not None:
            raise ValueError(
                f"{name}: the index, {index.shape}, is larger than the tensor, {self.shape}, in dim {wrong}; "
                f"only dim {dim} may be"
            )
        return {i: index if i == dim else self.arange(n)._along(i, self.ndim) for i, n in enumerate(index.shape)}

    def gather(self: Tensor, dim: int, index: Tensor) -> Tensor:
        """out[i][j] = self[index[i][j]][j] for dim 0: the shape of `index`."""
        return self._gather_along(
            dim, checked(index, "gather: index", self.shape[self._dim(dim)] if self.ndim else 1, self, None)
        )

    def _gather_along(self: Tensor, dim: int, index: Tensor) -> Tensor:
        """`gather` of positions that exist."""
        d = self._dim(dim)
        if (self.ndim, index.ndim) in ((0, 0), (0, 1), (1, 0)):  # a tensor without dims is as one of (1,)
            out = self.reshape(-1)._gather({0: index.reshape(-1)})
            return out.reshape(index.shape)
        if index.numel() == 0:
            return self.flatten()._take(0, 0, 0).reshape(index.shape)
        return self._gather(self._picks("gather", d, index))

    def take(self: Tensor, index: Tensor) -> Tensor:
        """Elements of the flat tensor, in the shape of `index`."""
        return self.flatten()._gather({0: checked(index, "take: index", self.numel(), self, None)})

    def take_along_dim(self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
        """`gather` with the dims other than `dim` broadcast; without `dim`, of the flat tensors."""
        if dim is None:
            return self.flatten().gather(0, indices.flatten())
        d = self._dim(dim)
        if indices.ndim != self.ndim:
            raise ValueError(f"take_along_dim: indices has {indices.ndim} dims, the tensor {self.ndim}")
        from manygrad.tensor.ops.broadcast import broadcast_shape

        common = broadcast_shape(*[tuple(1 if i == d else n for i, n in enumerate(t.shape)) for t in (self, indices)])
        x, at = (
            t._broadcast(tuple(t.shape[d] if i == d else n for i, n in enumerate(common))) for t in (self, indices)
        )
        return x.gather(d, at)

    def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
        """The slices along `dim` at the positions of the 1-d `index`."""
        d = self._dim(dim)
        if index.ndim > 1:
            raise ValueError(f"index_select: the index has 1 dim, not shape {index.shape}")
        if not index.dtype.is_int:
            raise TypeError(f"index_select: the index must be of integers, not {index.dtype.name}")
        if self.ndim == 0:
            return (
                self.reshape(1)
                ._gather({0: checked(index, "index_select: index", 1, self, None).reshape(-1)})
                .reshape(())
            )
        at = checked(index, "index_select: index", self.shape[d], self, None)
        return self._gather({d: at.reshape(-1) if at.ndim == 0 else at})

    def one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
        """1 at the position each element names along a new last dim, else 0; int64.
        Without `num_classes` the maximum is read on the host."""
        if not self.dtype.is_int:
            raise TypeError(f"one_hot: class numbers are integers, not {self.dtype.name}")
        if num_classes == -1:
            if not self.numel():
                raise ValueError("one_hot of an empty tensor needs num_classes")
            num_classes = self.amax()._count_now("one_hot", "num_classes=") + 1
        if num_classes < 1 and self.numel():
            raise ValueError(f"one_hot: num_classes must be positive, got {num_classes}")
        return (
            checked(self, "one_hot: class", num_classes, self)
            .unsqueeze(-1)
            .eq(self.arange(num_classes).cast(self.dtype))
            .cast(dtypes.int64)
        )
