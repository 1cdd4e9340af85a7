"""Tensors from nothing: constants and ranges. They live nowhere until a kernel uses or stores them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.show import text_of_index
from manygrad.tensor.uop.symbolic import spread, vmax, vmin

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


def _shape(args: tuple[Any, ...]) -> tuple[Any, ...]:
    shape = tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if any(isinstance(d, int) and d < 0 for d in shape):
        raise ValueError(f"negative dim in shape {shape}")
    return shape


def _make(uop: UOp, device: Any, requires_grad: bool | None = None) -> Tensor:
    from manygrad.tensor.tensor import Tensor

    t = Tensor(uop, device=device if isinstance(device, str) else None, requires_grad=requires_grad)
    return t if device is None or isinstance(device, str) else t.to(device)


class CreationMixin:
    @staticmethod
    def full(
        shape: Any,
        value: bool | int | float,
        dtype: DType | str | None = None,
        device: Any = None,
        requires_grad: bool | None = None,
    ) -> Tensor:
        kind = (
            to_dtype(dtype)
            if dtype is not None
            else dtypes.bool
            if isinstance(value, bool)
            else dtypes.int64
            if isinstance(value, int)
            else dtypes.default_float
        )
        t = _make(UOp.const(kind, kind.fits(value)), device)._broadcast(
            _shape((shape,) if isinstance(shape, int) else tuple(shape))
        )
        t.requires_grad = requires_grad
        return t

    @staticmethod
    def from_file(path: str, shape: Any = None, dtype: DType | str = "uint8", offset: int = 0) -> Tensor:
        """The bytes of a file from `offset` as a tensor on `DISK:path`: mapped, read when copied with `.to("CPU")`."""
        import os

        from manygrad.tensor.engine import engine
        from manygrad.tensor.tensor import Tensor

        kind, size = to_dtype(dtype), os.path.getsize(path)
        if not 0 <= offset <= size:
            raise ValueError(f"from_file: offset {offset} is outside {path}, which has {size} bytes")
        if shape is None and (size - offset) % kind.itemsize:
            raise ValueError(
                f"from_file: {path} has {size - offset} bytes from offset {offset} on, no whole number of {kind.name}; "
                "give the shape that is wanted"
            )
        dims = ((size - offset) // kind.itemsize,) if shape is None else _shape((shape,))
        need = offset + math.prod(dims) * kind.itemsize
        if need > size:
            raise ValueError(f"from_file: {dims} {kind.name} at offset {offset} ends at byte {need}, {path} has {size}")
        return Tensor(engine().map_file(os.path.abspath(path), [(kind, dims, offset)])[0])

    @staticmethod
    def zeros(
        *shape: Any, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None
    ) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        return Tensor.full(_shape(shape), 0.0, dtype or dtypes.default_float, device, requires_grad)

    @staticmethod
    def ones(
        *shape: Any, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None
    ) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        return Tensor.full(_shape(shape), 1.0, dtype or dtypes.default_float, device, requires_grad)

    @staticmethod
    def empty(*shape: Any, dtype: DType | str | None = None, device: Any = None) -> Tensor:
        """Zeros; on `DISK:path` what the file holds, which is made as long as that."""
        from manygrad.tensor.engine import engine
        from manygrad.tensor.tensor import Tensor

        if isinstance(device, str) and device.upper().startswith("DISK"):
            path, kind = engine().canonical(device).partition(":")[2], to_dtype(dtype or dtypes.default_float)
            return Tensor(engine().map_file(path, [(kind, _shape(shape), 0)])[0])
        return Tensor.zeros(*shape, dtype=dtype, device=device)

    @staticmethod
    def arange(
        start: float, end: float | None = None, step: float = 1, dtype: DType | str | None = None, device: Any = None
    ) -> Tensor:
        """start, start + step, ... below end (PyTorch's rule for count and type). Of whole numbers with step 1, the end
        may be a size with a Variable in it."""
        from manygrad.tensor.tensor import Tensor

        if end is None:
            start, end = 0, start
        if isinstance(end, UOp) and step == 1 and isinstance(start, int):
            if (least := vmin(spread(end))) < start:
                raise ValueError(f"arange: the end {text_of_index(end)} can be {least}, below the start {start}")
            return Tensor.arange(start, vmax(end), 1, dtype, device)._take(0, 0, end - start)
        if step == 0:
            raise ValueError("arange: step is 0")
        if not (math.isfinite(start) and math.isfinite(end) and math.isfinite(step)):
            raise ValueError(f"arange: from {start} to {end} in steps of {step} has no count; give finite numbers")
        if (end - start) * step < 0:
            raise ValueError(
                f"arange: steps of {step} do not lead from {start} to {end}; change the step's sign, or swap the ends"
            )
        whole = all(isinstance(v, int) for v in (start, end, step))
        kind = to_dtype(dtype) if dtype is not None else dtypes.int64 if whole else dtypes.default_float
        if kind is dtypes.int64 and not whole:  # as PyTorch does: of the numbers without their fractions
            return Tensor.arange(int(start), int(end), int(step), kind, device)
        n = max(0, math.ceil((end - start) / step))
        t = _make(UOp(Ops.IOTA, dtypes.int64, (), n), device)
        if kind.is_int and not whole:  # (of a smaller type as many as with them)
            start, step, whole = int(start), int(step), True
        if not whole:
            return (t.cast(dtypes.float64) * float(step) + float(start)).cast(kind)
        if step != 1:
            t = t * int(step)
        return (t + int(start) if start != 0 else t).cast(kind)

    @staticmethod
    def linspace(start: float, end: float, steps: int, dtype: DType | str | None = None, device: Any = None) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        if steps < 0:
            raise ValueError(f"linspace: steps must not be negative, got {steps}")
        if not isinstance(steps, int):
            raise TypeError(f"linspace: steps is a whole number, got {steps!r}")
        if any(isinstance(v, Tensor) and v.ndim for v in (start, end)):
            raise ValueError("linspace: start and end are numbers or tensors without dims")
        first, last = (v.cast(dtypes.float64) if isinstance(v, Tensor) else v for v in (start, end))
        i, step = Tensor.arange(steps, device=device).cast(dtypes.float64), (last - first) / max(steps - 1, 1)
        # (from the nearer end, so that both are met exactly)
        t = (i < steps // 2)._where(i * step + first, last - (steps - 1 - i) * step) if steps > 1 else i * 0 + first
        return t.cast(to_dtype(dtype) if dtype is not None else dtypes.default_float)

    @staticmethod
    def eye(n: int, m: int | None = None, dtype: DType | str | None = None, device: Any = None) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        if n < 0 or (m is not None and m < 0):
            raise ValueError(f"eye: sizes are not negative, got {n} and {m}")
        rows, cols = (
            Tensor.arange(n, device=device).unsqueeze(1),
            Tensor.arange(n if m is None else m, device=device).unsqueeze(0),
        )
        return rows.eq(cols).cast(to_dtype(dtype) if dtype is not None else dtypes.default_float)

    def full_like(self: Tensor, value: bool | int | float, dtype: DType | str | None = None) -> Tensor:
        kind = to_dtype(dtype) if dtype is not None else self.dtype
        t = self._new(UOp.const(kind, kind.fits(value)))._broadcast(self.shape)
        if isinstance(self.device, tuple):
            return t._shard_like(self)
        return t

    def zeros_like(self: Tensor, dtype: DType | str | None = None) -> Tensor:
        return self.full_like(0, dtype)

    def ones_like(self: Tensor, dtype: DType | str | None = None) -> Tensor:
        return self.full_like(1, dtype)
