"""A connection whose requests begin in time, in parts that are worth their while: uvicorn waits for a request's head as
long as it takes, and reads all that has come before it does anything else, a chunk of one byte in 30 microseconds."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD = 16 * 1024  # bytes that it may have
PARTS, SMALL = 1024, 256  # of a body: so many may be of any size; bytes that each of the others has on average


class Parts(h11.Connection):
    """Refuses a body in too many small parts."""

    count = nbytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.count = self.nbytes = 0
        elif isinstance(event, h11.Data):
            self.count, self.nbytes = self.count + 1, self.nbytes + len(event.data)
            if self.count > PARTS + self.nbytes // SMALL:
                raise h11.RemoteProtocolError("the body comes in too many small parts")
        return event


class Connection(H11Protocol):
    """Closed when a head is not complete `within_s` after its first byte, the first one after the connection was made.
    (A body's time is `body_of`'s, and between two requests uvicorn keeps it.)"""

    def __init__(self, within_s: float, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = Parts(h11.SERVER, self.config.h11_max_incomplete_event_size or HEAD)
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

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # it has an answer already
            self.transport.close()

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
