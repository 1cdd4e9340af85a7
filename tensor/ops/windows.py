"""Windows onto a tensor: every window of a convolution, `unfold`, and arbitrary strides."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class WindowsMixin:
    def unfold(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
        """Every window of `size` along a dim, `step` apart: (.., n, ..) to (.., (n - size) // step + 1, .., size);
        a view."""
        if not self.ndim:
            self._dim(dimension)
            if size > 1 or step <= 0:
                raise ValueError(f"unfold: a window of {size} is larger than a tensor without dims")
            return self.reshape(1)._take(0, 0, size)
        d = self._dim(dimension)
        n = self.shape[d]
        if step <= 0 or not 0 <= size <= n:
            raise ValueError(
                f"unfold: windows of {size}, {step} apart, along dim {d} of {self.shape}: "
                f"the size must be at most {n}, the step positive"
            )
        count = (n - size) // step + 1
        if size == 0 or prod(self.shape) == 0:
            return self.flatten()._take(0, 0, 0).reshape(*self.shape[:d], count, *self.shape[d + 1 :], size)
        # chunks of `step` that a window reaches over: so the gradient adds per · n values, not size · n
        per = -(-size // step)
        t, need = self.movedim(d, -1), (count - 1 + per) * step
        t = t.pad((0, need - n)) if need > n else t._take(t.ndim - 1, 0, need)
        # (.., step, count, per)
        t = t.unflatten(-1, (count - 1 + per, step)).transpose(-1, -2).unfold_windows((per,), (1,), (1,))
        return self._strided(t.movedim(-3, -1).flatten(-2)._take(self.ndim, 0, size).movedim(-2, d))

    def unfold_windows(
        self: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
    ) -> Tensor:
        """(..., *spatial) -> (..., *out, *kernel): every window of a convolution or pooling, as a view.

        Repeats each spatial dim so that a reshape with a dim one longer shifts the window by one per row
        (no data moves).
        """
        n = len(kernel)
        lead, spatial = self.shape[:-n], self.shape[-n:]
        for size, k, d in zip(spatial, kernel, dilation):
            if size < d * (k - 1) + 1:
                raise ValueError(
                    f"window {kernel} (dilation {dilation}) is larger than the input's {spatial}; "
                    "add padding or take a smaller window"
                )
        outs = [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(spatial, kernel, stride, dilation)]
        t = self
        for i, (k, s, d, o) in enumerate(zip(kernel, stride, dilation, outs)):
            axis = len(lead) + i
            size = t.shape[axis]
            times = -(-k * (size + d) // size)
            before, after = t.shape[:axis], t.shape[axis + 1 :]
            t = (
                t.reshape(*before, 1, size, *after)
                .expand(*before, times, size, *after)
                .reshape(*before, times * size, *after)
            )
            t = t._take(axis, 0, k * (size + d)).reshape(*before, k, size + d, *after)
            need = s * (o - 1) + 1
            t = t._take(axis + 1, 0, need)
            if s > 1:
                t = t.pad(tuple((0, s * o - need) if j == axis + 1 else (0, 0) for j in range(t.ndim)))
                t = t.reshape(*before, k, o, s, *after)._take(axis + 2, 0, 1).reshape(*before, k, o, *after)
            t = t.permute(*range(axis), axis + 1, *range(axis + 2, t.ndim), axis)
        return t

    def as_strided(self: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
        """out[i, j, ..] = flat[offset + i·stride[0] + j·stride[1] + ..], of the row-major elements of this tensor.

        A view where each stride steps over what the smaller ones span; else (windows that overlap) a read by position.
        """
        size, stride, offset = self._checked_strides("as_strided", size, stride, storage_offset)
        if prod(size) == 0:
            return self.flatten()._take(0, 0, 0).reshape(size)
        view = _nested(self.flatten(), size, stride, offset)
        return (
            self._strided(view)
            if view is not None
            else self.flatten()._gather({0: self._strided_positions(size, stride, offset)})
        )

    def as_strided_scatter(
        self: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: int | None = None
    ) -> Tensor:
        """A copy whose `as_strided(size, stride, storage_offset)` is `src`;
        of elements named twice, the last value stays."""
        size, stride, offset = self._checked_strides("as_strided_scatter", size, stride, storage_offset)
        if src.shape != size:
            raise ValueError(f"as_strided_scatter: src has shape {src.shape}, it is written to {size}")
        if prod(size) == 0:
            return self._copied()
        return (
            self.flatten()
            ._scatter_at(src.flatten(), [self._strided_positions(size, stride, offset).flatten()], "set")
            .reshape(self.shape)
        )

    def _checked_strides(
        self: Tensor, name: str, size: Any, stride: Any, storage_offset: int | None
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        size, stride, offset = tuple(size), tuple(stride), storage_offset or 0
        if len(size) != len(stride) or any(s < 0 for s in (*size, *stride)):
            raise ValueError(f"{name}: sizes {size} and strides {stride} must be equally many and not negative")
        last = offset + sum((n - 1) * s for n, s in zip(size, stride))
        if prod(size) and (offset < 0 or last >= self.numel()):
            raise ValueError(
                f"{name}: sizes {size}, strides {stride} and offset {offset} reach element {last} of {self.numel()}"
            )
        return size, stride, offset

    def _strided_positions(self: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
        at = self._const_like(offset, dtypes.int64).reshape((1,) * len(size))
        for d, (n, s) in enumerate(zip(size, stride)):
            at = at + self.arange(n)._along(d, len(size)) * s
        return at._broadcast(size)


def _nested(flat: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor | None:
    """The strided view by reshapes and slices, dims of larger stride first;
    None if a stride is within what smaller ones span."""
    dims = sorted((d for d in range(len(size)) if stride[d] and size[d] > 1), key=lambda d: -stride[d])
    t, length = flat, flat.shape[0]
    # t: (sizes so far.., length), of which the rest of the dims is to be read from `offset` on
    for k, d in enumerate(dims):
        n, s = size[d], stride[d]
        inner = sum((size[e] - 1) * stride[e] for e in dims[k + 1 :])
        q, offset = divmod(offset, s)
        if (q + n) * s > length or offset + inner >= s:
            return None
        t = t._take(k, q * s, (q + n) * s).reshape(*t.shape[:k], n, s)
        length = s
    t = t._take(len(dims), offset, offset + 1).squeeze(-1)
    t = t.permute([dims.index(d) for d in sorted(dims)])
    return t.reshape([size[d] if d in dims else 1 for d in range(len(size))])._broadcast(size)
