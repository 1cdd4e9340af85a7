"""Workers of one machine some of which share memory, as if the others were on other hosts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from manygrad.collectives.transport.endpoint import Endpoint


class Apart(Endpoint):
    """So many neighbours share memory (WORKERS_A_HOST; 0: all that can)."""

    workers_a_host = int(os.environ.get("WORKERS_A_HOST", "0"))

    def _attach(self, peer: int, card: dict[str, Any]) -> Any:
        count = self.workers_a_host
        if count and peer // count != self.rank // count:
            raise OSError("it is on another host")
        return super()._attach(peer, card)


class Pairs(Apart):
    """Of more than two workers."""

    workers_a_host = 2

    def connect(self, cards: Sequence[dict[str, Any]], deadline_s: float = 30.0) -> None:
        super().connect(cards, deadline_s)
        assert {*self.routes.values()} == {"shm", "zmq"}, self.routes
