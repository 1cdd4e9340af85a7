"""Where a mask holds: selecting, filling in order, positions.

How many elements a mask selects is known only once it is computed. So `x[mask]`, `masked_select` and `nonzero` count on
the host: they realize the mask, which waits for it (one read of a number). They raise inside a TinyJit that records and
for tensors on several workers; `size=` gives the number beforehand and keeps them lazy: more places than that are left
out, missing ones hold `fill_value`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.broadcast import broadcast_shape

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class MaskingMixin:
    def _count_now(self: Tensor, name: str, instead: str = "size=") -> int:
        """The value of a 0-d count, read on the host now."""
        if isinstance(self.device, tuple) and any("@" in d for d in self.device):
            raise RuntimeError(
                f"{name}: the shape of the result depends on data that lies on several workers; "
                f"pass {instead}, or use a fixed shape (where, masked_fill)"
            )
        try:
            return int(self.item())
        except RuntimeError as error:
            raise RuntimeError(
                f"{name}: the shape of the result depends on data, which cannot be read here; "
                f"pass {instead}, or use a fixed shape ({error})"
            ) from None

    def _true_positions(self: Tensor, name: str, size: int | None, fill: int | None = None) -> Tensor:
        """(size,): positions of True in the flat mask, in order;
        `fill` (default: one past the end) where there are fewer than `size`."""
        flat = self.cast(dtypes.bool).flatten()
        n = flat.shape[0]
        rank = flat.cast(dtypes.int64).cumsum(0)
        if size is None and n:
            if flat.uop.device is not None:
                flat, rank = flat.contiguous(), rank.contiguous()
                flat.realize(rank)  # with the count, so that neither is computed again
            size = rank[n - 1]._count_now(name)
        size = size or 0
        base = self._const_like(n if fill is None else fill, dtypes.int64)._broadcast((size,))
        if not size or not n:
            return base
        return base._scatter_at(self.arange(n), [flat._where(rank - 1, size)], "place")

    def _without_masks(self: Tensor, tensors: dict[int, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
        """(self with the dims of each mask as one, index tensors with the positions where the masks hold)."""
        view, out, joined = self, {}, 0
        for d in sorted(tensors):
            t, at = tensors[d], d - joined
            if t.dtype.is_bool:
                view = view.flatten(at, at + t.ndim - 1)
                joined += t.ndim - 1
                t = t._true_positions("indexing with a mask", None)
            out[at] = t
        return view, out

    def masked_select(self: Tensor, mask: Tensor, *, size: int | None = None, fill_value: float = 0) -> Tensor:
        """(count,): the elements where `mask` holds, both broadcast, in order."""
        if not mask.dtype.is_bool:
            raise TypeError(f"masked_select: the mask must be bool, not {mask.dtype.name}")
        shape = broadcast_shape(self.shape, mask.shape)
        at = mask._broadcast(shape)._true_positions("masked_select", size)
        flat = self._broadcast(shape).flatten()
        out = flat._gather({0: at})
        return (
            out
            if size is None or not fill_value
            else (at < flat.shape[0])._where(out, self._const_like(fill_value, self.dtype))
        )

    def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        """A copy with the elements where `mask` holds taken from the flat `source`, in order."""
        if not mask.dtype.is_bool or source.dtype is not self.dtype:
            raise TypeError(
                f"masked_scatter: needs a bool mask and a source of {self.dtype.name}, "
                f"got {mask.dtype.name} and {source.dtype.name}"
            )
        shape = broadcast_shape(self.shape, mask.shape)
        x, hit = self._broadcast(shape), mask._broadcast(shape)
        if not x.numel():
            return x
        rank = hit.flatten().cast(dtypes.int64).cumsum(0).reshape(shape) - 1
        return hit._where(source.flatten()._gather({0: rank}), x)

    def nonzero(self: Tensor, *, as_tuple: bool = False, size: int | None = None, fill_value: int = -1) -> Any:
        """(count, ndim): the places of the elements that are not 0, row by row; `as_tuple`: one tensor per dim."""
        mask = self if self.dtype.is_bool else self.ne(0)
        at = mask._true_positions("nonzero", size)
        total, columns = at, []
        for d in reversed(self.shape or (1,)):
            columns.append(at % max(d, 1))
            at = at // max(d, 1)
        if size is not None:
            columns = [(total < self.numel())._where(c, fill_value) for c in columns]
        columns = columns[::-1]
        if as_tuple:
            return tuple(columns)
        return columns[0].stack(*columns[1:], dim=1)._take(1, 0, self.ndim)

    def argwhere(self: Tensor) -> Tensor:
        return self.nonzero()

    def nonzero_static(self: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
        """`nonzero` of exactly `size` rows, the missing ones `fill_value`; lazy."""
        return self.nonzero(size=size, fill_value=fill_value)
