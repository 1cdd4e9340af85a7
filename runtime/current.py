"""The Runtime that this process works in: one at a time, for all of its threads.

The first one is `own` (`runtime/runtime.py`). Whoever makes something ready (a buffer, an executor, a schedule) asks
for it; what is then run holds the parts that it needs, so a replay does not ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from manygrad.collectives.transport import Endpoint
    from manygrad.multi.world import Membership, World
    from manygrad.runtime.exchange.communication import Communication, Hooks
    from manygrad.schedule.cache import Schedules
    from manygrad.tensor.threads import Threads
    from manygrad.tensor.uop.uop import UOp


class OpenDevices(Protocol):
    """`Devices`, whose parts ask for the Runtime themselves."""

    def get(self, name: str) -> Any: ...
    def trim(self) -> None: ...


class Checks(Protocol):
    """`Faults`, whose words lie in buffers of its devices."""

    @property
    def changes(self) -> int: ...
    @property
    def words(self) -> Mapping[str, Any]: ...
    @property
    def nodes(self) -> Mapping[Any, UOp]: ...
    def word_of(self, what: str, low: int, size: int, line: str, device: str | tuple[str, ...]) -> UOp: ...
    def sites_of(self, buffers: Iterable[Any]) -> frozenset[Any]: ...
    def note(self, sink: UOp) -> None: ...
    def note_replay(self, sites: frozenset[Any], results: Iterable[UOp]) -> int: ...
    def look(self) -> None: ...


class Stay(Protocol):
    """`Epoch`: a stay in one world."""

    @property
    def threads(self) -> Threads: ...


class Worker(Protocol):
    """What may be asked of the Runtime (`runtime/runtime.py` makes it, of parts that ask for it)."""

    @property
    def world(self) -> World: ...
    @property
    def schedules(self) -> Schedules: ...
    @property
    def threads(self) -> Threads: ...
    @property
    def kept(self) -> dict[str, Any]: ...
    @property
    def epoch(self) -> Stay: ...
    @property
    def communication(self) -> Communication: ...
    @property
    def devices(self) -> OpenDevices: ...
    @property
    def faults(self) -> Checks: ...
    def enter(self, membership: Membership, endpoint: Endpoint, hooks: Hooks) -> Stay: ...
    def leave(self) -> list[str]: ...
    def start_anew(self) -> list[str]: ...
    def end(self) -> list[str]: ...
    def become_child(self) -> None: ...


R = TypeVar("R", bound=Worker)
_installed: list[Worker] = []  # the last one is current


def current() -> Worker:
    if not _installed:
        raise RuntimeError("no Runtime: import the package `manygrad`, which makes one")
    return _installed[-1]


def install(runtime: Worker) -> None:
    """From now on, the process's Runtime."""
    _installed.append(runtime)


@contextmanager
def use(runtime: R) -> Iterator[R]:
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
