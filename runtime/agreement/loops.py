"""All ranks make what ends a trace of a plain loop in one way: as a replay, as a recording, or call by call.

Ranks of one program may come to an ending by other calls: rank 0 alone prints a weight in the middle of a step. So
before an ending that communicates all ranks meet, and say where they are. One whose calls are made as they come meets
the others before the plan that it has then (`agreement.py`), and all go on when each of them has come to a plan.

    rank 0   at place 7, replay          rank 0   at place 7, replay
    rank 1   at place 7, recording       rank 1   a plan
    ==>      both record                 ==>      rank 0 makes its calls, too; they meet again, each with a plan

A rank that runs another program gives the error of plans or of messages that differ. Cost of a meeting: ceil(log2
workers) short messages, one after the other.
"""

from __future__ import annotations

from functools import lru_cache

from manygrad.runtime.current import current
from manygrad.tensor.environment import FOLLOW
from manygrad.tensor.source import user_line

REPLAY, RECORD, PLAIN = range(3)
_MEETING = 0x3EE7  # what its messages carry as their plan
_AT_A_PLAN = 0


@lru_cache(1024)
def is_followed(device: str | tuple[str, ...] | None, workers: int) -> bool:
    """Whether values on a device are a part of loops that are followed: this worker's own, or those of all."""
    names = (device,) if isinstance(device, str) else device or ()
    ranks = {d.partition("@")[2] for d in names}
    return not any(d.startswith("DISK") for d in names) and (ranks <= {""} or (len(ranks) == workers > 1))


def agree(place: int, how: int) -> int:
    """How all ranks make an ending. `place`: a positive number, the same on ranks that came to it by the same calls;
    `how`: as this rank can, REPLAY or RECORD."""
    highest, lowest, how = _meet(place, how)
    return how if highest == lowest else PLAIN


def wait_for_plans() -> None:
    """Until all ranks have come to a plan, before this one runs. Only where loops are followed that communicate."""
    if current().communication.has_loops and FOLLOW:
        while _meet(_AT_A_PLAN, PLAIN)[:2] != (_AT_A_PLAN, _AT_A_PLAN):
            pass


def _meet(place: int, how: int) -> tuple[int, int, int]:
    """(the highest place of all ranks, the lowest, the largest `how`)"""
    from manygrad.collectives.transport.largest import largest  # (it loads the compiler, which has run by now)
    from manygrad.collectives.transport.wire import MessageKey

    communication = current().communication
    communication.check()
    endpoint = communication.endpoint
    assert endpoint is not None
    communication.meetings += 1
    communication.descriptions[_MEETING] = f"what a loop is about to compute at {user_line()}"
    key = MessageKey(_MEETING, communication.meetings, 0)
    highest, lowest, how = communication.spend(lambda: largest(endpoint, key, (place, -place, how)))
    return highest, -lowest, how
