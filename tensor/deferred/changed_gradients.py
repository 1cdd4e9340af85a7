"""What a gradient that is changed in place becomes, as calls of a trace."""

from __future__ import annotations

from typing import Any

from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp


def summed(held: Tensor, new: Tensor) -> Tensor:
    """A gradient and what is added to it."""
    return _placed(new + held, held)


def zeros(held: Tensor) -> Tensor:
    """In the place of a gradient."""
    return _placed(held.zeros_like(), held)


def _placed(changed: Tensor, held: Tensor) -> Tensor:
    return changed._shard_like(held) if isinstance(held.device, tuple) else changed


def part_of(whole: Tensor, *steps: Any) -> Tensor:
    """A view of it: names of movements, each with what it is made with."""
    u = whole.uop
    for name, arg in zip(steps[::2], steps[1::2]):
        u = UOp(Ops[name], u.dtype, (u,), arg)
    return whole._new(u)


__all__ = ["part_of", "summed", "zeros"]
