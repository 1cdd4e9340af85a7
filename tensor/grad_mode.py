"""Whether what is built now can be differentiated: `with no_grad():`.

A value made while it is off stands behind a DETACH, so no later backward() goes through it. A mode is its thread's own
(and its task's, in asyncio); a new thread starts with gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_enabled = ContextVar("grad mode", default=True)
is_grad_enabled = _enabled.get


class set_grad_enabled:
    """`with set_grad_enabled(False):`, or as a decorator: values made inside have no gradient
    (torch.set_grad_enabled)."""

    def __init__(self, mode: bool):
        self.mode = bool(mode)
        self.saved: list[bool] = []

    def __enter__(self) -> None:
        self.saved.append(_enabled.get())
        _enabled.set(self.mode)

    def __exit__(self, *exc: object) -> None:
        _enabled.set(self.saved.pop())

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(fn):
            return self._of_generator(fn)

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with set_grad_enabled(self.mode):
                return fn(*args, **kwargs)

        return wrapped

    def _of_generator(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The mode holds while the generator runs, not while its caller does."""

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            generator = fn(*args, **kwargs)
            step: Callable[..., Any] = generator.send
            given: tuple[Any, ...] = (None,)
            while True:
                try:
                    with set_grad_enabled(self.mode):
                        value = step(*given)
                except StopIteration as end:
                    return end.value
                try:
                    step, given = generator.send, ((yield value),)
                except GeneratorExit:
                    with set_grad_enabled(self.mode):
                        generator.close()
                    raise
                except BaseException as error:
                    step, given = generator.throw, (error,)

        return wrapped


class no_grad(set_grad_enabled):
    """Nothing made inside has a gradient (torch.no_grad)."""

    def __init__(self) -> None:
        super().__init__(False)


class enable_grad(set_grad_enabled):
    """Gradients again, inside a `no_grad` block (torch.enable_grad)."""

    def __init__(self) -> None:
        super().__init__(True)
