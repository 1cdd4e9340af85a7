"""How operands meet: PyTorch's type promotion, broadcasting, one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, accumulate_dtype, category, dtypes, promote
from manygrad.tensor.uop import Ops, UOp

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def result_type(x: Tensor | bool | int | float, y: Tensor | bool | int | float | UOp) -> DType:
    """PyTorch's rule: a Python number, and a 0-d tensor beside one with dims, only raise the category. A size with a
    Variable in it counts as a whole number."""
    if isinstance(y, UOp):
        return result_type(x, 1)
    if isinstance(x, (bool, int, float)):
        if not isinstance(y, (bool, int, float)):
            return result_type(y, x)
        return (
            dtypes.default_float
            if isinstance(x, float) or isinstance(y, float)
            else dtypes.bool
            if isinstance(x, bool) and isinstance(y, bool)
            else dtypes.default_int
        )
    if isinstance(y, (bool, int, float)):
        rank = 2 if isinstance(y, float) else 1 if not isinstance(y, bool) else 0
        if category(x.dtype) >= rank:
            return x.dtype
        return dtypes.default_float if rank == 2 else dtypes.default_int
    cx, cy = category(x.dtype), category(y.dtype)
    if cx == cy and (x.ndim == 0) != (y.ndim == 0):
        return y.dtype if x.ndim == 0 else x.dtype
    if cx != cy and (x.ndim == 0) != (y.ndim == 0):
        return promote(x.dtype, y.dtype)
    return promote(x.dtype, y.dtype)


def broadcast_shape(*shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    n = max(len(s) for s in shapes)
    out: list[Any] = []
    for dims in zip(*[(1,) * (n - len(s)) + tuple(s) for s in shapes]):
        wide = [d for d in dims if not (isinstance(d, int) and d == 1)]
        if any(d is not wide[0] and d != wide[0] for d in wide[1:]):
            raise ValueError(
                f"shapes {' and '.join(map(str, shapes))} do not broadcast: dims {dims} differ and none of them is 1"
            )
        out.append(wide[0] if wide else 1)
    return tuple(out)


class BroadcastMixin:
    def _fits(self: Tensor, number: Any) -> Any:
        """A number (or tensor) that is to stand among elements as it is: ValueError where their type would wrap it."""
        return result_type(self, number).fits(number) if isinstance(number, (int, float)) else number

    def _const_like(self: Tensor, value: Any, dtype: DType) -> Tensor:
        return self._new(UOp.const(dtype, value))

    def _pair(self: Tensor, other: Any, reverse: bool = False, dtype: DType | None = None) -> tuple[Tensor, Tensor]:
        """Both operands in one dtype and shape."""
        from manygrad.tensor.tensor import Tensor

        if isinstance(other, (bool, int, float)):
            kind = dtype or result_type(self, other)
            if kind.is_int:  # (a smaller type wraps it, as in PyTorch; no type does so with what 64 bits do not hold)
                (kind if kind.itemsize == 8 else dtypes.int64).fits(other)
            x = self if self.dtype is kind else self.cast(kind)
            y = x._new(everywhere(UOp.const(kind, other), x.shape))
            return (y, x) if reverse else (x, y)
        if not isinstance(other, Tensor):
            if isinstance(other, UOp):
                dtype = dtype or result_type(self, other)
                other = self._new(UOp(Ops.CAST, dtypes.int64, (other,)))
            else:
                other = Tensor(other, device=self.device if isinstance(self.device, str) else None)
                if isinstance(self.device, tuple):
                    other = other.to(self.device)
        kind = dtype or result_type(self, other)
        x = self if self.dtype is kind else self.cast(kind)
        y = other if other.dtype is kind else other.cast(kind)
        if x.uop.device is not None and y.uop.device is not None and x.uop.device != y.uop.device:
            raise ValueError(
                f"operands are on different devices: {placed(x)} and {placed(y)}; move one with .to(...) or .shard(...)"
            )
        if x.shape != y.shape:
            shape = broadcast_shape(x.shape, y.shape)
            x, y = x._broadcast(shape), y._broadcast(shape)
        if x.uop.device is None and y.uop.device is not None:
            x._device = y._device
        return (y, x) if reverse else (x, y)

    def _binary(self: Tensor, op: Ops, other: Any, reverse: bool = False, dtype: DType | None = None) -> Tensor:
        x, y = self._pair(other, reverse, dtype)
        return x._op(op, None, y, dtype=dtypes.bool if op in (Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ) else x.dtype)

    def _floats(self: Tensor, other: Any) -> tuple[Tensor, Tensor]:
        """Both operands in one float type and shape."""
        kind = result_type(self, other)
        return self._pair(other, dtype=kind if kind.is_float else dtypes.default_float)

    def _wide_floats(self: Tensor, other: Any) -> tuple[Tensor, Tensor, DType]:
        """Both operands in the type that a function of several steps computes in, and the type to round to at the end:
        half types are rounded once."""
        x, y = self._floats(other)
        wide = accumulate_dtype(x.dtype)
        return x.cast(wide), y.cast(wide), x.dtype

    def _float(self: Tensor) -> Tensor:
        return self if self.dtype.is_float else self.cast(dtypes.default_float)


def expect_shape(function: str, shape: tuple[Any, ...], **parameters: Tensor | None) -> None:
    """One of another shape could broadcast, and would be taken for what it is not."""
    for name, t in parameters.items():
        if t is not None and t.shape != shape:
            raise ValueError(f"{function}: {name} has shape {t.shape}, expected {shape}")


def everywhere(u: UOp, shape: tuple[Any, ...]) -> UOp:
    """A scalar as each element of `shape`."""
    ones = (1,) * len(shape)
    flat = UOp(Ops.RESHAPE, u.dtype, (u,), ones) if shape else u
    return flat if shape == ones else UOp(Ops.EXPAND, u.dtype, (flat,), shape)


def placed(t: Tensor) -> str:
    """For messages: `(3, 4) on CPU:1`."""
    d = t.uop.device
    return (
        f"{t.shape} on {d if isinstance(d, str) or d is None or len(d) <= 4 else f'{len(d)} devices {d[0]}..{d[-1]}'}"
    )
