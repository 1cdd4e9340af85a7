"""Two levels, for workers (or hosts) that hold several ranks each: little crosses between them.

Of the `group` neighbouring ranks in a worker, rank l first sums piece l of the group's inputs; then the ranks l of all
groups all-reduce that piece among themselves (two-shot: each finishes a part of it); then the group's members copy the
pieces from each other. A worker sends 2n(h−1)/h bytes for h groups, where the flat two-shot sends `group` times that.
With a power of two as `group` the partial sums are subtrees of the canonical tree, so the bits are the same.
"""

from __future__ import annotations

from manygrad.collectives.algorithms.direct import put
from manygrad.collectives.program import Chunk, Program, Slot, Source, split


def supports(kind: str, ranks: int, group: int) -> bool:
    return 1 < group < ranks and group & (group - 1) == 0


def all_reduce(p: Program) -> None:
    c = p.collective
    size, groups = c.group, c.ranks // c.group
    ends = [0]
    for n in split(c.count, size):
        ends.append(ends[-1] + n)

    def piece(l: int, buffer: str, base: int = 0) -> Chunk:
        return Chunk(buffer, ends[l] - base, ends[l + 1] - ends[l])

    def part(l: int, g: int, buffer: str, base: int = 0) -> Chunk:
        """Group g's part of piece l, which rank (g, l) finishes."""
        sizes = split(ends[l + 1] - ends[l], groups)
        return Chunk(buffer, ends[l] + sum(sizes[:g]) - base, sizes[g])

    mates = sorted({r // size * size + l for r in p.only for l in range(size)})
    across = sorted({g * size + r % size for r in p.only for g in range(groups)})

    for dst in mates:  # within the group: piece l of everyone's input, summed by l
        l, first = dst % size, dst // size * size
        for src in range(first, first + size):
            if src != dst:
                p.transfer(src, dst, piece(l, "in"), f"s{src - first}")
        p.temp(dst, "t0", ends[l + 1] - ends[l])
        srcs: list[Source] = [piece(l, "in") if s == l else Slot(f"s{s}") for s in range(size)]
        p.reduce(dst, piece(l, "t0", ends[l]), srcs)
        for s in range(size):
            if s != l:
                p.release(dst, Slot(f"s{s}"), ends[l + 1] - ends[l])

    def partners(rank: int) -> list[int]:
        """The ranks of the same place in the other groups, where one of the two is in `only`; the next group first."""
        others = [(rank + k * size) % c.ranks for k in range(1, groups)]
        return others if rank in p.only else [r for r in others if r in p.only]

    for src in across:  # between the groups: everyone's partial sum of the part that dst finishes
        for dst in partners(src):
            p.transfer(src, dst, part(dst % size, dst // size, "t0", ends[dst % size]), f"x{src // size}", "x")
    for r in across:
        l, g = r % size, r // size
        mine = part(l, g, "out")
        put(p, r, mine, [part(l, g, "t0", ends[l]) if k == g else Slot(f"x{k}") for k in range(groups)])
        for k in range(groups):
            if k != g:
                p.release(r, Slot(f"x{k}"), mine.length)
    for src in across:
        done = part(src % size, src // size, "out")
        for dst in partners(src):
            slot = p.transfer(src, dst, done, f"y{src // size}")
            p.copy(dst, done, slot)
            p.release(dst, slot, done.length)

    for dst in mates:  # within the group again: the finished pieces
        first = dst // size * size
        for src in range(first, first + size):
            if src != dst:
                slot = p.transfer(src, dst, piece(src - first, "out"), f"g{src - first}")
                p.copy(dst, piece(src - first, "out"), slot)
                p.release(dst, slot, ends[src - first + 1] - ends[src - first])


KINDS = {"all_reduce": all_reduce}
