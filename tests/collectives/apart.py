"""Workers of one machine some of which share memory, as if the others were on other hosts."""

from __future__ import annotations

import os
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
    workers_a_host = 2
