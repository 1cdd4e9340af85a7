"""order_items: a topological order of the calls that starts communication as early as it can, and frees memory early.

Of the calls that are ready, those go first that lead to communication, to the earliest above all; then those that do
not wait for any: they run while it is on its way. Of equals, the one that lets go of the most bytes of temporary
buffers; of those that let go of none, the one whose result is read first in graph order. So a weight's gradient is
computed as soon as what it reads is there, the activation that it was the last to read is gone before the next one
comes, and what each of many layers needs is made when its layer is next.

Edges: a read after the effects it names; a write after every read of the older value of what it writes (so that no
assignment overtakes a reader); communication in program order. A cycle means that a value is needed both before and
after an assignment: `NoOrder`, and the schedule is made anew with copies of older values (`copy_old_values.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from manygrad.errors import NoOrder
from manygrad.schedule.facts.buffers import is_temporary, nbytes_of
from manygrad.schedule.facts.items import Item, leaves_the_worker
from manygrad.schedule.facts.touched import apart
from manygrad.tensor.uop import UOp


def order_items(items: list[Item]) -> list[Item]:
    # in program order, the same on every worker: none waits in a collective that another has yet to reach
    comm = sorted((i for i, item in enumerate(items) if item.is_comm), key=lambda i: items[i].what.arg.members.place)
    after = _edges(items, comm)
    out = _in_order(items, after, comm)
    if len(out) != len(items):
        stuck = sorted({items[i].line for i in set(range(len(items))).difference(out)})
        raise NoOrder(
            "an assignment and its readers wait for each other: "
            "a kernel needs a tensor both before and after it is assigned "
            f"(lines {', '.join(stuck)}); read the old value into its own storage first: old = t.clone()"
        )
    place = {i: at for at, i in enumerate(out)}
    edges = [tuple(items[d].key for d in sorted(before, key=place.__getitem__)) for before in after]
    return [replace(items[i], after=edges[i]) for i in out]


def _edges(items: list[Item], comm: list[int]) -> list[set[int]]:
    """For each item the positions of those that it comes after."""
    after: list[set[int]] = [set() for _ in items]
    by_effect: dict[UOp, list[int]] = {}
    writers: dict[UOp, list[int]] = {}
    for i, item in enumerate(items):
        for e in item.effects:
            by_effect.setdefault(e, []).append(i)
        for b in item.writes:
            writers.setdefault(b, []).append(i)
    for i, item in enumerate(items):
        for buffer, effects in item.reads:
            done = {d for e in effects if e in by_effect for d in _completing(e, by_effect[e], item, buffer, items)}
            after[i] |= done - {i}
            for w in writers.get(buffer, ()):
                if w != i and w not in done and effects.union(item.effects).isdisjoint(items[w].effects):
                    if not apart(items[w], item, buffer):
                        after[w].add(i)
    for (i, first), (j, second) in pairwise(enumerate(items)):  # the two halves of a store through a temporary
        if first.effects == second.effects:
            after[j].add(i)
    for i, j in pairwise(comm):
        after[j].add(i)
    return after


def _in_order(items: list[Item], after: Sequence[set[int]], comm: list[int]) -> list[int]:
    """The positions of the items as they run; without those that wait for each other."""
    users: list[list[int]] = [[] for _ in items]
    for i, before in enumerate(after):
        for d in before:
            users[d].append(i)
    urgency = _urgency(after, users, comm)
    waiting = list(map(len, after))
    alive = _Alive(items)
    first_user = [min(u, default=len(items)) for u in users]

    def rank(i: int) -> tuple[int, int, int, int, int]:
        growth = alive.growth(i)
        return urgency[i], min(growth, 0), first_user[i] if growth > 0 else 0, growth, i

    ready = [rank(i) for i in range(len(items)) if waiting[i] == 0]
    heapq.heapify(ready)
    out: list[int] = []
    ran = [False] * len(items)
    while ready:
        i = heapq.heappop(ready)[-1]
        if ran[i]:
            continue  # an entry from before its growth shrank
        ran[i] = True
        out.append(i)
        for u in users[i]:
            waiting[u] -= 1
        for u in {*users[i], *alive.run(i)}:
            if waiting[u] == 0 and not ran[u]:
                heapq.heappush(ready, rank(u))
    return out


def _completing(effect: UOp, made_by: list[int], reader: Item, buffer: UOp, items: list[Item]) -> list[int]:
    """The items of an effect that a reader of a buffer waits for: the last one, which completes it; where
    parts of memory are sent or received by several, those of the parts that it reads."""
    writes = [d for d in made_by if buffer in items[d].writes]
    if not writes or not any(leaves_the_worker(i.what) for i in (reader, *(items[d] for d in writes))):
        return made_by[-1:]
    return [d for d in writes if not apart(items[d], reader, buffer)]


class _Alive:
    """Which temporary buffers exist, while calls are put in order."""

    def __init__(self, items: list[Item]):
        self.reads = [{b for b, _ in item.reads if is_temporary(b)} for item in items]
        self.writes = [{b for b in item.writes if is_temporary(b)} for item in items]
        self.readers: dict[UOp, set[int]] = {}
        for i, reads in enumerate(self.reads):
            for b in reads:
                self.readers.setdefault(b, set()).add(i)
        self.made: set[UOp] = set()

    def growth(self, i: int) -> int:
        """Bytes that call `i` adds to those alive: what it is the first to write, less what it is the last to read."""
        new = sum(nbytes_of(b) for b in self.writes[i] if b not in self.made)
        return new - sum(nbytes_of(b) for b in self.reads[i] if self.readers[b] == {i})

    def run(self, i: int) -> list[int]:
        """Call `i` is next; the calls that by this have become the last reader of something."""
        self.made |= self.writes[i]
        last: list[int] = []
        for b in self.reads[i]:
            self.readers[b].discard(i)
            if len(self.readers[b]) == 1:
                last += self.readers[b]
        return last


def _urgency(after: Sequence[set[int]], users: Sequence[list[int]], comm: list[int]) -> list[int]:
    """The less, the sooner: the place of the first communication that a call leads to. Of those that lead to none, the
    ones that wait for some come last."""
    last = len(comm)
    urgency = [last] * len(after)
    for place, i in enumerate(comm):
        todo = [i]
        while todo:
            j = todo.pop()
            if urgency[j] == last:
                urgency[j] = place
                todo += after[j]
    todo = [u for i in comm for u in users[i]]
    while todo:
        j = todo.pop()
        if urgency[j] == last:
            urgency[j] = last + 1
            todo += users[j]
    return urgency
