"""The lock of the front end: who holds it may change what all threads share.

Threads build graphs side by side without it: nodes are interned atomically (`tensor/uop/uop.py`), and an operator reads
its operands once. It is held by what looks at all live tensors or changes them: realizing, assigning, differentiating,
tracing, capturing and replaying a TinyJit. Modes (`no_grad`, `Tensor.train`, `Context`) are context variables: each
thread has its own, and a new one starts with the defaults.

When the interpreter ends, daemon threads stop wherever they are, with whatever they hold; the main thread, which still
runs destructors, takes the lock before.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

LAST_S = 1.0  # how long the end waits for a daemon thread that holds the lock

LOCK = threading.RLock()
atexit.register(LOCK.acquire, timeout=LAST_S)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LOCK._at_fork_reinit)  # type: ignore[attr-defined]  # (a thread that held it is not in the child)


def is_mine() -> bool:
    """Whether this thread holds it."""
    return bool(LOCK._is_owned())  # type: ignore[attr-defined]


def locked(fn: F) -> F:
    """A function that runs with the lock held."""

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return fn(*args, **kwargs)

    return cast(F, wrapped)
