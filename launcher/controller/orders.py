"""The instructions of one event, collected for the driver; what ranks are told stands in the log, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..instructions import Beat, Done, Instruction, Kill, Send, Warn
from ..ranks import Rank, State, signal_name
from .log import EventLog


class Orders:
    def __init__(self, ranks: Sequence[Rank], log: EventLog) -> None:
        self.ranks, self.log = ranks, log
        self._collected: list[Instruction] = []

    def take(self) -> list[Instruction]:
        """What has been collected since the last call."""
        taken, self._collected = self._collected, []
        return taken

    def send(self, type: str, /, **content: Any) -> None:
        """To all workers that may still listen."""
        ended = (State.FAILED, State.READY, State.EXITED)
        self.send_to([r.rank for r in self.ranks if r.state not in ended], type, **content)

    def send_to(self, ranks: Sequence[int], type: str, /, **content: Any) -> None:
        if ranks:
            self.log.order(f"told {type}", ranks)
            self._collected.append(Send(tuple(ranks), type, content))

    def kill(self, signum: int) -> None:
        """Send a signal to the workers that have not ended."""
        ranks = tuple(r.rank for r in self.ranks if r.state not in (State.READY, State.EXITED))
        if ranks:
            self.log.order(f"gets {signal_name(signum)}", ranks)
            self._collected.append(Kill(ranks, int(signum)))

    def warn(self, text: str) -> None:
        self._collected.append(Warn(text))

    def beat(self) -> None:
        self._collected.append(Beat())

    def done(self) -> None:
        self._collected.append(Done())
