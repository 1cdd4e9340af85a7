"""The Runtime that this process works in: one at a time, for all of its threads.

The first one is `own` (`runtime/runtime.py`). Whoever makes something ready (a buffer, an executor, a schedule) asks
for it; what is then run holds the parts that it needs, so a replay does not ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manygrad.runtime.runtime import Runtime

_current: Runtime | None = None


def current() -> Runtime:
    if _current is None:
        raise RuntimeError("no Runtime: import the package `manygrad`, which makes one")
    return _current


def install(runtime: Runtime) -> None:
    """From now on, the process's Runtime."""
    global _current
    _current = runtime


@contextmanager
def use(runtime: Runtime) -> Iterator[Runtime]:
    """The process works in `runtime` inside; afterwards, also after an error, in the one of before.

    >>> with use(Runtime()) as fresh: (Tensor([1.0]) + 1).numpy()
    >>> fresh.schedules.misses
    """
    before = current()
    install(runtime)
    try:
        yield runtime
    finally:
        install(before)
