"""The calls in the making, each with the place at which it runs."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp


class Phase(IntEnum):
    """Order of the calls at one step: the call that was made, then the sends that waited for it, then the releases of
    messages that it was the last to read."""

    ITSELF = 0
    SENDS = 1
    RELEASES = 2


class CallPlace(NamedTuple):
    """Where a call runs: with the call that was made as number `step`; -1 is before all."""

    step: int
    phase: Phase


class Calls:
    """Calls in the order in which they were made, which is that of those at one place."""

    def __init__(self) -> None:
        self.made: list[tuple[CallPlace, UOp]] = []

    @property
    def step(self) -> int:
        """The number of the next call."""
        return len(self.made)

    def add(self, what: UOp, *args: UOp, at: CallPlace | None = None) -> None:
        call = UOp(Ops.CALL, dtypes.void, (what, *args))
        self.made.append((at or CallPlace(self.step, Phase.ITSELF), call))

    def copy(self, target: UOp, source: UOp, device: str, at: CallPlace | None = None) -> None:
        self.add(UOp(Ops.COPY, target.dtype, (), device), target, source, at=at)

    def linear(self) -> UOp:
        calls = [call for _, call in sorted(self.made, key=lambda made: made[0])]
        return UOp(Ops.LINEAR, dtypes.void, tuple(calls))
