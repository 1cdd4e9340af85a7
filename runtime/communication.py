"""Communication: how one worker talks with the others, and how far it has come in that.

A process alone has none of it: no endpoint, no launcher to ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from manygrad.native.memory import table
from manygrad.runtime.counters import GlobalCounters

if TYPE_CHECKING:
    from manygrad.collectives.transport import Endpoint
    from manygrad.runtime.lanes import Lane


class Hooks(NamedTuple):
    """How the launcher is asked, which knows all ranks (`launcher/plans.py`)."""

    # of (key, description, outline), when a plan is first made: a function that returns once all ranks have made it
    make_plan: Callable[[int, str, str], Callable[[], None]]
    # of a name and (number, digest, description) of values that all ranks must hold alike; returns at once
    compare_values: Callable[[str, list[tuple[int, str, str]]], None]


@dataclass
class Communication:
    endpoint: Endpoint | None = None  # connected with all other workers
    hooks: Hooks | None = None
    descriptions: dict[int, str] = field(default_factory=dict)  # collective's key -> text, for errors of the transports
    # collective's key -> how often it has run, a word that native calls add to
    counters: dict[int, Any] = field(default_factory=dict)
    _entered: tuple[int, str] = (0, "")
    native: Callable[[], tuple[int, str]] | None = None  # `entered` while a native call enters several
    time_s: float = 0.0  # that collectives have taken
    waited_s: float = 0.0  # of it, in which nothing was computed
    compared: dict[int, int] = field(default_factory=dict)  # plan -> the last round in which its values were compared
    checks: int = 0  # calls of `assert_equal`
    _lane: Lane | None = None

    @property
    def entered(self) -> tuple[int, str]:
        """How many collectives of all workers this one has entered, and the text of the last; read from any thread. All
        ranks enter the same ones in the same order, between the same plans; so the launcher finds a rank that does
        not."""
        native = self.native
        return self._entered if native is None else native()

    def enter(self, text: str, times: int = 1) -> None:
        self._entered = (self._entered[0] + times, text)

    def counter(self, key: int) -> Any:
        """How often the collective `key` has run."""
        return self.counters.setdefault(key, table(1))

    def spent(self, seconds: float) -> None:
        GlobalCounters.net_time_s += seconds
        self.time_s += seconds

    def waited(self, seconds: float) -> None:
        """Of what was spent, with nothing else to do."""
        GlobalCounters.net_wait_s += seconds
        self.waited_s += seconds

    @property
    def lane(self) -> Lane:
        """In which collectives run beside kernels."""
        if self._lane is None:
            from manygrad.runtime.lanes import Lane

            self._lane = Lane(self.endpoint)
        return self._lane

    def drain(self) -> None:
        """Waits for collectives that were started, when what was to follow has failed."""
        if self._lane is not None:
            self._lane.drain()

    def connect(self, endpoint: Endpoint, hooks: Hooks) -> None:
        """From now on there are other workers, reached through `endpoint`, and a launcher."""
        self.endpoint, self.hooks = endpoint, hooks
        endpoint.describe = lambda key: self.descriptions.get(key, "")
