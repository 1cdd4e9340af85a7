"""Direct exchange: whoever needs a piece reads it from its owner, all to all.

all_reduce is two-shot: rank r reduces piece r of everyone's input, then everyone reads everyone's reduced piece.
Cost over n bytes and p ranks: ≈ 2α + 2(p−1)o + 2n(p−1)/p·β + n(p−1)/p·γ, o the cost of one message. Over shared
memory the pieces are read in place: 2n bytes of traffic a rank. Partners are visited in rotated order
(r+1, r+2, ...), so that not everyone reads from the same rank at once.
"""

from __future__ import annotations

from collections.abc import Callable

from manygrad.collectives.program import Chunk, Program, Slot, Source


def put(p: Program, rank: int, dst: Chunk, srcs: list[Source]) -> None:
    """`dst` = the reduction of `srcs`, or a copy where there is only one."""
    if len(srcs) == 1:
        p.copy(rank, dst, srcs[0])
    else:
        p.reduce(rank, dst, srcs)


def borrow_all(p: Program, tag: str, piece: Callable[[int, int], Chunk]) -> Callable[[int], Slot]:
    """Every rank `dst` borrows `piece(src, dst)` of every other rank; returns slot-of-source."""
    n = p.collective.ranks
    for step in range(1, n):
        for src, dst in p.shifted(-step):
            p.transfer(src, dst, piece(src, dst), f"{tag}{src}", group=tag)
    return lambda src: Slot(f"{tag}{src}")


def exchange(p: Program, tag: str, piece: Callable[[int, int], Chunk], place: Callable[[int, int], Chunk]) -> None:
    """Every rank copies `piece(src, dst)` of every other rank to its own `place(src, dst)`."""
    n = p.collective.ranks
    for step in range(1, n):
        for src, dst in p.shifted(-step):
            chunk = piece(src, dst)
            slot = p.transfer(src, dst, chunk, f"{tag}{src}")
            p.copy(dst, place(src, dst), slot)
            p.release(dst, slot, chunk.length)


def scatter_reduced(p: Program, place: Callable[[int], Chunk]) -> None:
    """Rank r reduces piece r of everyone's `in` into `place(r)`."""
    pieces = p.collective.pieces
    slots = borrow_all(p, "s", lambda src, dst: Chunk("in", *pieces[dst]))
    for r in sorted(p.only):
        own = Chunk("in", *pieces[r])
        put(p, r, place(r), [own if s == r else slots(s) for s in range(p.collective.ranks)])
        for s in range(p.collective.ranks):
            if s != r:
                p.release(r, slots(s), own.length)


def all_reduce(p: Program) -> None:
    pieces = p.collective.pieces
    scatter_reduced(p, lambda r: Chunk("out", *pieces[r]))
    exchange(p, "g", lambda src, dst: Chunk("out", *pieces[src]), lambda src, dst: Chunk("out", *pieces[src]))


def reduce_scatter(p: Program) -> None:
    pieces = p.collective.pieces
    scatter_reduced(p, lambda r: Chunk("out", 0, pieces[r][1]))


def all_gather(p: Program) -> None:
    pieces = p.collective.pieces
    for r in sorted(p.only):
        p.copy(r, Chunk("out", *pieces[r]), Chunk("in", 0, pieces[r][1]))
    exchange(p, "g", lambda src, dst: Chunk("in", 0, pieces[src][1]), lambda src, dst: Chunk("out", *pieces[src]))


def all_to_all(p: Program) -> None:
    c, pieces = p.collective, p.collective.pieces
    rows = c.rows or (1,) * c.ranks
    starts = [0]
    for n in rows:
        starts.append(starts[-1] + n)

    def piece(src: int, dst: int) -> Chunk:
        return Chunk("in", rows[src] * pieces[dst][0], rows[src] * pieces[dst][1])

    def place(src: int, dst: int) -> Chunk:
        return Chunk("out", starts[src] * pieces[dst][1], rows[src] * pieces[dst][1])

    for r in sorted(p.only):
        p.copy(r, place(r, r), piece(r, r))
    exchange(p, "x", piece, place)


def broadcast(p: Program) -> None:
    c = p.collective
    p.copy(c.root, Chunk("out", 0, c.count), Chunk("in", 0, c.count))
    others = [r for r in range(c.ranks) if r != c.root and (c.root in p.only or r in p.only)]
    for r in others:
        p.transfer(c.root, r, Chunk("in", 0, c.count), "b")
    for r in others:
        p.copy(r, Chunk("out", 0, c.count), Slot("b"))
        p.release(r, Slot("b"), c.count)


def send(p: Program) -> None:
    c, whole = p.collective, Chunk("in", 0, p.collective.count)
    if c.root == c.target:
        return p.copy(c.root, Chunk("out", 0, c.count), whole)
    slot = p.transfer(c.root, c.target, whole, "b")
    p.copy(c.target, Chunk("out", 0, c.count), slot)
    p.release(c.target, slot, c.count)


KINDS = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "send": send,
}
