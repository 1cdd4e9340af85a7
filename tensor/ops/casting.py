"""Changing the element type: by value (`cast` and its short names) or by bits (`bitcast`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType, dtypes, to_dtype
from manygrad.tensor.engine import engine
from manygrad.tensor.ops.float8 import from_float8, to_float8
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.views import OTHER_WIDTH

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

UINT = {1: dtypes.uint8, 2: dtypes.uint16, 4: dtypes.uint32, 8: dtypes.uint64}


class CastingMixin:
    def cast(self: Tensor, dtype: DType | str) -> Tensor:
        d = to_dtype(dtype)
        if d is self.dtype:
            return self
        if d.is_fp8 or self.dtype.is_fp8:
            return to_float8(self, d) if d.is_fp8 else from_float8(self, d)
        return self._op(Ops.CAST, dtype=d)

    def bitcast(self: Tensor, dtype: DType | str) -> Tensor:
        """The same bits as another type, little end first: (..., n) of w bytes becomes (..., n·w / v) of v bytes. A
        view: writing through it writes those bits."""
        d = to_dtype(dtype)
        if d is self.dtype:
            return self
        have, want = self.dtype.itemsize, d.itemsize
        if isinstance(self.device, str) and self.device.startswith("DISK"):
            return self._part_of_file(d)
        if have == want:
            return self._op(Ops.BITCAST, dtype=d)
        if not self.ndim:
            raise ValueError(
                f"bitcast of a 0-d tensor from {self.dtype.name} to {d.name}: the widths differ ({have} and {want} "
                "bytes); reshape it to (1,) first"
            )
        *lead, n = self.shape
        narrow = UINT[min(have, want)]
        wide = UINT[max(have, want)]
        shifts = self.arange(wide.itemsize // narrow.itemsize).cast(wide) * (8 * narrow.itemsize)
        if have > want:
            parts = (self.bitcast(wide).unsqueeze(-1) >> shifts).cast(narrow)
            return self._as_bits(parts.reshape(*lead, n * (have // want)).bitcast(d))
        if n % (want // have):
            raise ValueError(
                f"bitcast {self.shape} from {self.dtype.name} to {d.name}: the last dim must divide by {want // have}"
            )
        parts = self.bitcast(narrow).reshape(*lead, n // (want // have), want // have).cast(wide) << shifts
        return self._as_bits(parts._reduce(Ops.ADD, -1, False).bitcast(d))

    def _part_of_file(self: Tensor, d: DType) -> Tensor:
        """`bitcast` of what is on DISK, where no kernel runs: the same part of the file."""
        *lead, n = self.shape or (1,)
        nbytes = n * self.dtype.itemsize
        found = engine().part_of_file(self.uop, d, (*lead, nbytes // d.itemsize))
        if found is None or nbytes % d.itemsize:
            raise ValueError(
                f"bitcast of {self.shape} {self.dtype.name} on {self.device} to {d.name}: on DISK that takes a piece "
                "of the file in order whose last dim is whole elements; copy it to a computing device first: .to('CPU')"
            )
        return self._new(found)

    def _as_bits(self: Tensor, computed: Tensor) -> Tensor:
        """`computed`, which has the bits of this tensor in elements of another width, as a view of it."""
        t = self._new(UOp(Ops.CUSTOM, computed.dtype, (computed.uop, self.uop), OTHER_WIDTH))
        t._storage = self._identity()
        return t

    def type(self: Tensor, dtype: DType | str | None = None) -> Any:
        """The name of the element type; with `dtype` the tensor cast to it."""
        return f"manygrad.{self.dtype.name}" if dtype is None else self.cast(dtype)

    def type_as(self: Tensor, other: Tensor) -> Tensor:
        return self.cast(other.dtype)

    # (`memory_format` changes nothing: there are no strides)

    def float(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.float32)

    def double(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.float64)

    def half(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.float16)

    def bfloat16(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.bfloat16)

    def int(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.int32)

    def long(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.int64)

    def short(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.int16)

    def char(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.int8)

    def byte(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.uint8)

    def bool(self: Tensor, memory_format: Any = None) -> Tensor:
        return self.cast(dtypes.bool)
