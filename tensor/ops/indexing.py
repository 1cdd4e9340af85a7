"""Indexing: NumPy's basic and advanced rules for reading and writing; gathers are real gathers.

Positions are not known when the graph is built: one that is out of range is found when a value is read (`checking.py`).
Reading with a boolean mask has a shape that depends on data (`tensor/ops/masking.py`); writing with one stays lazy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from manygrad.tensor import storage
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.lock import locked
from manygrad.tensor.ops.broadcast import broadcast_shape
from manygrad.tensor.ops.checking import checked
from manygrad.tensor.ops.differentiation import as_written
from manygrad.tensor.ops.inplace import refuse_leaf
from manygrad.tensor.source import mark
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.shape import numel
from manygrad.tensor.uop.show import text_of_index, text_of_shape
from manygrad.tensor.uop.symbolic import add, as_index, maximum, minimum, to_sint, vmin

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def _is_sym(x: Any) -> bool:
    return isinstance(x, UOp)


class IndexingMixin:
    def __getitem__(self: Tensor, index: Any) -> Tensor:
        view, tensors = self._basic(index)
        if any(t.dtype.is_bool for t in tensors.values()):
            view, tensors = view._without_masks(view._checked(tensors))
        elif tensors:
            tensors = view._checked(tensors)
        return view._gather(tensors) if tensors else view

    def __iter__(self: Tensor) -> Iterator[Tensor]:
        """The parts along the first dim; TypeError for a tensor of no dims."""
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter([self[i] for i in range(len(self))])

    def _checked(self: Tensor, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        """Index tensors by dim, those of integers looked at."""
        return {d: t if t.dtype.is_bool else checked(t, "index", self.shape[d], self, None) for d, t in tensors.items()}

    def _basic(self: Tensor, index: Any) -> tuple[Tensor, dict[int, Tensor]]:
        """Slices, ints, None and Ellipsis applied as views; index tensors and masks left, by (first)
        dim of the view."""
        from manygrad.tensor.tensor import Tensor

        if isinstance(index, list) and any(x is None or x is Ellipsis or isinstance(x, slice) for x in index):
            index = tuple(index)  # (no list of positions)
        items = list(index) if isinstance(index, tuple) else [index]
        items = [
            self._listed_index(x)
            if isinstance(x, (bool, list, tuple)) or (hasattr(x, "__array__") and not isinstance(x, Tensor))
            else x
            for x in items
        ]
        ellipses = [i for i, x in enumerate(items) if x is Ellipsis]
        if len(ellipses) > 1:
            raise IndexError("an index can hold only one Ellipsis")
        used = sum(
            x.ndim if isinstance(x, Tensor) and x.dtype.is_bool else 1
            for x in items
            if x is not None and x is not Ellipsis
        )
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
            if isinstance(x, Tensor):
                if not x.dtype.is_int and not x.dtype.is_bool:
                    raise IndexError(f"an index tensor must be of integers or booleans, not {x.dtype.name}")
                covered = (
                    self.shape[len(bounds) : len(bounds) + x.ndim]
                    if x.dtype.is_bool
                    else self.shape[len(bounds) : len(bounds) + 1]
                )
                if x.dtype.is_bool and x.shape != covered:
                    raise IndexError(
                        f"a mask of shape {x.shape} does not fit the dims {covered} of {self.shape} that it indexes"
                    )
                bounds += [(0, d) for d in covered]
                steps += [1] * len(covered)
                layout.append(x)
                continue
            size = self.shape[len(bounds)]
            if isinstance(x, slice):
                begin, end, step = self._slice(x, size)
                bounds.append((begin, end))
                steps.append(step)
                layout.append("keep")
            elif _is_sym(x) or isinstance(x, int) or hasattr(x, "__index__"):
                i = self._place(x if _is_sym(x) else x.__index__(), len(bounds))
                bounds.append((i, i + 1))
                steps.append(1)
                layout.append("drop")
            else:
                raise IndexError(
                    f"cannot index with {type(x).__name__}; use ints, slices, None, Ellipsis, "
                    "integer tensors or boolean masks"
                )
        t = self.shrink(tuple(bounds))
        flips = [i for i, s in enumerate(steps) if s < 0]
        t = t._flipped(flips) if flips else t
        for i, s in enumerate(abs(s) for s in steps):
            if s > 1:
                t = t._every(i, s)
        return t._laid_out(layout)

    def _laid_out(self: Tensor, layout: list[Any]) -> tuple[Tensor, dict[int, Tensor]]:
        """The dims as `layout` says, an entry for each item of an index: "new" adds a dim of size 1, "drop" drops the
        next one, "keep" keeps it, a tensor keeps those that it covers. Returned with the tensors, by first dim."""
        shape: list[Any] = []
        tensors: dict[int, Tensor] = {}
        dims = iter(self.shape)
        for x in layout:
            if isinstance(x, str):
                d = 1 if x == "new" else next(dims)
                shape += [d] if x != "drop" else []
            elif x.dtype.is_bool and x.ndim == 0:  # True: a dim of size 1; False: of size 0
                tensors[len(shape)] = x.reshape(1)
                shape.append(1)
            else:
                tensors[len(shape)] = x
                shape += [next(dims) for _ in range(x.ndim if x.dtype.is_bool else 1)]
        return self.reshape(tuple(shape)), tensors

    def _place(self: Tensor, i: Any, dim: int) -> Any:
        """An index of one place of `dim`, counted from its beginning; IndexError where it can be outside."""
        size = self.shape[dim]
        if isinstance(i, int) and isinstance(size, int):
            if not -size <= i < size:
                raise IndexError(f"index {i} is outside dim {dim} of size {size}, shape {self.shape}")
            return i + size if i < 0 else i
        place = size + i if isinstance(i, int) and i < 0 else i
        if vmin(as_index(place)) < 0 or vmin(as_index(size - as_index(place))) < 1:
            shown = i if isinstance(i, int) else text_of_index(i)
            raise IndexError(
                f"index {shown} can be outside dim {dim} of shape {text_of_shape(self.shape)}, for some values of its "
                "variables; narrow their ranges, or take a slice, which ends where the dim does"
            )
        return place

    def _listed_index(self: Tensor, x: Any) -> Tensor:
        """A list or array of positions, or of booleans, as a tensor where this one is."""
        from manygrad.tensor.tensor import Tensor

        t = Tensor(
            x,
            device=self.device if isinstance(self.device, str) else None,
            dtype=dtypes.int64 if isinstance(x, (list, tuple)) and not x else None,
        )
        return t.to(self.device) if isinstance(self.device, tuple) and t.uop.device is not None else t

    def _every(self: Tensor, dim: int, step: int) -> Tensor:
        """Each `step`-th element along `dim`, as a view: the dim `step` times in a row, seen as rows of `step`;
        the first column."""
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
            begin = 0 if x.start is None else _within(x.start, size)
            end = size if x.stop is None else _within(x.stop, size)
            return begin, to_sint(maximum(as_index(end), begin)), 1
        begin, end, _ = slice(x.start, x.stop, step).indices(size)
        if step < 0:
            return (end + 1, begin + 1, step) if end < begin else (0, 0, 1)
        return begin, max(begin, end), step

    def _positions(self: Tensor, size: Any) -> Tensor:
        """Index values as int64, negative ones counted from the end of a dim of `size`."""
        if not self.dtype.is_int:
            raise IndexError(f"an index tensor must be of integers, not {self.dtype.name}")
        i = self.cast(dtypes.int64)
        return i if bounds(self.uop)[0] >= 0 else (i < 0)._where(i + size, i)

    def _indexed_first(self: Tensor, tensors: dict[int, Tensor]) -> tuple[list[int], list[Tensor], list[int]]:
        """(the dims in `tensors`, then the others; the index tensors, not negative, in one
        shape; order of the result's dims).

        Gathered values have the dims of the index, then those not indexed. The order sets them where NumPy puts them:
        adjacent index tensors leave their dims in place, others move them to the front.
        """
        dims = sorted(tensors)
        shape = broadcast_shape(*[t.shape for t in tensors.values()])
        indices = [tensors[d]._positions(self.shape[d])._broadcast(shape) for d in dims]
        n, before = len(shape), dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
        order = [*range(n, n + before), *range(n), *range(n + before, n + self.ndim - len(dims))]
        return [*dims, *[d for d in range(self.ndim) if d not in tensors]], indices, order

    def _gather(self: Tensor, tensors: dict[int, Tensor]) -> Tensor:
        """Advanced indexing of the dims in `tensors`."""
        dims, indices, order = self._indexed_first(tensors)
        x = self.permute(*dims)
        _together("the index tensors", indices, x)
        out = x._new(mark(UOp(Ops.GATHER, x.dtype, (x.uop, *(i.uop for i in indices)))))
        return out.permute(order)

    def _scatter_at(self: Tensor, value: Tensor, indices: list[Tensor], how: str) -> Tensor:
        """SCATTER: value[s.., r..] "set" at, or combined by "add", "mul" or "max" with, self[i0[s], .., ik[s], r..].

        "place": set where no two values for one place differ, at positions that are distinct or of one constant.
        """
        _together("the index tensors", [value, *indices], self)
        if how == "set" and (numel(indices[0].shape) == 1 or _is_constant(value.uop)):
            how = "place"
        return self._new(
            mark(UOp(Ops.SCATTER, self.dtype, (self.uop, value.cast(self.dtype).uop, *(i.uop for i in indices)), how))
        )

    def _put(self: Tensor, tensors: dict[int, Tensor], value: Tensor, how: str = "set") -> Tensor:
        """A copy of this tensor with `value` (broadcast to what the index tensors select) set or added there."""
        masks = [d for d, t in tensors.items() if t.dtype.is_bool]
        if masks and len(tensors) == 1:
            return self._put_where(masks[0], tensors[masks[0]], value, how)
        if masks:
            view, tensors = self._without_masks(tensors)
            return view._put(tensors, value, how).reshape(self.shape)
        _, new = self._put_at(tensors, value, how)
        return new.permute(_inverse(self._indexed_first(tensors)[0]))

    def _put_at(self: Tensor, tensors: dict[int, Tensor], value: Tensor, how: str = "set") -> tuple[Tensor, Tensor]:
        """(x, its new value) for x this tensor with the indexed dims in front."""
        dims, indices, order = self._indexed_first(tensors)
        x = self.permute(*dims)
        selected = (*indices[0].shape, *x.shape[len(indices) :])
        v = _fitted(value, tuple(selected[i] for i in order)).permute(_inverse(order))
        return x, x._scatter_at(v, indices, how)

    def _put_where(self: Tensor, dim: int, mask: Tensor, value: Tensor, how: str) -> Tensor:
        """`_put` with one mask over the dims from `dim` on. Values for each place are taken in order;
        their number is not checked."""
        before, after = self.shape[:dim], self.shape[dim + mask.ndim :]
        v = value.reshape(value.shape[max(value.ndim - dim - 1 - len(after), 0) :])
        v = v.reshape((1,) * (dim + 1 + len(after) - v.ndim) + v.shape)
        if v.shape[dim] != 1:
            v = v._gather({dim: mask.flatten().cast(dtypes.int64).cumsum(0).reshape(mask.shape) - 1})
        else:
            v = v.reshape(*v.shape[:dim], *(1,) * mask.ndim, *v.shape[dim + 1 :])
        if any(a != 1 and a != b for a, b in zip(v.shape, self.shape)):
            raise ValueError(
                f"cannot write a value of shape {value.shape} where a mask selects (*{before}, number of True, "
                f"*{after})"
            )
        hit = mask.reshape((1,) * dim + mask.shape + (1,) * len(after))
        v = v.cast(self.dtype)
        return hit._where(self + v if how == "add" else v, self)

    def __setitem__(self: Tensor, index: Any, value: Any) -> None:
        self._set_items(index, value)

    @locked
    def _set_items(self: Tensor, index: Any, value: Any) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        refuse_leaf(self, "t[...] = value")
        v = (
            value
            if isinstance(value, Tensor)
            else Tensor(value, dtype=self.dtype, device=self.device if isinstance(self.device, str) else None)
        )
        _, made, joins = as_written(self, v)
        anew = storage.becomes_new(self, v) if made is None else made
        if not anew and not self._is_stored:
            storage.store(self)
        view, tensors = self._basic(index)
        tensors = view._checked(tensors)
        v = v.cast(self.dtype)
        if isinstance(self.device, tuple) and isinstance(v.uop.device, str):
            v = v.shard(self.device)
        axis_of = engine().sharding_axis
        # (part of the cut dim: `write` places it by position)
        whole = anew or (axis_of(self.uop) is not None and axis_of(view.uop) is None)
        if tensors and (whole or any(t.dtype.is_bool for t in tensors.values())):
            v = view._put(tensors, v)
        elif tensors:  # what is not named is not touched
            view, v = view._put_at(tensors, v)
        v = _fitted(v, view.shape)
        if view.numel():
            storage.write(view, as_written(view, v).value, anew, joins)
        return self


def _with_items(t: Tensor, index: Any, value: Any) -> Tensor:
    """Another tensor, with other items in these places."""
    refuse_leaf(t, "t[...] = value")
    return t.clone()._set_items(index, value)


IndexingMixin._set_items.value = _with_items  # type: ignore[attr-defined]


def _within(x: Any, size: Any) -> Any:
    """A bound of a slice as Python takes it, of a dim whose size or bound is symbolic: negative numbers count from the
    end, and what is beyond either end is that end."""
    if not _is_sym(x) and x.__index__() < 0:
        return to_sint(maximum(add(as_index(size), x.__index__()), 0))
    return to_sint(minimum(as_index(x), size))


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _is_constant(u: UOp) -> bool:
    """Whether all elements are one number that is in the graph."""
    while (u.op in GroupOp.MOVEMENT and u.op is not Ops.PAD) or u.op is Ops.CAST:
        u = u.src[0]
    return u.op is Ops.CONST


def _together(what: str, indices: list[Tensor], x: Tensor) -> None:
    for i in indices:
        if i.uop.device is not None and x.uop.device is not None and i.uop.device != x.uop.device:
            raise ValueError(f"{what} are on {i.device}, the tensor on {x.device}; move one with .to(...)")


def _fitted(value: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """`value` broadcast to the `shape` that an index selects; leading dims of 1 too many are dropped."""
    extra = max(value.ndim - len(shape), 0)
    if value.shape[:extra] != (1,) * extra or any(
        v != 1 and v != s for v, s in zip(reversed(value.shape), reversed(shape))
    ):
        raise ValueError(f"cannot write a value of shape {value.shape} where the index selects {shape}")
    return value.reshape(value.shape[extra:])._broadcast(shape)
