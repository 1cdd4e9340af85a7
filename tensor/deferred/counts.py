"""How the calls of plain loops were made: what was recorded and replayed, and where calls were made as they come, and
why. Under DEBUG=1 the end of the program tells."""

from __future__ import annotations

import atexit

from manygrad.tensor.environment import DEBUG
from manygrad.tensor.source import user_line

MOST_LINES = 1000  # of which reasons are kept
TOLD = 10  # of them at the end


class FollowCounts:
    """`recordings`, `replays`: of what ended a trace; `flushes`: how often calls were made as they come instead;
    `reasons`: why that was, and how often, by line."""

    def __init__(self) -> None:
        self.recordings = self.replays = self.flushes = 0
        self.reasons: dict[str, list[tuple[str, int]]] = {}

    def note_flush(self, why: str) -> None:
        """Calls of this thread are made as they come, from the user's line on that is running now."""
        self.flushes += 1
        if not DEBUG:
            return
        line = user_line()
        if line not in self.reasons and len(self.reasons) >= MOST_LINES:
            return
        found = self.reasons.setdefault(line, [])
        k = next((k for k, (reason, _) in enumerate(found) if reason == why), len(found))
        if k < TOLD:
            found[k : k + 1] = [(why, found[k][1] + 1 if k < len(found) else 1)]

    def told(self) -> list[str]:
        """The lines at the end."""
        out = [f"FOLLOW: {self.recordings} recorded, {self.replays} replayed, {self.flushes} made as they came"]
        most = sorted(self.reasons.items(), key=lambda entry: -sum(n for _, n in entry[1]))
        for line, found in most[:TOLD]:
            out.append(f"  {line}: " + "; ".join(f"{n}x {why}" for why, n in sorted(found, key=lambda x: -x[1])))
        if len(most) > TOLD:
            out.append(f"  and {len(most) - TOLD} more lines")
        return out

    def tell(self) -> None:
        if DEBUG and (self.recordings or self.flushes):
            print("\n".join(self.told()))


COUNTS = FollowCounts()
atexit.register(COUNTS.tell)

__all__ = ["COUNTS", "FollowCounts"]
