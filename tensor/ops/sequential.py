"""Layers one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor


class SequentialMixin:
    def sequential(self: Tensor, layers: list[Any]) -> Tensor:
        x = self
        for layer in layers:
            x = layer(x)
        return x
