"""Whether what is built now can be differentiated: `with no_grad():`.

A value made while it is off stands behind a DETACH, so no later backward() goes through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

enabled = True


class set_grad_enabled:
    """`with set_grad_enabled(False):`, or as a decorator: values made inside have no gradient (torch.set_grad_enabled)."""

    def __init__(self, mode: bool):
        self.mode = bool(mode)
        self.saved: list[bool] = []

    def __enter__(self) -> None:
        global enabled
        self.saved.append(enabled)
        enabled = self.mode

    def __exit__(self, *exc: object) -> None:
        global enabled
        enabled = self.saved.pop()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with set_grad_enabled(self.mode):
                return fn(*args, **kwargs)

        return wrapped


class no_grad(set_grad_enabled):
    """Nothing made inside has a gradient (torch.no_grad)."""

    def __init__(self) -> None:
        super().__init__(False)


class enable_grad(set_grad_enabled):
    """Gradients again, inside a `no_grad` block (torch.enable_grad)."""

    def __init__(self) -> None:
        super().__init__(True)


def is_grad_enabled() -> bool:
    return enabled
