"""Tensors joined into one: along a dim that they have, or along a new one.
Takes `a.cat(b, c, dim=1)` and `Tensor.cat([a, b, c], 1)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import promote
from manygrad.tensor.gradient import FLAT
from manygrad.tensor.ops.elementary import with_gradient
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def listed(name: str, first: Any, others: tuple[Any, ...]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """(the tensors, what stands after a list of them)."""
    tensors, rest = (list(first), others) if isinstance(first, (list, tuple)) else ([first, *others], ())
    if not tensors:
        raise ValueError(f"{name} of no tensors; pass a list of at least one")
    wrong = [type(t).__name__ for t in tensors if not hasattr(t, "uop")]
    if wrong:
        raise TypeError(f"{name} takes tensors, got {wrong[0]}; pass them as one list, {name}([a, b], dim)")
    return tensors, rest


def one_dtype(tensors: list[Tensor]) -> list[Tensor]:
    """All in the type that PyTorch promotes them to."""
    kind = tensors[0].dtype
    for t in tensors[1:]:
        kind = promote(kind, t.dtype)
    return [t.cast(kind) for t in tensors]


def _also_of(joined: Tensor, empty: list[Tensor]) -> Tensor:
    """`joined`, which has a gradient, of zeros, to those that add nothing to it, too."""
    if not empty:
        return joined
    return with_gradient(joined, "joined", len(empty), lambda g, _, *rest: (g, *(FLAT,) * len(rest)), joined, *empty)


class JoiningMixin:
    def cat(self: Any, *others: Any, dim: int = 0) -> Tensor:
        """Joined along `dim`; all other dims equal. Tensors of shape (0,) add nothing, whatever the others' dims."""
        tensors, rest = listed("cat", self, others)
        dim = rest[0] if rest else dim
        tensors = one_dtype(tensors)
        parts = [t for t in tensors if t.shape != (0,)] or tensors[:1]
        if parts[0].ndim == 0:
            raise ValueError("cat: tensors without dims cannot be joined along one; use stack")
        d = parts[0]._dim(dim)
        for t in parts[1:]:
            if t.ndim != parts[0].ndim or any(
                i != d and a != b for i, (a, b) in enumerate(zip(t.shape, parts[0].shape))
            ):
                raise ValueError(
                    f"cat along dim {d}: {t.shape} does not fit {parts[0].shape}; all other dims must be equal"
                )
        filled = [t for t in parts if not (isinstance(t.shape[d], int) and t.shape[d] == 0)] or parts[:1]
        empty = [t for t in tensors if t.dtype.is_float and not any(t is f for f in filled)]
        if len(filled) == 1:
            return _also_of(filled[0]._copied(), empty)
        devices = {t.uop.device for t in filled if t.uop.device is not None}
        if len(devices) > 1:
            raise ValueError(
                f"cat: the tensors are on different devices {sorted(map(str, devices))}; move them with .to(...) first"
            )
        first = next((t for t in filled if t.uop.device is not None), filled[0])
        return _also_of(first._new(UOp(Ops.CAT, first.dtype, tuple(t.uop for t in filled), d)), empty)

    concat = cat
    concatenate = cat

    def stack(self: Any, *others: Any, dim: int = 0) -> Tensor:
        """Joined along a new dim; all shapes equal."""
        tensors, rest = listed("stack", self, others)
        d = tensors[0]._dim(rest[0] if rest else dim, 1)
        wrong = next((t for t in tensors if t.shape != tensors[0].shape), None)
        if wrong is not None:
            raise ValueError(f"stack: {wrong.shape} is not {tensors[0].shape}; all shapes must be equal")
        return JoiningMixin.cat([t.unsqueeze(d) for t in tensors], d)

    def hstack(self: Any, *others: Any) -> Tensor:
        """Joined along dim 1; of 1-d tensors along dim 0."""
        tensors = [t.atleast_1d() for t in listed("hstack", self, others)[0]]
        return JoiningMixin.cat(tensors, 0 if tensors[0].ndim == 1 else 1)

    def vstack(self: Any, *others: Any) -> Tensor:
        """Joined along dim 0; 1-d tensors are rows."""
        return JoiningMixin.cat([t.atleast_2d() for t in listed("vstack", self, others)[0]], 0)

    row_stack = vstack

    def dstack(self: Any, *others: Any) -> Tensor:
        """Joined along dim 2, after `atleast_3d`."""
        return JoiningMixin.cat([t.atleast_3d() for t in listed("dstack", self, others)[0]], 2)

    def column_stack(self: Any, *others: Any) -> Tensor:
        """Joined along dim 1; 0-d and 1-d tensors are columns."""
        return JoiningMixin.cat(
            [
                t.reshape(-1, 1) if t.ndim < 2 and t.numel() else t.reshape(0, 1) if t.ndim < 2 else t
                for t in listed("column_stack", self, others)[0]
            ],
            1,
        )

    def block_diag(self: Any, *others: Any) -> Tensor:
        """Matrices along the diagonal of one, zeros elsewhere; 0-d and 1-d tensors are rows."""
        tensors = [t.atleast_2d() for t in one_dtype(listed("block_diag", self, others)[0])]
        wrong = next((t for t in tensors if t.ndim != 2), None)
        if wrong is not None:
            raise ValueError(f"block_diag: a tensor has shape {wrong.shape}; matrices (at most 2 dims) only")
        width, at, rows = sum(t.shape[1] for t in tensors), 0, []
        for t in tensors:
            rows.append(t.pad((at, width - at - t.shape[1])))
            at += t.shape[1]
        return JoiningMixin.cat(rows, 0)
