"""A loop over columns whose every step is the same traced function: compiled once, run n times."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from manygrad.tensor.function import function
from manygrad.tensor.tensor import Tensor


@cache
def _traced(step: Callable[..., Any]) -> function:
    return function(step)


def repeat(step: Callable[..., Any], count: int, *state: Tensor) -> tuple[Tensor, ...]:
    """`state = step(k, *state)` for k = 0 .. count − 1; k is an int64 tensor.

    Its gradient goes through every step and keeps each one's state; a `Function` around it is for what has a formula.
    """
    numbers = Tensor.arange(count).contiguous() if count else None
    if numbers is not None:
        numbers = numbers.to(state[0].device)
    for k in range(count):
        assert numbers is not None
        state = _traced(step)(numbers[k], *state)
    return state


def square(name: str, a: Tensor) -> Tensor:
    """`a`, checked to be square matrices of floats."""
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"{name}: expected square matrices (..., n, n), got shape {a.shape}")
    return floats(name, a)


def floats(name: str, a: Tensor) -> Tensor:
    if a.ndim < 2:
        raise ValueError(f"{name}: expected matrices (..., m, n), got shape {a.shape}")
    if not a.dtype.is_float or a.dtype.is_half:
        raise TypeError(f"{name}: expected float32 or float64, not {a.dtype.name}; cast first")
    return a


def first_bad(bad: Tensor) -> Tensor:
    """LAPACK's info for (..., k) marks: the number, from 1, of the first that is set, 0 where none is; int32."""
    k = bad.shape[-1]
    if not k:
        return bad.sum(-1).cast("int32")
    return bad.any(-1)._where(bad.cast("int32").argmax(-1) + 1, 0).cast("int32")


def refuse_bad(name: str, what: str, info: Tensor, check: bool) -> Tensor:
    """`info`; with `check` a ValueError if it tells of anything."""
    if check and info.numel() and int(info.amax().item()):
        raise ValueError(f"{name}: {what}, info is {info.tolist()}")
    return info
