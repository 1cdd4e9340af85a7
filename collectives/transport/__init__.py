"""Transports between workers: `endpoint.Endpoint` over shared memory (`shm.py`) and ZeroMQ (`zmq.py`)."""

from __future__ import annotations

from manygrad.collectives.transport.endpoint import Borrowed, Endpoint, Ticket
from manygrad.collectives.transport.wire import MessageKey

__all__ = ["Borrowed", "Endpoint", "MessageKey", "Ticket"]
