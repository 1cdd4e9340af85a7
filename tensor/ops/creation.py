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
    def empty(
        *shape: Any, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None
    ) -> Tensor:
        """Zeros; on `DISK:path` what the file holds, which is made as long as that."""
        from manygrad.tensor.engine import engine
        from manygrad.tensor.tensor import Tensor

        if isinstance(device, str) and device.upper().startswith("DISK"):
            path, kind = engine().canonical(device).partition(":")[2], to_dtype(dtype or dtypes.default_float)
            return Tensor(engine().map_file(path, [(kind, _shape(shape), 0)])[0], requires_grad=requires_grad)
        return Tensor.zeros(*shape, dtype=dtype, device=device, requires_grad=requires_grad)

    @staticmethod
    def arange(
        start: float,
        end: float | None = None,
        step: float = 1,
        dtype: DType | str | None = None,
        device: Any = None,
        requires_grad: bool | None = None,
    ) -> Tensor:
        """start, start + step, ... below end (PyTorch's rule for count and type). Of whole numbers with step 1, the end
        may be a size with a Variable in it."""
        from manygrad.tensor.tensor import Tensor

        if requires_grad is not None:
            return asking(Tensor.arange(start, end, step, dtype, device), requires_grad)
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
    def linspace(
        start: float,
        end: float,
        steps: int,
        dtype: DType | str | None = None,
        device: Any = None,
        requires_grad: bool | None = None,
    ) -> Tensor:
        """`steps` values at equal distances from start to end, both included; in a type of whole numbers the ends lose
        their fractions first, as in PyTorch.

        ValueError for a negative count and for ends with dims.
        """
        return asking(_between("linspace", start, end, steps, dtype, device), requires_grad)

    @staticmethod
    def logspace(
        start: float,
        end: float,
        steps: int,
        base: float = 10.0,
        dtype: DType | str | None = None,
        device: Any = None,
        requires_grad: bool | None = None,
    ) -> Tensor:
        """`steps` powers of `base` whose exponents lie at equal distances from start to end, both in. In a type of
        whole numbers the ends lose their fractions first, as in PyTorch.

        ValueError for a negative count and for ends with dims.
        """
        kind = to_dtype(dtype) if dtype is not None else dtypes.default_float
        exponents = _between("logspace", start, end, steps, kind, device, dtypes.float64)
        return asking(exponents.full_like(float(base)).pow(exponents).cast(kind), requires_grad)

    @staticmethod
    def scalar_tensor(
        value: bool | int | float,
        dtype: DType | str | None = None,
        device: Any = None,
        requires_grad: bool | None = None,
    ) -> Tensor:
        """A number as a tensor without dims: a float, unless `dtype` says otherwise."""
        from manygrad.tensor.tensor import Tensor

        return Tensor.full((), value, dtype or dtypes.default_float, device, requires_grad)

    @staticmethod
    def eye(
        n: int,
        m: int | None = None,
        dtype: DType | str | None = None,
        device: Any = None,
        requires_grad: bool | None = None,
    ) -> Tensor:
        """(n, m), or (n, n), with ones on the diagonal. ValueError for negative sizes."""
        from manygrad.tensor.tensor import Tensor

        if n < 0 or (m is not None and m < 0):
            raise ValueError(f"eye: sizes are not negative, got {n} and {m}")
        rows, cols = (
            Tensor.arange(n, device=device).unsqueeze(1),
            Tensor.arange(n if m is None else m, device=device).unsqueeze(0),
        )
        out = rows.eq(cols).cast(to_dtype(dtype) if dtype is not None else dtypes.default_float)
        return asking(out, requires_grad)

    def full_like(
        self: Tensor,
        value: bool | int | float,
        dtype: DType | str | None = None,
        device: Any = None,
        requires_grad: bool | None = None,
    ) -> Tensor:
        """`value` in this tensor's shape and, unless given, its type and place."""
        kind = to_dtype(dtype) if dtype is not None else self.dtype
        t = self._new(UOp.const(kind, kind.fits(value)))._broadcast(self.shape)
        if device is not None:
            t = t.to(device)
        elif isinstance(self.device, tuple):
            t = t._shard_like(self)
        return asking(t, requires_grad)

    def zeros_like(
        self: Tensor, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None
    ) -> Tensor:
        """Zeros in this tensor's shape and, unless given, its type and place."""
        return self.full_like(0, dtype, device, requires_grad)

    def ones_like(
        self: Tensor, dtype: DType | str | None = None, device: Any = None, requires_grad: bool | None = None
    ) -> Tensor:
        """Ones in this tensor's shape and, unless given, its type and place."""
        return self.full_like(1, dtype, device, requires_grad)

    empty_like = zeros_like


def asking(made: Tensor, requires_grad: bool | None) -> Tensor:
    """A tensor that was just made, with a gradient of its own if it is asked for."""
    if requires_grad is not None:
        made.requires_grad = requires_grad
    return made


def _between(
    name: str, start: Any, end: Any, steps: int, dtype: DType | str | None, device: Any, kept: DType | None = None
) -> Tensor:
    """`steps` values from start to end, of the type `dtype`; with `kept` as they are before they are cast to it."""
    from manygrad.tensor.tensor import Tensor

    if not isinstance(steps, int):
        raise TypeError(f"{name}: steps is a whole number, got {steps!r}")
    if steps < 0:
        raise ValueError(f"{name}: steps must not be negative, got {steps}")
    if any(isinstance(v, Tensor) and v.ndim for v in (start, end)):
        raise ValueError(f"{name}: start and end are numbers or tensors without dims")
    kind = to_dtype(dtype) if dtype is not None else dtypes.default_float
    first, last = (v.cast(dtypes.float64) if isinstance(v, Tensor) else v for v in (start, end))
    if kind.is_int:
        first, last = (v.trunc() if isinstance(v, Tensor) else math.trunc(v) for v in (first, last))
    i, step = Tensor.arange(steps, device=device).cast(dtypes.float64), (last - first) / max(steps - 1, 1)
    # (from the nearer end, so that both are met exactly)
    t = (i < steps // 2)._where(i * step + first, last - (steps - 1 - i) * step) if steps > 1 else i * 0 + first
    return t.cast(kept or kind)
