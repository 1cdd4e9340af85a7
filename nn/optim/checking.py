"""Checks of what optimisers and schedules are given: numbers in the range that makes sense, and keywords that mean
something."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable
from math import inf
from typing import Any

from manygrad.tensor.tensor import Tensor


def check_number(owner: str, name: str, value: Any, low: float = 0.0, high: float = inf, below: bool = False) -> None:
    """A number with low <= value <= high (`below`: < high). Of a Tensor only that it is one number is known here."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{owner}: {name} is one number, not a tensor of shape {value.shape}")
    elif not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name} is a number, not {value!r} of type {type(value).__name__}")
    elif not low <= float(value) <= high or (below and value == high):
        between = f"lie in [{low:g}, {high:g}{')' if below else ']'}"
        must = between if high < inf else f"be at least {low:g}" if low else "not be negative"
        raise ValueError(f"{owner}: {name} must {must}, got {value}")


def check_count(owner: str, name: str, value: Any, least: int = 1) -> None:
    """A whole number, at least `least`."""
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{owner}: {name} is a whole number, not {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{owner}: {name} must be at least {least}, got {value}")


MEANT = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}  # other libraries' names


def check_names(owner: str, given: Iterable[str], known: Iterable[str], advice: str = "") -> None:
    """TypeError on a name that nothing reads, with the one that was meant."""
    known = sorted(known)
    for name in given:
        if name not in known:
            near = [m for m in [MEANT.get(name)] if m in known] or difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}{advice}"
            raise TypeError(f"{owner} has no argument {name!r}{hint}")
