"""A connection whose requests begin in time: uvicorn waits for a request's head as long as it takes."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closed when a head is not complete `within_s` after its first byte, the first one after the connection was made.
    (A body's time is `body_of`'s, and between two requests uvicorn keeps it.)"""

    def __init__(self, within_s: float, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.within_s = within_s
        self.late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._rest()

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        if self.answering:
            self._rest()
        elif self.late is None:
            self.late = self.loop.call_later(self.within_s, self._end)

    def _rest(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None

    def _end(self) -> None:
        self.late = None
        if not self.answering:
            self.transport.close()
