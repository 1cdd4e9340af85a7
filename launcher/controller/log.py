"""What has happened in a run: its last events, and for each rank its own last ones, as lines with times.

A rank's heartbeats of the same kind that follow one another are one record with a count, so that they push nothing out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..messages import (
    AgentBeat,
    AgentLost,
    AtStep,
    Committed,
    Event,
    Exited,
    Failed,
    Finished,
    Hello,
    Interrupt,
    NodesBack,
    Planned,
    Progress,
    Spawned,
    Stopping,
    Values,
)
from ..ranks import ranks_text, signal_name

KEPT = 100  # records of the run, and as many of each rank
MAX_FACTS = 160  # characters of a record
BEATS = (Progress.__name__, AgentBeat.__name__)

_FACTS: dict[type, Callable[[Any], str]] = {
    Spawned: lambda e: f"pid {e.pid} on {e.host}",
    Hello: lambda e: f"pid {e.pid} on {e.host}",
    Progress: lambda e: f"step {e.step}, {e.plans} plans, {e.collectives} collectives{_at(e.where)}",
    Planned: lambda e: f"plan {e.n}, {e.description}",
    Values: lambda e: e.name,
    Committed: lambda e: f"step {e.step}",
    AtStep: lambda e: f"step {e.step}",
    Failed: lambda e: f"{e.kind}: {_first_line(e.message)}{_at(e.where)}",
    Stopping: lambda e: _at(e.where).removeprefix(", "),
    Finished: lambda e: f"{e.collectives} collectives",
    AgentBeat: lambda e: f"process {e.process or 'ended'}, {e.cpu_ms} ms of CPU",
    Exited: lambda e: f"code {e.code}" if e.code >= 0 else signal_name(-e.code),
    AgentLost: lambda e: e.reason,
    Interrupt: lambda e: signal_name(e.signum),
    NodesBack: lambda e: f"{e.nodes} nodes",
}


def _at(where: str) -> str:
    return f", at {where}" if where else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def facts(event: object) -> str:
    """The fields of an event that a person wants to see, on one line."""
    text = _first_line(_FACTS[type(event)](event)) if type(event) in _FACTS else ""
    return text if len(text) <= MAX_FACTS else f"{text[: MAX_FACTS - 3]}..."


@dataclass
class Record:
    """An event, or an order to ranks. `at` and `until` are seconds since the run began; `then` is what became of it;
    `ranks` are those that it concerns."""

    at: float
    ranks: tuple[int, ...]
    what: str
    then: str = ""
    facts: str = ""
    is_event: bool = True
    refused: bool = False
    count: int = 1
    until: float = 0.0

    def line(self, with_ranks: bool = True) -> str:
        """`12.74 s  rank 1: Failed: running -> failed (ValueError: bad batch)`"""
        time = f"{self.at:.2f}" + (f"-{self.until:.2f}" if self.count > 1 else "") + " s  "
        who = f"{ranks_text(list(self.ranks))}: " if with_ranks and self.ranks else ""
        what = f"{self.count} {self.what}" if self.count > 1 else self.what
        return time + who + what + (f": {self.then}" if self.then else "") + (f" ({self.facts})" if self.facts else "")

    def is_like(self, other: Record) -> bool:
        return (self.what, self.then, self.refused) == (other.what, other.then, other.refused)


class EventLog:
    """The records of a run of `size` ranks, which began at `began`. `now` is the time of the event that is handled."""

    def __init__(self, size: int, began: float) -> None:
        self.began = self.now = began
        self.records: deque[Record] = deque(maxlen=KEPT)  # of all ranks; no heartbeats that fit
        self.stories: list[deque[Record]] = [deque(maxlen=KEPT) for _ in range(size)]
        self.until_cause: tuple[Record, ...] = ()  # those of `records` that were there when the run failed
        self.events = self.refused = 0  # how many there were

    def event(self, event: Event | Interrupt | NodesBack, then: str = "", *, refused: bool = False) -> None:
        """Take down an event and what became of it. `refused`: it fits no row of the table."""
        self.events += 1
        self.refused += refused
        ranks = (event.rank,) if isinstance(event, Event) else ()
        self._add(Record(self._at(), ranks, type(event).__name__, then, facts(event), refused=refused))

    def order(self, what: str, ranks: Iterable[int]) -> None:
        """Take down what ranks are told, or done to them."""
        self._add(Record(self._at(), tuple(ranks), what, is_event=False))

    def cause(self) -> None:
        """The run has failed: what led to this is kept, however much follows."""
        self.until_cause = tuple(self.records)

    def run_records(self) -> list[Record]:
        """The last records up to the run's failure, and those since."""
        before = [r for r in self.until_cause if all(r is not x for x in self.records)]
        return [*before, *self.records]

    def story(self, rank: int) -> list[str]:
        """What happened to one rank, a line for each record."""
        return [r.line(with_ranks=False) for r in self.stories[rank]]

    def _at(self) -> float:
        return self.now - self.began

    def _add(self, record: Record) -> None:
        record.until = record.at
        if record.what in BEATS:
            for last in reversed(self.stories[record.ranks[0]]):
                if last.is_like(record):
                    last.count, last.until, last.facts = last.count + 1, record.at, record.facts
                    return
                if last.what not in BEATS:
                    break
        if record.what not in BEATS or record.refused:
            self.records.append(record)
        for r in record.ranks:
            self.stories[r].append(record)
