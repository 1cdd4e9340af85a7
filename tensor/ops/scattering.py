"""Writing at positions that are data, into a copy: set, add, multiply, mean, minimum, maximum.

Work is proportional to what is written, plus the copy. Of several values that are set at one place the last one stays,
in the row-major order of the index (what a loop over it would leave, and NumPy for an index of one dim), for any number
of threads and devices; the others have no gradient. So what may meet at one place is written in turn, on one thread:
rows are, the elements of a row are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.ops.checking import checked

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


class ScatteringMixin:
    def scatter(
        self: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: str | None = None
    ) -> Tensor:
        """self with src[i][j] (or one number) at [index[i][j]][j] for dim 0;
        `reduce="add"` or `"multiply"` combines it with what is there."""
        src = value if src is None else src
        if src is None:
            raise TypeError("scatter: pass src, a tensor or a number")
        if reduce not in (None, "add", "multiply"):
            raise ValueError(f'scatter: reduce is None, "add" or "multiply", not {reduce!r}; scatter_reduce knows more')
        return self._scatter_along("scatter", dim, index, src, {None: "set", "add": "add", "multiply": "mul"}[reduce])

    def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
        """self with src[i][j] added at [index[i][j]][j] for dim 0."""
        return self._scatter_along("scatter_add", dim, index, src, "add")

    def scatter_reduce(
        self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
    ) -> Tensor:
        """Each element reduced ("sum", "prod", "mean", "amax", "amin") with the src elements whose index names it.

        `include_self=False`: places that are named forget what they held.
        """
        if reduce not in REDUCTIONS:
            raise ValueError(f"scatter_reduce: reduce is one of {REDUCTIONS}, not {reduce!r}")
        return self._scatter_along("scatter_reduce", dim, index, src, reduce, include_self)

    def _scatter_along(
        self: Tensor, name: str, dim: int, index: Tensor, src: Any, how: str, include_self: bool = True
    ) -> Tensor:
        d = self._dim(dim)
        if self.ndim == 0:
            wide = src.reshape(1) if hasattr(src, "uop") else src
            return self.reshape(1)._scatter_along(name, 0, index.reshape(1), wide, how, include_self).reshape(())
        if not index.numel():
            if not (hasattr(src, "uop") and self.dtype.is_float):
                return self._copied()
            none = src.shrink(tuple((0, n) for n in index.shape)).sum()  # 0, of which src has a gradient, of zeros
            return self - none.cast(self.dtype)
        picks = self._picks(name, d, checked(index, f"{name}: index", self.shape[d], self))
        if hasattr(src, "uop"):
            if src.dtype is not self.dtype:
                raise TypeError(f"{name}: src is {src.dtype.name}, the tensor {self.dtype.name}; cast one")
            if src.ndim != self.ndim or any(a > b for a, b in zip(index.shape, src.shape)):
                raise ValueError(f"{name}: src of shape {src.shape} does not cover the index, {index.shape}")
            value = src.shrink(tuple((0, n) for n in index.shape))
        else:
            value = self._const_like(src, self.dtype)._broadcast(index.shape)
        indices = [picks[i].cast(dtypes.int64)._broadcast(index.shape) for i in range(self.ndim)]
        return _reduced_at(self, value, indices, how, include_self)

    # *** whole slices ***

    def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
        """self with alpha · source[i] added to the slice index[i] along `dim`."""
        return self._index_along("index_add", dim, index, source if alpha == 1 else source * alpha, "add")

    def index_copy(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        """self with the slices index[i] along `dim` replaced by source[i]."""
        return self._index_along("index_copy", dim, index, source, "set")

    def index_reduce(
        self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
    ) -> Tensor:
        """self with source[i] reduced ("prod", "mean", "amax", "amin") into the slice index[i] along `dim`."""
        if reduce not in REDUCTIONS[1:]:
            raise ValueError(f"index_reduce: reduce is one of {REDUCTIONS[1:]}, not {reduce!r}")
        return self._index_along("index_reduce", dim, index, source, reduce, include_self)

    def index_fill(self: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
        """self with the slices at `index` along `dim` filled with `value`, a number or 0-d tensor."""
        if hasattr(value, "uop") and value.ndim:
            raise ValueError(f"index_fill: value is a number or a tensor without dims, not one of shape {value.shape}")
        d = self._dim(dim)
        filled = value.cast(self.dtype) if hasattr(value, "uop") else self._const_like(value, self.dtype)
        if self.ndim == 0:
            return self._index_along("index_fill", dim, index, filled.reshape(1), "set")
        # (written twice, an element is still one: so is its gradient)
        hit = self._const_like(0, dtypes.int32)._broadcast((self.shape[d],))
        hit = hit._index_along(
            "index_fill", 0, index, hit._const_like(1, dtypes.int32)._broadcast((index.numel(),)), "set"
        )
        return hit.ne(0)._along(d, self.ndim)._where(filled._broadcast(self.shape), self)

    def _index_along(
        self: Tensor, name: str, dim: int, index: Tensor, source: Tensor, how: str, include_self: bool = True
    ) -> Tensor:
        d = self._dim(dim)
        if self.ndim == 0:
            return self.reshape(1)._index_along(name, 0, index, source.reshape(1), how, include_self).reshape(())
        at = index.reshape(-1) if index.ndim == 0 else index
        if at.ndim != 1 or not at.dtype.is_int:
            raise ValueError(
                f"{name}: the index is a 1-d integer tensor, not {index.dtype.name} of shape {index.shape}"
            )
        source = source.unsqueeze(0) if source.ndim == 0 and self.ndim == 1 else source
        want = tuple(at.shape[0] if i == d else n for i, n in enumerate(self.shape))
        if source.shape != want:
            raise ValueError(
                f"{name}: {at.shape[0]} slices along dim {d} of {self.shape} have shape {want}, source {source.shape}"
            )
        if source.dtype is not self.dtype:
            raise TypeError(f"{name}: source is {source.dtype.name}, the tensor {self.dtype.name}; cast one")
        if not source.numel():
            return self._copied()
        base, value = self.movedim(d, 0), source.movedim(d, 0)
        return _reduced_at(
            base,
            value,
            [checked(at, f"{name}: index", self.shape[d], self, None)._positions(self.shape[d])],
            how,
            include_self,
        ).movedim(0, d)

    # *** any places ***

    def index_put(self: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Tensor:
        """A copy with `values` set or added at self[indices];
        `indices` is a tuple of index tensors, masks or None (all of that dim)."""
        view, tensors = self._basic(tuple(slice(None) if i is None else i for i in indices))
        return view._put(view._checked(tensors), values.cast(self.dtype), "add" if accumulate else "set")

    def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
        """A copy with the flat elements at `index` set to, or with added, the elements of `source`."""
        if index.numel() != source.numel():
            raise ValueError(f"put: {index.numel()} positions and {source.numel()} values; they must be equally many")
        if source.dtype is not self.dtype:
            raise TypeError(f"put: source is {source.dtype.name}, the tensor {self.dtype.name}; cast one")
        if not index.numel():
            return self._copied()
        flat = self.flatten()
        return flat._scatter_at(
            source.flatten(),
            [checked(index.flatten(), "put: index", self.numel(), self, None)._positions(self.numel())],
            "add" if accumulate else "set",
        ).reshape(self.shape)


def _reduced_at(base: Tensor, value: Tensor, indices: list[Tensor], how: str, include_self: bool) -> Tensor:
    """`how`: a way of SCATTER ("set", "add", "mul") or a name of `REDUCTIONS`."""
    kind = base.dtype
    if not include_self:
        start = {"prod": 1, "amax": kind.min, "amin": kind.max}.get(how, 0)
        base = base._scatter_at(base._const_like(start, kind)._broadcast(value.shape), indices, "set")
    if how in ("amax", "amin"):
        if how == "amax":
            return base._scatter_at(value, indices, "max")
        if kind.is_float:
            return -((-base)._scatter_at(-value, indices, "max"))
        return base.bitwise_not()._scatter_at(value.bitwise_not(), indices, "max").bitwise_not()
    total = base._scatter_at(value, indices, {"sum": "add", "mean": "add", "prod": "mul"}.get(how, how))
    if how != "mean":
        return total
    one = base._const_like(1, kind if kind.is_float else dtypes.int64)
    count = one._broadcast(base.shape)
    if not include_self:  # places named by no value keep what they held
        count = count._scatter_at(base._const_like(0, count.dtype)._broadcast(value.shape), indices, "set")
    count = count._scatter_at(one._broadcast(value.shape), indices, "add")
    return total / count if kind.is_float else total.floor_divide(count.cast(kind))
