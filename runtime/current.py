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

_installed: list[Runtime] = []  # the last one is current


def current() -> Runtime:
    if not _installed:
        raise RuntimeError("no Runtime: import the package `manygrad`, which makes one")
    return _installed[-1]


def install(runtime: Runtime) -> None:
    """From now on, the process's Runtime."""
    _installed.append(runtime)


@contextmanager
def use(runtime: Runtime) -> Iterator[Runtime]:
    """The process works in `runtime` inside; afterwards, also after an error, in the one of before. Where threads do so
    at once, all of them work in the one that came last, of those that are not left yet.

    >>> with use(Runtime()) as fresh: (Tensor([1.0]) + 1).numpy()
    >>> fresh.schedules.misses
    """
    _installed.append(runtime)
    try:
        yield runtime
    finally:
        last = max(i for i, r in enumerate(_installed) if r is runtime)
        del _installed[last]
