"""Communication: how one worker talks with the others, and how far it has come in that.

A process alone has none of it: no endpoint, no launcher to ask.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from manygrad.errors import NoRank
from manygrad.native.additions import TEXT_BITS
from manygrad.native.memory import table
from manygrad.runtime.profile.counters import GlobalCounters

if TYPE_CHECKING:
    from manygrad.collectives.transport import Endpoint

T = TypeVar("T")


class Hooks(NamedTuple):
    """How the launcher is asked, which knows all ranks (`launcher/plans.py`)."""

    # of (key, description, outline), when a plan is first made: a function that returns once all ranks have made it
    make_plan: Callable[[int, str, str], Callable[[], None]]
    # of a name and (number, digest, description) of values that all ranks must hold alike; returns at once
    compare_values: Callable[[str, list[tuple[int, str, str]]], None]
    # of the number of whole training steps done, by a Checkpointer: whether all ranks are to save here and end
    at_step: Callable[[int], bool] = lambda step: False
    # likewise, of a checkpoint that was loaded: the steps that it had done
    resumed: Callable[[int], None] = lambda step: None
    # of a checkpoint that is committed: its step
    saved: Callable[[int], None] = lambda step: None
    # whether the run has failed, in this rank or another one
    has_failed: Callable[[], bool] = lambda: False
    # whether this process may go on in another epoch
    may_go_on: bool = False


class Beside(Protocol):
    """Where collectives run that were started and not waited for."""

    def drain(self) -> None: ...


class Times(ctypes.Structure):
    """Seconds that collectives have taken, and those of them in which nothing was computed."""

    _fields_ = [("all_s", ctypes.c_double), ("waited_s", ctypes.c_double)]
    all_s: float
    waited_s: float


@dataclass
class Communication:
    """A worker's part in one world's communication. Large: a counter for each kind of thing that ranks number alike."""

    endpoint: Endpoint | None = None  # connected with all other workers
    hooks: Hooks | None = None
    descriptions: dict[int, str] = field(default_factory=dict)  # collective's key -> text, for errors of the transports
    # collective's key -> how often it has run, a word that native calls add to
    counters: dict[int, Any] = field(default_factory=dict)
    # one word, so that other threads read it at once: how many collectives have been entered, above TEXT_BITS bits of
    # the number of the last one's text
    entered_word: Any = field(default_factory=lambda: table(1), compare=False)
    texts: dict[str, int] = field(default_factory=lambda: {"": 0})  # their numbers, in the order of these
    times: Times = field(default_factory=Times, compare=False)
    compared: dict[int, int] = field(default_factory=dict)  # plan -> the last round in which its values were compared
    checks: int = 0  # calls of `assert_equal`
    saves: int = 0  # attempts to save a checkpoint: ranks make the same ones
    turns: Any = field(default=None, compare=False)  # of the Checkpointers (`checkpoint/turns.py`)
    meetings: int = 0  # of all ranks, before what ends a trace of a plain loop
    has_loops: bool = False  # plain loops that communicate were met
    why_left: str = ""  # not empty once this process communicates no more
    rank: int = 0  # it had by then
    beside: Beside | None = None  # where collectives run beside kernels (`thread_of` in `runtime/executors/overlap.py`)
    _spending: bool = False

    @property
    def entered(self) -> tuple[int, str]:
        """How many collectives of all workers this one has entered, and the text of the last; read from any thread. All
        ranks enter the same ones in the same order, between the same plans; so the launcher finds a rank that does
        not."""
        word = self.entered_word[0]
        return word >> TEXT_BITS, list(self.texts)[word & ((1 << TEXT_BITS) - 1)]

    @property
    def entered_count(self) -> int:
        return int(self.entered_word[0] >> TEXT_BITS)

    def text_number(self, text: str) -> int:
        """Number of a collective's text; 0 for those that are too many."""
        if len(self.texts) >> TEXT_BITS:
            return self.texts.get(text, 0)
        return self.texts.setdefault(text, len(self.texts))

    def enter(self, number: int) -> None:
        """A collective of all workers, by the number of its text."""
        self.entered_word[0] = ((self.entered_word[0] >> TEXT_BITS) + 1) << TEXT_BITS | number

    def counter(self, key: int) -> Any:
        """How often the collective `key` has run."""
        return self.counters.setdefault(key, table(1))

    @property
    def time_s(self) -> float:
        return self.times.all_s

    @property
    def waited_s(self) -> float:
        return self.times.waited_s

    def spend(self, step: Callable[[], T]) -> T:
        """Runs what communicates and counts its time. What runs in the waits of another step is in that one's time."""
        if self._spending:
            return step()
        self._spending, start = True, time.perf_counter()
        try:
            return step()
        finally:
            self._spending = False
            seconds = time.perf_counter() - start
            GlobalCounters.net_time_s += seconds
            self.times.all_s += seconds

    def waited(self, seconds: float) -> None:
        """Adds to the time spent waiting with nothing else to do."""
        GlobalCounters.net_wait_s += seconds
        self.times.waited_s += seconds

    def drain(self) -> None:
        """Waits for collectives that were started, when what was to follow has failed."""
        if self.beside is not None:
            self.beside.drain()

    def connect(self, endpoint: Endpoint, hooks: Hooks) -> None:
        """From now on there are other workers, reached through `endpoint`, and a launcher."""
        self.endpoint, self.hooks = endpoint, hooks
        endpoint.describe = lambda key: self.descriptions.get(key, "")

    def leave(self, why: str) -> None:
        """From now on this process makes no plans with others; who asks for one gets `NoRank`, as from the endpoint."""
        self.why_left, self.rank = why, self.endpoint.rank if self.endpoint is not None else 0
        self.hooks = Hooks(self.check, self.check)

    def check(self, *_: Any) -> Any:
        """Raises `NoRank` once this process has left."""
        if self.why_left:
            raise NoRank(rank=self.rank, reason=self.why_left)

    def forget(self) -> None:
        """After `leave`: nothing holds the endpoint, and with it the arena, any more."""
        self.endpoint = self.beside = None
