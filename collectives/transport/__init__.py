"""Transports between workers: `endpoint.Endpoint` over shared memory (`shm.py`) and ZeroMQ (`zmq.py`).

The process's own endpoint, if it is one of several workers, is `current()`.
"""

from __future__ import annotations

from manygrad.collectives.transport.endpoint import Borrowed, Endpoint, Ticket
from manygrad.collectives.transport.wire import MessageKey

_current: Endpoint | None = None


def current() -> Endpoint | None:
    """This worker's endpoint; None in a world of one."""
    return _current


def set_current(endpoint: Endpoint | None) -> None:
    """Set once by the launcher's worker, after `connect`; None when it ends."""
    global _current
    _current = endpoint


__all__ = ["Borrowed", "Endpoint", "MessageKey", "Ticket", "current", "set_current"]
