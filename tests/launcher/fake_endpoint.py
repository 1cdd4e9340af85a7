"""An endpoint that connects nothing: the launcher's tests need no transport."""

from __future__ import annotations

from typing import Any


class Endpoint:
    arena = None
    link = None

    def __init__(self, *, rank: int, size: int, job: str, epoch: int, bind_host: str) -> None:
        self.rank, self.size, self.bytes_sent, self.reason, self.why_closed = rank, size, 0, "", ""

    def card(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def connect(self, cards: list[dict[str, Any]], deadline_s: float) -> None:
        assert [c["rank"] for c in cards] == list(range(self.size))

    def abort(self, reason: str) -> None:
        self.reason = reason

    def waiting(self) -> None:
        return None

    def keep_going(self) -> None:
        pass

    def close(self, why: str) -> None:
        self.why_closed = why

    def leave_to_parent(self, why: str) -> None:
        self.why_closed = why
