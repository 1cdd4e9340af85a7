"""Whether what is built now can be differentiated: `with no_grad():`.

A value made while it is off stands behind a DETACH, so no later backward() goes through it, unless it is made of such
values and constants alone (`STOPPED`): a model's graph then has few of them. A mode is its thread's own
(and its task's, in asyncio); a new thread starts with gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.table import AttributeTable
from manygrad.tensor.uop.uop import UOp

SAME_MEMORY = GroupOp.VIEW | {Ops.BITCAST, Ops.DETACH}
PURE = GroupOp.ELEMENTWISE - SAME_MEMORY | {Ops.CONST, Ops.PAD, Ops.REDUCE, Ops.GATHER, Ops.CAT}

STOPPED: AttributeTable[bool] = AttributeTable("stopped", "_stopped")


@STOPPED.by
def _stopped(u: UOp) -> bool:
    """Whether no gradient goes below `u` or ends at it, whatever becomes a leaf: memory and views of it may, detached
    ones too, and nodes that are made for it (`Tensor._become`)."""
    if not u.dtype.is_float:
        return True
    if u.op is Ops.DETACH:
        while u.op in SAME_MEMORY:
            u = u.src[0]
        return u.op in PURE
    return (u.op in SAME_MEMORY or u.op in PURE) and all(STOPPED[s] for s in u.src)


ENABLED = ContextVar("grad mode", default=True)
is_grad_enabled = ENABLED.get


class set_grad_enabled:
    """`with set_grad_enabled(False):`, or as a decorator: values made inside have no gradient
    (torch.set_grad_enabled)."""

    def __init__(self, mode: bool):
        self.mode = bool(mode)
        self.saved: list[bool] = []

    def __enter__(self) -> None:
        self.saved.append(ENABLED.get())
        ENABLED.set(self.mode)

    def __exit__(self, *exc: object) -> None:
        ENABLED.set(self.saved.pop())

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
