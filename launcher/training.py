"""How far a rank's training is, as its Checkpointer tells, and what the launcher wants saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Training:
    """`steps_done` are whole steps; None where no Checkpointer has told of any."""

    steps_done: int | None = None
    counted_then: int = 0  # what this process had counted of steps itself by then
    save_asked: bool = False  # all ranks are to save
    told: int | None = None  # as many steps were done when the driver was told
    save_at: int | None = None  # the step at which all save; until it is known, no step after `told` ends
    terminated: bool = False  # this process got SIGTERM

    def step(self, counted: int) -> int | None:
        """The step that the rank is at, when this process has counted so many; None before the first."""
        return (counted or None) if self.steps_done is None else self.steps_done + counted - self.counted_then
