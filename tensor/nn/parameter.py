"""What a module owns: parameters (trained), buffers (kept and saved, not trained)
and those that get their shape at the first call."""

from __future__ import annotations

from typing import Any

from manygrad.tensor.dtype import DType
from manygrad.tensor.tensor import Tensor


class _Owned(Tensor):
    """A tensor whose copies (deepcopy, pickle) stay of its class; results of operators are plain tensors."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        t = super().__deepcopy__(memo)
        t.__class__ = type(self)
        return t

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.numpy(), self.dtype.name, self._requires_grad)


class Parameter(_Owned):
    """A tensor that `Module.parameters()` finds: `self.weight = nn.Parameter(Tensor.zeros(3, 4))`."""

    def __init__(self, data: Any, requires_grad: bool = True, device: Any = None, dtype: DType | str | None = None):
        super().__init__(data, device, dtype, requires_grad)


class Buffer(_Owned):
    """A tensor that is saved with the module but not trained: a running mean, a mask.
    `persistent=False`: not saved either."""

    persistent: bool = True

    def __init__(self, data: Any, persistent: bool = True, device: Any = None, dtype: DType | str | None = None):
        super().__init__(data, device, dtype, False)
        self.persistent = persistent

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        t = super().__deepcopy__(memo)
        t.persistent = self.persistent  # type: ignore[attr-defined]
        return t


class UninitializedParameter:
    """Stands where a lazy module's parameter will be once its shape is known."""

    def __repr__(self) -> str:
        return "<a parameter without a shape yet>"


class UninitializedBuffer(UninitializedParameter):
    """Stands where a lazy module's buffer will be."""


def _rebuild(kind: type[_Owned], array: Any, dtype: str, requires_grad: bool | None) -> Tensor:
    t = Tensor(array, dtype=dtype, requires_grad=requires_grad)
    t.__class__ = kind
    return t
