"""Ring (Patarasuk & Yuan, 2009): each rank talks only to its two neighbours.

all_reduce costs 2(p−1)(α+o) + 2n(p−1)/p·β + n(p−1)/p·γ. Piece c starts at rank c+1 and is summed on its way round to
rank c, so every piece's sum starts at another rank: order `rotated`, other bits than the tree algorithms.
"""

from __future__ import annotations

from manygrad.collectives.program import Chunk, Program, Slot


def _reduce_round(p: Program, place: dict[int, Chunk] | None) -> None:
    """Piece c goes c+1 → c+2 → ... → c, each rank adding its own;
    the total lands in `out` (at `place[c]` or piece c)."""
    n, pieces = p.collective.ranks, p.collective.pieces
    for r in sorted(p.only):
        p.temp(r, "t0", p.collective.count if n > 2 else 0)
    if n == 1:
        return p.copy(0, Chunk("out", 0, p.collective.count), Chunk("in", 0, p.collective.count))
    for step in range(n - 1):
        # At this step rank r sends piece r-1-step, of which it holds the partial sum (at step 0: its own input).
        buffer = "in" if step == 0 else "t0"
        for src, dst in p.shifted(1):
            p.transfer(src, dst, Chunk(buffer, *pieces[(src - 1 - step) % n]), f"r{step}")
        for r in sorted(p.only):
            c = (r - 2 - step) % n
            own = Chunk("in", *pieces[c])
            last = step == n - 2
            total = (place[c] if place else Chunk("out", *pieces[c])) if last else Chunk("t0", *pieces[c])
            p.reduce(r, total, [Slot(f"r{step}"), own])
            p.release(r, Slot(f"r{step}"), own.length)


def _gather_round(p: Program) -> None:
    """Each rank's piece of `out` goes round until everyone has it."""
    n, pieces = p.collective.ranks, p.collective.pieces
    for step in range(n - 1):
        for src, dst in p.shifted(1):
            chunk = Chunk("out", *pieces[(src - step) % n])
            slot = p.transfer(src, dst, chunk, f"g{step}")
            p.copy(dst, chunk, slot)
            p.release(dst, slot, chunk.length)


def all_reduce(p: Program) -> None:
    _reduce_round(p, None)
    _gather_round(p)


def reduce_scatter(p: Program) -> None:
    pieces = p.collective.pieces
    _reduce_round(p, {r: Chunk("out", 0, pieces[r][1]) for r in range(p.collective.ranks)})


def all_gather(p: Program) -> None:
    pieces = p.collective.pieces
    for r in sorted(p.only):
        p.copy(r, Chunk("out", *pieces[r]), Chunk("in", 0, pieces[r][1]))
    _gather_round(p)


KINDS = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
