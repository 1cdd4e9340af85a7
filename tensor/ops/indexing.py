"""Indexing: NumPy's basic and advanced rules for reading and writing; gathers are real gathers."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.ops.elementwise import broadcast_shape
from manygrad.tensor.source import mark
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.symbolic import add, as_index, to_sint

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def _is_sym(x: Any) -> bool:
    return isinstance(x, UOp)


class IndexingMixin:
    def __getitem__(self: Tensor, index: Any) -> Tensor:
        view, tensors = self._basic(index)
        return view._gather(tensors) if tensors else view

    def _basic(self: Tensor, index: Any) -> tuple[Tensor, dict[int, Tensor]]:
        """Slices, ints, None and Ellipsis applied as views; index tensors left, by dim of the view."""
        from manygrad.tensor.tensor import Tensor

        items = list(index) if isinstance(index, tuple) else [index]
        ellipses = [i for i, x in enumerate(items) if x is Ellipsis]
        if len(ellipses) > 1:
            raise IndexError("an index can hold only one Ellipsis")
        used = sum(1 for x in items if x is not None and x is not Ellipsis)
        if used > self.ndim:
            raise IndexError(f"{used} indices for a tensor of {self.ndim} dims, shape {self.shape}")
        at = ellipses[0] if ellipses else len(items)
        items[at : at + 1] = [slice(None)] * (self.ndim - used)
        bounds: list[tuple[Any, Any]] = []
        steps: list[int] = []
        layout: list[Any] = []  # per item: "new", "drop", "keep", or a Tensor
        for x in items:
            if x is None:
                layout.append("new")
                continue
            size = self.shape[len(bounds)]
            if isinstance(x, Tensor) or isinstance(x, (list, tuple)) or hasattr(x, "__array__"):
                t = x if isinstance(x, Tensor) else Tensor(x, device=self.device if isinstance(self.device, str) else None, dtype=dtypes.int64 if isinstance(x, (list, tuple)) and not x else None)
                if t.dtype.is_bool:
                    raise IndexError("a boolean mask as an index has a data-dependent shape; use mask.where(x, 0), or index with the positions you want")
                if not t.dtype.is_int:
                    raise IndexError(f"an index tensor must be of integers, not {t.dtype.name}")
                bounds.append((0, size))
                steps.append(1)
                layout.append(t)
            elif isinstance(x, slice):
                begin, end, step = self._slice(x, size)
                bounds.append((begin, end))
                steps.append(step)
                layout.append("keep")
            elif _is_sym(x):
                bounds.append((x, to_sint(add(as_index(x), 1)) if x.op is not Ops.BIND else _plus(x, 1)))
                steps.append(1)
                layout.append("drop")
            elif isinstance(x, int) or hasattr(x, "__index__"):
                i = x.__index__()
                if isinstance(size, int) and not -size <= i < size:
                    raise IndexError(f"index {i} is outside dim {len(bounds)} of size {size}, shape {self.shape}")
                i = i + size if i < 0 else i
                bounds.append((i, i + 1))
                steps.append(1)
                layout.append("drop")
            else:
                raise IndexError(f"cannot index with {type(x).__name__}; use ints, slices, None, Ellipsis or integer tensors")
        t = self.shrink(tuple(bounds))
        flips = [i for i, s in enumerate(steps) if s < 0]
        t = t.flip(flips) if flips else t
        for i, s in enumerate(abs(s) for s in steps):
            if s > 1:
                t = t._every(i, s)
        shape: list[Any] = []
        tensors: dict[int, Tensor] = {}
        dims = iter(t.shape)
        for x in layout:
            if isinstance(x, str) and x == "new":
                shape.append(1)
                continue
            d = next(dims)
            if isinstance(x, str):
                if x == "keep":
                    shape.append(d)
            else:
                tensors[len(shape)] = x
                shape.append(d)
        return t.reshape(tuple(shape)), tensors

    def _every(self: Tensor, dim: int, step: int) -> Tensor:
        """Each `step`-th element along `dim`, as a view: the dim `step` times in a row, seen as rows of `step`; the first column."""
        before, n, after = self.shape[:dim], self.shape[dim], self.shape[dim + 1 :]
        count = -(-n // step)
        rows = self.unsqueeze(dim)._broadcast((*before, step, n, *after)).reshape(*before, n, step, *after)
        return rows._take(dim, 0, count)._take(dim + 1, 0, 1).reshape(*before, count, *after)

    def _slice(self: Tensor, x: slice, size: Any) -> tuple[Any, Any, int]:
        step = 1 if x.step is None else int(x.step)
        if step == 0:
            raise ValueError("slice step cannot be 0")
        if _is_sym(x.start) or _is_sym(x.stop) or not isinstance(size, int):
            if step != 1:
                raise ValueError("a slice with symbolic bounds needs step 1")
            return 0 if x.start is None else x.start, size if x.stop is None else x.stop, 1
        begin, end, _ = slice(x.start, x.stop, step).indices(size)
        if step < 0:
            return (end + 1, begin + 1, step) if end < begin else (0, 0, 1)
        return begin, max(begin, end), step

    def _indexed_first(self: Tensor, tensors: dict[int, Tensor]) -> tuple[list[int], list[Tensor], list[int]]:
        """(the dims in `tensors`, then the others; the index tensors, not negative, in one shape; order of the result's dims).

        Gathered values have the dims of the index, then those not indexed. The order sets them where NumPy puts them: adjacent
        index tensors leave their dims in place, others move them to the front.
        """
        dims = sorted(tensors)
        shape = broadcast_shape(*[t.shape for t in tensors.values()])
        indices = []
        for d in dims:
            i = tensors[d].cast(dtypes.int64)
            indices.append((i < 0).where(i + self.shape[d], i)._broadcast(shape))
        n, before = len(shape), dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
        order = [*range(n, n + before), *range(n), *range(n + before, n + self.ndim - len(dims))]
        return [*dims, *[d for d in range(self.ndim) if d not in tensors]], indices, order

    def _gather(self: Tensor, tensors: dict[int, Tensor]) -> Tensor:
        """Advanced indexing of the dims in `tensors`."""
        dims, indices, order = self._indexed_first(tensors)
        x = self.permute(*dims)
        if any(i.uop.device is not None and x.uop.device is not None and i.uop.device != x.uop.device for i in indices):
            raise ValueError(f"index tensors are on {indices[0].device}, the tensor on {x.device}; move one with .to(...)")
        out = x._new(mark(UOp(Ops.GATHER, x.dtype, (x.uop, *(i.uop for i in indices)))))
        return out.permute(order)

    def __setitem__(self: Tensor, index: Any, value: Any) -> None:
        from manygrad.tensor.tensor import Tensor

        if self.requires_grad:
            raise RuntimeError("writing into a tensor that requires a gradient; use where(...), or .detach() first")
        if not self._is_stored:
            self.uop = self.clone().realize().uop
        view, tensors = self._basic(index)
        v = value if isinstance(value, Tensor) else Tensor(value, dtype=self.dtype, device=self.device if isinstance(self.device, str) else None)
        v = v.cast(self.dtype)
        if isinstance(self.device, tuple) and isinstance(v.uop.device, str):
            v = v.shard(self.device)
        if tensors:
            dims, indices, order = view._indexed_first(tensors)
            x = view.permute(*dims)
            selected = (*indices[0].shape, *x.shape[len(indices) :])
            v = _fitted(v, tuple(selected[i] for i in order)).permute(_inverse(order))
            new = x._new(mark(UOp(Ops.SCATTER, x.dtype, (x.uop, v.uop, *(i.uop for i in indices)), "set")))
            v = new.permute(_inverse(dims))
        v = _fitted(v, view.shape)
        axis_of = engine().sharding_axis
        if axis_of(self.uop) is not None and axis_of(view.uop) is None:  # part of the cut dim: place by position in the whole
            positions = self.arange(prod(self.shape)).reshape(self.shape)._basic(index)[0].flatten()
            placed = UOp(Ops.SCATTER, self.dtype, (self.flatten().uop, v.flatten().uop, positions.uop), "set")
            self._write(self.uop, self._new(mark(placed)).reshape(self.shape).uop)
        else:
            self._write(view.uop, v.uop)

    def gather(self: Tensor, dim: int, index: Tensor) -> Tensor:
        """out[i][j] = self[index[i][j]][j] for dim 0 (torch.gather)."""
        d = self._dim(dim)
        if index.ndim != self.ndim:
            raise ValueError(f"gather: index has {index.ndim} dims, the tensor {self.ndim}")
        picks = {i: (index if i == d else self.arange(index.shape[i]).reshape(tuple(-1 if j == i else 1 for j in range(self.ndim)))) for i in range(self.ndim)}
        return self._gather(picks)

    take_along_dim = gather

    def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
        return self[(slice(None),) * self._dim(dim) + (index,)]

    def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
        """self with src[i][j] added at [index[i][j]][j] for dim 0 (torch.scatter_add)."""
        d = self._dim(dim)
        shape = index.shape
        part = src.shrink(tuple((0, n) for n in shape)).cast(self.dtype)
        picks = [(index.cast(dtypes.int64) if i == d else self.arange(shape[i]).reshape(tuple(-1 if j == i else 1 for j in range(self.ndim)))._broadcast(shape)) for i in range(self.ndim)]
        return self._new(mark(UOp(Ops.SCATTER, self.dtype, (self.uop, part.uop, *(p.uop for p in picks)), "add")))

    def one_hot(self: Tensor, num_classes: int) -> Tensor:
        return self.unsqueeze(-1).eq(self.arange(num_classes)).cast(dtypes.int64)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _fitted(value: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """`value` broadcast to the `shape` that an index selects; leading dims of 1 too many are dropped."""
    extra = max(value.ndim - len(shape), 0)
    if value.shape[:extra] != (1,) * extra or any(v != 1 and v != s for v, s in zip(reversed(value.shape), reversed(shape))):
        raise ValueError(f"cannot write a value of shape {value.shape} where the index selects {shape}")
    return value.reshape(value.shape[extra:])._broadcast(shape)


def _plus(x: UOp, n: int) -> UOp:
    """A bound variable plus n, still carrying its value."""
    return UOp(Ops.ADD, dtypes.index, (x, UOp(Ops.CONST, dtypes.index, (), n)))
