"""The same elements in another number of dims."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.ops.movement import _is_one

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class ReshapingMixin:
    def reshape_as(self: Tensor, other: Tensor) -> Tensor:
        return self.reshape(other.shape)

    def view_as(self: Tensor, other: Tensor) -> Tensor:
        return self.reshape(other.shape)

    def flatten(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Dims `start_dim` to `end_dim` as one."""
        if self.ndim == 0:
            return self.reshape(1)
        a, b = self._dim(start_dim), self._dim(end_dim)
        if a > b:
            raise ValueError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
        if a == b:
            return self
        return (
            self.reshape(*self.shape[:a], -1, *self.shape[b + 1 :])
            if prod(self.shape)
            else self.reshape(*self.shape[:a], prod(self.shape[a : b + 1]), *self.shape[b + 1 :])
        )

    def ravel(self: Tensor) -> Tensor:
        return self.flatten()

    def unflatten(self: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        """Dim `dim` as several of `sizes`, one of which may be -1."""
        d, parts = self._dim(dim), list(sizes)
        if parts.count(-1) == 1 and prod(s for s in parts if s != -1):
            parts[parts.index(-1)] = self.shape[d] // prod(s for s in parts if s != -1)
        if prod(parts) != self.shape[d] or any(s < 0 for s in parts):
            raise ValueError(f"unflatten: sizes {tuple(sizes)} do not multiply to dim {d} of {self.shape}")
        return self.reshape(*self.shape[:d], *parts, *self.shape[d + 1 :])

    def squeeze(self: Tensor, dim: int | tuple[int, ...] | list[int] | None = None) -> Tensor:
        """Without the dims of size 1: all of them, or those of `dim` that are."""
        if dim is None:
            return self.reshape(tuple(d for d in self.shape if not _is_one(d)))
        dims = self._axes(dim) if isinstance(dim, int) or dim else ()
        return self.reshape(tuple(d for i, d in enumerate(self.shape) if not (i in dims and _is_one(d))))

    def unsqueeze(self: Tensor, dim: int) -> Tensor:
        """A new dim of size 1 at `dim`."""
        d = self._dim(dim, 1)
        return self.reshape((*self.shape[:d], 1, *self.shape[d:]))

    def _along(self: Tensor, dim: int, ndim: int) -> Tensor:
        """A 1-d tensor along dim `dim` of `ndim`, the others of size 1."""
        return self.reshape((1,) * dim + (self.shape[0],) + (1,) * (ndim - 1 - dim))

    def atleast_1d(self: Any, *others: Any) -> Any:
        """As at least 1 dim; of several tensors or a list, each."""
        return _each(self, others, lambda t: t.reshape(1) if t.ndim == 0 else t)

    def atleast_2d(self: Any, *others: Any) -> Any:
        """As at least 2 dims: (n,) becomes (1, n)."""
        return _each(self, others, lambda t: t.reshape((1,) * (2 - t.ndim) + t.shape) if t.ndim < 2 else t)

    def atleast_3d(self: Any, *others: Any) -> Any:
        """As at least 3 dims: (n,) becomes (1, n, 1) and (m, n) becomes (m, n, 1)."""
        return _each(
            self,
            others,
            lambda t: (
                t.reshape((1, *t.shape, 1)[:3] if t.ndim == 1 else (*t.shape, 1) if t.ndim == 2 else (1, 1, 1))
                if t.ndim < 3
                else t
            ),
        )


def _each(first: Any, others: tuple[Any, ...], f: Any) -> Any:
    if isinstance(first, (list, tuple)):
        return tuple(f(t) for t in first)
    return tuple(f(t) for t in (first, *others)) if others else f(first)
