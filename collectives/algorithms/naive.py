"""One shot: every rank reads every rank's whole input and reduces it itself.

Cost of all_reduce over n bytes and p ranks: α + (p−1)n(β+γ); one step, so the best for small n.
"""

from __future__ import annotations

from manygrad.collectives.algorithms.direct import borrow_all, put
from manygrad.collectives.program import Chunk, Program


def all_reduce(p: Program) -> None:
    whole = Chunk("in", 0, p.collective.count)
    slots = borrow_all(p, "n", lambda src, dst: whole)
    for r in sorted(p.only):
        put(p, r, Chunk("out", 0, whole.length), [whole if s == r else slots(s) for s in range(p.collective.ranks)])
        for s in range(p.collective.ranks):
            if s != r:
                p.release(r, slots(s), whole.length)


KINDS = {"all_reduce": all_reduce}
