"""Tensors inside of tuples, lists and dicts: taken out in order, and others put in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manygrad.tensor.tensor import Tensor


@dataclass(frozen=True)
class TensorSlot:
    """In place of a tensor that was taken out: the number of it. Two structures with slots can be compared."""

    number: int


def tensors_out(x: Any, found: list[Tensor], leaf: Callable[[Any], Any] = lambda x: x) -> Any:
    """`x` with slots for its tensors, which are appended to `found`. `leaf`: what all else becomes first."""
    if isinstance(x, (list, tuple)):
        items = [tensors_out(y, found, leaf) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        done = {k: tensors_out(x[k], found, leaf) for k in sorted(x, key=str)}  # (in whichever order they are given)
        return {k: done[k] for k in x}
    x = x if isinstance(x, Tensor) else leaf(x)
    if not isinstance(x, Tensor):
        return x
    found.append(x)
    return TensorSlot(len(found) - 1)


def tensors_in(x: Any, tensors: Sequence[Tensor]) -> Any:
    """What `tensors_out` gave, with these in the slots."""
    if isinstance(x, TensorSlot):
        return tensors[x.number]
    if isinstance(x, (list, tuple)):
        items = [tensors_in(y, tensors) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return {k: tensors_in(y, tensors) for k, y in x.items()} if isinstance(x, dict) else x


__all__ = ["TensorSlot", "tensors_in", "tensors_out"]
