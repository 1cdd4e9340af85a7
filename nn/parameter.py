"""Tensors that a module owns: parameters (trained), buffers (kept and saved, not trained)
and those that get their shape at the first call."""

from __future__ import annotations

from typing import Any

from manygrad.tensor.dtype import DType
from manygrad.tensor.tensor import Tensor


class Parameter(Tensor):
    """A tensor that `Module.parameters()` finds: `self.weight = nn.Parameter(Tensor.zeros(3, 4))`. Copies of it are
    parameters, results of operators plain tensors."""

    def __init__(self, data: Any, requires_grad: bool = True, device: Any = None, dtype: DType | str | None = None):
        super().__init__(data, device, dtype, requires_grad)


class Buffer(Tensor):
    """A tensor that is saved with the module but not trained: a running mean, a mask.
    `persistent=False`: not saved either."""

    persistent: bool = True

    def __init__(self, data: Any, persistent: bool = True, device: Any = None, dtype: DType | str | None = None):
        super().__init__(data, device, dtype, False)
        self.persistent = persistent


class UninitializedParameter:
    """Stands where a lazy module's parameter will be once its shape is known."""

    def __repr__(self) -> str:
        return "<a parameter without a shape yet>"


class UninitializedBuffer(UninitializedParameter):
    """Stands where a lazy module's buffer will be."""
