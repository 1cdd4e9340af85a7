"""Properties of a tensor: sizes, type, place. Nothing here computes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from manygrad.tensor.dtype import DType
from manygrad.tensor.uop import Ops
from manygrad.tensor.uop.shape import numel

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class PropertiesMixin:
    """Properties of tensors. Large: PyTorch has that many."""

    @property
    def shape(self: Tensor) -> tuple[Any, ...]:
        return self.uop.shape

    @property
    def dtype(self: Tensor) -> DType:
        return self.uop.dtype

    @property
    def device(self: Tensor) -> str | tuple[str, ...]:
        """Its name, or a tuple of names when sharded."""
        return self.uop.device or self._device

    @property
    def ndim(self: Tensor) -> int:
        return len(self.uop.shape)

    def dim(self: Tensor) -> int:
        return self.ndim

    ndimension = dim

    def numel(self: Tensor) -> int:
        """Elements; a symbolic dim counts with its largest value."""
        return numel(self.shape)

    nelement = numel

    def size(self: Tensor, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[self._dim(dim)]

    def element_size(self: Tensor) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def itemsize(self: Tensor) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self: Tensor) -> int:
        return self.numel() * self.dtype.itemsize

    def stride(self: Tensor, dim: int | None = None) -> Any:
        """Elements from one index to the next, per dim. Values are stored in row-major order;
        views have none of their own."""
        strides = tuple(prod(self.shape[i + 1 :]) for i in range(self.ndim))
        return strides if dim is None else strides[self._dim(dim)]

    def storage_offset(self: Tensor) -> int:
        return 0

    def is_contiguous(self: Tensor) -> bool:
        """Whether it is stored, or will be when computed, in row-major order: all but views of storage."""
        return self.uop.op not in (Ops.PERMUTE, Ops.FLIP, Ops.EXPAND, Ops.SHRINK)

    def is_floating_point(self: Tensor) -> bool:
        return self.dtype.is_float

    def is_complex(self: Tensor) -> bool:
        return False

    def is_signed(self: Tensor) -> bool:
        return self.dtype.is_float or self.dtype.kind == "i"

    def is_conj(self: Tensor) -> bool:
        return False

    def is_neg(self: Tensor) -> bool:
        return False

    def is_inference(self: Tensor) -> bool:
        return False

    def conj(self: Tensor) -> Tensor:
        return self

    def conj_physical(self: Tensor) -> Tensor:
        return self

    @property
    def real(self: Tensor) -> Tensor:
        return self

    def is_same_size(self: Tensor, other: Tensor) -> bool:
        return self.shape == other.shape

    def is_nonzero(self: Tensor) -> bool:
        """Whether the one element is not 0."""
        return bool(self)

    @property
    def is_cpu(self: Tensor) -> bool:
        return isinstance(self.device, str) and self.device.startswith("CPU")

    @property
    def is_cuda(self: Tensor) -> bool:
        return isinstance(self.device, str) and self.device.startswith("CUDA")

    @property
    def is_sparse(self: Tensor) -> bool:
        return False

    @property
    def is_quantized(self: Tensor) -> bool:
        return False

    @property
    def is_nested(self: Tensor) -> bool:
        return False

    @property
    def is_meta(self: Tensor) -> bool:
        return isinstance(self.device, str) and self.device.startswith("NULL")

    def get_device(self: Tensor) -> int:
        """The number of its device; −1 on the CPU, as in PyTorch."""
        if not isinstance(self.device, str):
            raise ValueError(f"get_device: the tensor is on {len(self.device)} devices")
        return -1 if self.is_cpu else int(self.device.partition("@")[0].partition(":")[2] or 0)

    def cpu(self: Tensor) -> Tensor:
        """On `CPU:0`; a sharded tensor is gathered."""
        return self.to("CPU")

    # *** tensors of the same type and place ***

    def new_tensor(
        self: Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        t = Tensor(data.detach()._copied() if isinstance(data, Tensor) else data, dtype=dtype or self.dtype)
        t = t.to(device or self.device)
        return t.requires_grad_() if requires_grad else t

    def new_full(
        self: Tensor, size: Any, fill_value: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        from manygrad.tensor.tensor import Tensor

        return Tensor.full(size, fill_value, dtype or self.dtype, device or self.device, requires_grad)

    def new_zeros(
        self: Tensor, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        return self.new_full(_size(size), 0, dtype, device, requires_grad)

    def new_ones(
        self: Tensor, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        return self.new_full(_size(size), 1, dtype, device, requires_grad)

    new_empty = new_zeros


def _size(size: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
