"""Instructions of the controller to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Send:
    """Send one message to the workers of these ranks."""

    ranks: tuple[int, ...]
    type: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """Have the agents of these ranks send a signal to the worker's process group."""

    ranks: tuple[int, ...]
    signum: int


@dataclass(frozen=True)
class Done:
    """The run is over: every process ended, or all time for it is up."""


@dataclass(frozen=True)
class Warn:
    """Tell the user; the run goes on."""

    text: str


@dataclass(frozen=True)
class Beat:
    """Tell all workers and supervisors that the launcher is there."""


Instruction = Send | Kill | Beat | Done | Warn
