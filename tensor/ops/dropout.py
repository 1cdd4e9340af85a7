"""Dropout and its relatives. `training=None` asks `Tensor.training`;
a mask is drawn by global element number, so it is the same at any sharding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from manygrad.tensor.ops.elementary import without_slope

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

_ALPHA = -1.7580993408473766  # where SELU ends far below 0


def _active(name: str, x: Tensor, p: float, training: bool | None) -> bool:
    from manygrad.tensor.tensor import Tensor

    if not 0 <= p <= 1:
        raise ValueError(f"{name}: the probability must lie in [0, 1], got {p}")
    return bool(Tensor.training if training is None else training) and p > 0


def _kept(x: Tensor, shape: tuple[Any, ...], p: float) -> Tensor:
    """Whether each element of `shape` stays, with probability 1 − p."""
    keep = x.rand(*shape, device=x.device) >= p
    return (x._placed_like(keep) if tuple(shape) == x.shape else keep).contiguous()


def dropout(input: Tensor, p: float = 0.5, training: bool | None = True, inplace: bool = False) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 − p)."""
    return _drop("dropout", input, input.shape, p, training, inplace)


def dropout1d(input: Tensor, p: float = 0.5, training: bool | None = True, inplace: bool = False) -> Tensor:
    """Zero whole channels of (N, C, L) or (C, L)."""
    return _drop_channels("dropout1d", input, 1, p, training, inplace)


def dropout2d(input: Tensor, p: float = 0.5, training: bool | None = True, inplace: bool = False) -> Tensor:
    """Zero whole channels of (N, C, H, W) or (C, H, W)."""
    return _drop_channels("dropout2d", input, 2, p, training, inplace)


def dropout3d(input: Tensor, p: float = 0.5, training: bool | None = True, inplace: bool = False) -> Tensor:
    """Zero whole channels of (N, C, D, H, W) or (C, D, H, W)."""
    return _drop_channels("dropout3d", input, 3, p, training, inplace)


def _drop_channels(name: str, x: Tensor, spatial: int, p: float, training: bool | None, inplace: bool) -> Tensor:
    if x.ndim not in (spatial + 1, spatial + 2):
        raise ValueError(f"{name} needs (C, *{spatial} dims) or (N, C, *{spatial} dims), not {x.shape}")
    return _drop(name, x, (*x.shape[: x.ndim - spatial], *(1,) * spatial), p, training, inplace)


def _drop(name: str, x: Tensor, shape: tuple[Any, ...], p: float, training: bool | None, inplace: bool) -> Tensor:
    if not _active(name, x, p, training):
        return x
    out = (
        without_slope(x.zeros_like(), x)
        if p == 1
        else _kept(x, shape, p)._where(x * (1.0 / (1.0 - p)), 0.0).cast(x.dtype)
    )
    return x.assign(out) if inplace else out


def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Put SELU's lowest value for dropped elements, then scale and shift so that mean 0 and variance 1 stay."""
    return _alpha_drop("alpha_dropout", input, input.shape, p, training, inplace)


def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """alpha_dropout of whole channels of (N, C, ...)."""
    return _alpha_drop(
        "feature_alpha_dropout", input, (*input.shape[:2], *(1,) * (input.ndim - 2)), p, training, inplace
    )


def _alpha_drop(name: str, x: Tensor, shape: tuple[Any, ...], p: float, training: bool | None, inplace: bool) -> Tensor:
    if not _active(name, x, p, training):
        return x
    if p == 1:
        return without_slope(x.zeros_like(), x)
    a = 1 / math.sqrt((1 - p) * (1 + p * _ALPHA**2))
    out = (_kept(x, shape, p)._where(x, _ALPHA) * a - a * _ALPHA * p).cast(x.dtype)
    return x.assign(out) if inplace else out
