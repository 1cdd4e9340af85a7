"""drop_unread: calls that only write temporaries which no later call reads are not made.

Precondition: items in graph order. Postcondition: every temporary that is written is read by a later call.

A device with an empty part of a cut value has such calls. Collectives stay, for other workers wait in them.
"""

from __future__ import annotations

from manygrad.schedule.facts.buffers import base_buffer, is_temporary
from manygrad.schedule.facts.items import Item
from manygrad.tensor.uop import Ops, UOp


def drop_unread(items: list[Item]) -> list[Item]:
    read: set[UOp] = set()
    kept: list[Item] = []
    for item in reversed(items):
        if item.is_comm or any(not is_temporary(b) or b in read for b in item.writes):
            kept.append(item)
            read.update(base_buffer(a.src[0] if a.op is Ops.VIEW else a) for a in item.args)
    return kept[::-1]
