"""What a gradient that is changed in place becomes, as calls of a trace."""

from __future__ import annotations

from manygrad.tensor.tensor import Tensor


def summed(held: Tensor, new: Tensor) -> Tensor:
    """A gradient and what is added to it."""
    return _placed(new + held, held)


def zeros(held: Tensor) -> Tensor:
    """In the place of a gradient."""
    return _placed(held.zeros_like(), held)


def _placed(changed: Tensor, held: Tensor) -> Tensor:
    return changed._shard_like(held) if isinstance(held.device, tuple) else changed


__all__ = ["summed", "zeros"]
