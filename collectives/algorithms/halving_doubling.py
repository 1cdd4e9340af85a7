"""Recursive halving and doubling (Rabenseifner, 2004), for powers of two; binomial broadcast, for any rank count.

all_reduce: 2 lg p (α+o) + 2n(p−1)/p·β + n(p−1)/p·γ. Partners at distance 1, 2, 4, ... halve the range that each of them
is responsible for; as the nearest ranks are added first, the sum of each element is the balanced tree over rank
numbers. The same way back gathers. The steps, and so a worker's work, grow with lg p: cheap for 1,024 ranks. A
reduce-scatter has lg p steps and p−1 messages, a piece each. In each step a rank has one partner.
"""

from __future__ import annotations

from manygrad.collectives.program import Chunk, Program, Slot, Source


def supports(kind: str, ranks: int, group: int) -> bool:
    return kind == "broadcast" or ranks & (ranks - 1) == 0


def all_reduce(p: Program) -> None:
    n, count = p.collective.ranks, p.collective.count
    if n == 1:
        return p.copy(0, Chunk("out", 0, count), Chunk("in", 0, count))
    pieces, steps = p.collective.pieces, n.bit_length() - 1

    def span(lo: int, hi: int, buffer: str, base: int = 0) -> Chunk:
        return Chunk(buffer, pieces[lo][0] - base, pieces[hi - 1][0] + pieces[hi - 1][1] - pieces[lo][0])

    def held(rank: int, step: int) -> tuple[int, int]:
        """The pieces that `rank` is responsible for before `step`: each step's bit of the rank keeps a half."""
        lo, hi = 0, n
        for k in range(step):
            mid = (lo + hi) // 2
            lo, hi = (mid, hi) if rank >> k & 1 else (lo, mid)
        return lo, hi

    def where(rank: int, step: int, lo: int, hi: int) -> Chunk:
        """Pieces lo..hi of the partial sums that `rank` holds before `step`."""
        if step == 0:
            return span(lo, hi, "in")
        return span(lo, hi, f"t{step}", pieces[held(rank, step)[0]][0])

    for k in range(steps):
        for src, dst in p.swapped(1 << k):
            p.transfer(src, dst, where(src, k, *held(dst, k + 1)), f"h{k}")
        for r in sorted(p.only):
            lo, hi = held(r, k + 1)
            dst_chunk = span(lo, hi, "out") if k == steps - 1 else where(r, k + 1, lo, hi)
            if k < steps - 1:
                p.temp(r, f"t{k + 1}", dst_chunk.length)
            srcs: list[Source] = [where(r, k, lo, hi), Slot(f"h{k}")]
            p.reduce(r, dst_chunk, srcs[::-1] if r >> k & 1 else srcs)
            p.release(r, Slot(f"h{k}"), dst_chunk.length)
    for k in reversed(range(steps)):
        for src, dst in p.swapped(1 << k):
            chunk = span(*held(src, k + 1), "out")
            slot = p.transfer(src, dst, chunk, f"d{k}")
            p.copy(dst, chunk, slot)
            p.release(dst, slot, chunk.length)


def reduce_scatter(p: Program) -> None:
    """Halves as all_reduce does, but that each step keeps the pieces whose number has the step's bit as the rank has
    it: the one that is left is the rank's own. They do not lie side by side, so each is a transfer of its own."""
    n, pieces = p.collective.ranks, p.collective.pieces
    if n == 1:
        return p.copy(0, Chunk("out", 0, pieces[0][1]), Chunk("in", *pieces[0]))
    steps = n.bit_length() - 1

    def where(rank: int, step: int, piece: int) -> Chunk:
        """The partial sum of a piece that `rank` holds before `step`."""
        if step == 0:
            return Chunk("in", *pieces[piece])
        if step == steps:
            return Chunk("out", 0, pieces[piece][1])
        return Chunk(f"t{step}", sum(pieces[q][1] for q in held(rank, step) if q < piece), pieces[piece][1])

    def held(rank: int, step: int) -> range:
        return range(rank % (1 << step), n, 1 << step)

    for k in range(steps):
        for src, dst in p.swapped(1 << k):
            for piece in held(dst, k + 1):
                p.transfer(src, dst, where(src, k, piece), f"h{k}p{piece}", group=f"h{k}")
        for r in sorted(p.only):
            if k < steps - 1:
                p.temp(r, f"t{k + 1}", sum(pieces[q][1] for q in held(r, k + 1)))
            for piece in held(r, k + 1):
                dst_chunk, slot = where(r, k + 1, piece), Slot(f"h{k}p{piece}")
                srcs: list[Source] = [where(r, k, piece), slot]
                p.reduce(r, dst_chunk, srcs[::-1] if r >> k & 1 else srcs)
                p.release(r, slot, dst_chunk.length)


def all_gather(p: Program) -> None:
    n, pieces = p.collective.ranks, p.collective.pieces
    for r in sorted(p.only):
        p.copy(r, Chunk("out", *pieces[r]), Chunk("in", 0, pieces[r][1]))
    for k in range(n.bit_length() - 1):
        for src, dst in p.swapped(1 << k):
            lo = src >> k << k
            chunk = Chunk("out", pieces[lo][0], sum(pieces[lo + (1 << k) - 1]) - pieces[lo][0])
            slot = p.transfer(src, dst, chunk, f"d{k}")
            p.copy(dst, chunk, slot)
            p.release(dst, slot, chunk.length)


def broadcast(p: Program) -> None:
    """In step k the first 2^k ranks (counted from the root) each pass the whole on: ceil(lg p) steps."""
    c, whole = p.collective, Chunk("out", 0, p.collective.count)
    p.copy(c.root, whole, Chunk("in", 0, c.count))
    step = 1
    while step < c.ranks:
        near = {(r - c.root) % c.ranks for r in p.only}
        for v in sorted({v if v < step else v - step for v in near if v < 2 * step}):
            if v + step < c.ranks:
                src, dst = (v + c.root) % c.ranks, (v + step + c.root) % c.ranks
                slot = p.transfer(src, dst, whole, "b")
                p.copy(dst, whole, slot)
                p.release(dst, slot, c.count)
        step *= 2


KINDS = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
}
