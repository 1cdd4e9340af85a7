"""How the calls of plain loops were made: what was recorded and replayed, and where calls were made as they come, and
why. Under DEBUG=1 the end of the program tells; a training of which no step is a replay is told of once."""

from __future__ import annotations

import atexit
import warnings

from manygrad.tensor.environment import DEBUG
from manygrad.tensor.source import user_line

MOST_LINES = 1000  # of which reasons are kept
TOLD = 10  # of them at the end
MANY = 64  # steps of an optimiser in a row that were made as they come
# why that is so in each step of a loop, in words that reasons have in them
LASTING = ("cannot be put off", "a hook is registered", "a gradient is to be kept", "a tensor becomes one to train")


class FollowCounts:
    """`recordings`, `replays`: of what ended a trace; `flushes`: how often calls were made as they come instead;
    `reasons`: why that was, and how often, by line."""

    def __init__(self) -> None:
        self.recordings = self.replays = self.flushes = 0
        self.reasons: dict[str, list[tuple[str, int]]] = {}
        self.cause = ""  # the last reason of those that last, with its line
        self.slow: dict[int, int] = {}  # steps in a row that were no replay, by the optimiser's number

    def note_flush(self, why: str) -> None:
        """Calls of this thread are made as they come, from the user's line on that is running now."""
        self.flushes += 1
        lasts = any(words in why for words in LASTING)
        if not (DEBUG or lasts):
            return
        line = user_line()
        if lasts:
            self.cause = f"{why} ({line})"
        if not DEBUG:
            return
        if line not in self.reasons and len(self.reasons) >= MOST_LINES:
            return
        found = self.reasons.setdefault(line, [])
        k = next((k for k, (reason, _) in enumerate(found) if reason == why), len(found))
        if k < TOLD:
            found[k : k + 1] = [(why, found[k][1] + 1 if k < len(found) else 1)]

    def note_step(self, optimizer: int, is_replay: bool) -> None:
        """An optimiser has stepped. One line, once for each, where many steps in a row were no replay."""
        if is_replay:
            self.slow.pop(optimizer, None)
            return
        if len(self.slow) >= MOST_LINES:
            self.slow.clear()
        count = self.slow[optimizer] = self.slow.get(optimizer, 0) + 1
        if count == MANY:
            why = self.cause or "no step makes the calls of one before it"
            warnings.warn(
                f"the last {MANY} steps of this loop were built anew, and none was replayed: {why}; "
                "docs/fast_loops.md says what to do, and DEBUG=1 tells all reasons at the end",
                stacklevel=5,
            )

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
