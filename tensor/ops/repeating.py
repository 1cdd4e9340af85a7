"""Elements said again: tiles, repeats, rolls."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.movement import _flat

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class RepeatingMixin:
    def repeat(self: Tensor, *repeats: Any) -> Tensor:
        """The tensor tiled `repeats[i]` times along dim i; more repeats than dims add dims in front."""
        times = _flat(repeats)
        if len(times) < self.ndim or any(isinstance(r, int) and r < 0 for r in times):
            raise ValueError(f"repeat{times} of shape {self.shape}: one number, not negative, for each dim")
        shape = (1,) * (len(times) - self.ndim) + self.shape
        t = self.reshape(tuple(x for d in shape for x in (1, d)))
        return (
            t.expand(tuple(x for r, d in zip(times, shape) for x in (r, d)))
            .reshape(tuple(r * d for r, d in zip(times, shape)))
            ._copied()
        )

    def tile(self: Tensor, *dims: Any) -> Tensor:
        """`repeat` with 1 for the leading dims that `dims` leaves out."""
        times = _flat(dims)
        return self.repeat((1,) * (self.ndim - len(times)) + tuple(times))

    def repeat_interleave(self: Tensor, repeats: Any, dim: int | None = None, output_size: int | None = None) -> Tensor:
        """Each element `repeats` times in a row along `dim` (None: of the flat tensor);
        `repeats` is an int or one count per element.

        Counts in a tensor give a size that depends on data: they are summed on the host, unless `output_size` says it.
        """
        if dim is None:
            return self.flatten().repeat_interleave(repeats, 0, output_size)
        d = self._dim(dim)
        if isinstance(repeats, int) or not hasattr(repeats, "uop"):
            if not isinstance(repeats, int):
                return self.repeat_interleave(
                    self._listed_index(repeats), dim, sum(repeats) if output_size is None else output_size
                )
            if repeats < 0:
                raise ValueError(f"repeat_interleave: repeats must not be negative, got {repeats}")
            wide = (*self.shape[: d + 1], repeats, *self.shape[d + 1 :])
            return (
                self.unsqueeze(d + 1)
                ._broadcast(wide)
                .reshape(*self.shape[:d], self.shape[d] * repeats, *self.shape[d + 1 :])
                ._copied()
            )
        if not repeats.dtype.is_int or repeats.ndim > 1:
            raise ValueError(
                "repeat_interleave: repeats is an int or a 1-d integer tensor, "
                f"not {repeats.dtype.name} of shape {repeats.shape}"
            )
        counts = repeats.reshape(-1)._broadcast((self.shape[d],)) if repeats.numel() == 1 else repeats
        if counts.shape[0] != self.shape[d]:
            raise ValueError(f"repeat_interleave: {counts.shape[0]} counts for dim {d} of {self.shape}")
        ends = counts.cast(dtypes.int64).cumsum(0)
        total = (
            output_size
            if output_size is not None
            else (counts.sum()._count_now("repeat_interleave", "output_size=") if self.shape[d] else 0)
        )
        source = ends.searchsorted(self.arange(total), right=True)
        return self._gather({d: source})

    def roll(self: Tensor, shifts: int | tuple[int, ...], dims: int | tuple[int, ...] | None = None) -> Tensor:
        """Elements moved on by `shifts` along `dims`, around the end; without dims, of the flat tensor."""
        if dims is None or dims == ():
            if not isinstance(shifts, int) and len(shifts) != 1:
                raise ValueError(f"roll: shifts {shifts} need as many dims")
            return self.flatten().roll(shifts if isinstance(shifts, int) else shifts[0], 0).reshape(self.shape)
        by, along = ((x,) if isinstance(x, int) else tuple(x) for x in (shifts, dims))
        if len(by) != len(along):
            raise ValueError(f"roll: {len(by)} shifts for {len(along)} dims")
        if not self.ndim:
            raise IndexError(f"roll: dims {along} of a tensor without dims; leave dims out")
        t = self
        for s, dim in zip(by, along):
            d = t._dim(dim)
            n = t.shape[d] if t.ndim else 1
            k = s % n if n else 0
            if k and prod(t.shape):
                t = t._take(d, n - k, n).cat(t._take(d, 0, n - k), dim=d)
        return t._copied() if t is self else t
