"""Direct exchange by writing (a one-sided put): who sums a piece writes it to everybody.

Rank r reads piece r of everyone's input, as in `direct`, and its one kernel stores the sum in everyone's result, which
the others lend to be written. Over n bytes and p ranks a rank reads n and writes n; one of `direct`, where others read
a reduced piece to copy it, reads n(p−1)/p more, and waits once more for everybody. For ranks that write each other's
memory, on one host.
"""

from __future__ import annotations

from manygrad.collectives.algorithms.direct import borrow_all
from manygrad.collectives.program import Chunk, Program, Slot, Source


def all_reduce(p: Program) -> None:
    n, pieces = p.collective.ranks, p.collective.pieces
    if n == 1:
        return p.copy(0, Chunk("out", 0, p.collective.count), Chunk("in", 0, p.collective.count))
    for step in range(1, n):
        for src, dst in p.shifted(-step):
            p.transfer(src, dst, Chunk("out", *pieces[dst]), f"o{src}", is_written=True)
    slots = borrow_all(p, "s", lambda src, dst: Chunk("in", *pieces[dst]))
    for r in sorted(p.only):
        own, others = Chunk("in", *pieces[r]), [s for s in range(n) if s != r]
        sources: list[Source] = [own if s == r else slots(s) for s in range(n)]
        p.reduce(r, Chunk("out", *pieces[r]), sources, [Slot(f"o{s}") for s in others])
        for s in others:
            p.release(r, slots(s), own.length)
            p.release(r, Slot(f"o{s}"), own.length)


KINDS = {"all_reduce": all_reduce}
