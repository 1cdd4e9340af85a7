"""One function for any number of spatial dims, under PyTorch's names: `conv1d`, `conv2d`, `conv3d`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def of_dims(n: int, function: Callable[Concatenate[int, P], R]) -> Callable[P, R]:
    """`function` with `n` as its first argument, under a name that says so: `_conv_nd` is `conv2d`."""

    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(n, *args, **kwargs)

    made.__name__ = made.__qualname__ = function.__name__.replace("_nd", f"{n}d").removeprefix("_")
    made.__doc__, made.__module__ = function.__doc__, function.__module__
    signature = inspect.signature(function)
    made.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
    made.__wrapped__ = function  # type: ignore[attr-defined]
    return made


def of_all_dims(function: Callable[Concatenate[int, P], R]) -> tuple[Callable[P, R], ...]:
    """For 1, 2 and 3 dims."""
    return of_dims(1, function), of_dims(2, function), of_dims(3, function)
