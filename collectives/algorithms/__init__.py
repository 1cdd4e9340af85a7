"""The algorithms, one a file, and their registry.

An algorithm is a pure function `(collective, only) -> Program`. It declares which kinds and rank counts it can do, and
its reduction `order`:

- `tree`: the balanced binary tree over rank numbers, split at the largest power of two below the number of ranks
  (4 ranks: `(x0+x1)+(x2+x3)`). All algorithms of this order give the same bits, so the cost model may choose freely.
- `rotated`: each element's sum starts at another rank (ring). Reproducible, but other bits; only when forced.

The pre- and postcondition of a kind is its row in `Collective`'s table; `checker.check` proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from manygrad.collectives.algorithms import direct, halving_doubling, hierarchical, naive, put, ring
from manygrad.collectives.program import Collective, Program


@dataclass(frozen=True)
class Algorithm:
    """`kinds[kind]` appends to an empty program; `supports(kind, ranks, group)` says for which rank counts. `writes`:
    ranks write each other's memory."""

    name: str
    order: str
    kinds: Mapping[str, Callable[[Program], None]]
    supports: Callable[[str, int, int], bool] = lambda kind, ranks, group: True
    writes: bool = False

    def can(self, kind: str, ranks: int, group: int = 1) -> bool:
        return kind in self.kinds and self.supports(kind, ranks, group)


ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm("naive", "tree", naive.KINDS),
        Algorithm("direct", "tree", direct.KINDS),
        Algorithm("put", "tree", put.KINDS, writes=True),
        Algorithm("halving_doubling", "tree", halving_doubling.KINDS, halving_doubling.supports),
        Algorithm("hierarchical", "tree", hierarchical.KINDS, hierarchical.supports),
        Algorithm("ring", "rotated", ring.KINDS),
    )
}


def build(algorithm: str, collective: Collective, only: Iterable[int] | None = None) -> Program:
    """The program of `collective` by `algorithm`, cut to the ranks `only` (default: all).

    Raises `ValueError` where the algorithm does not know the kind or the rank count.
    """
    found = ALGORITHMS.get(algorithm)
    if found is None:
        raise ValueError(f"unknown collective algorithm {algorithm!r}; known: {sorted(ALGORITHMS)}")
    if not found.can(collective.kind, collective.ranks, collective.group):
        can = sorted(a.name for a in ALGORITHMS.values() if a.can(collective.kind, collective.ranks, collective.group))
        raise ValueError(f"{algorithm} cannot do {collective.kind} over {collective.ranks} ranks; use one of {can}")
    ranks = frozenset(range(collective.ranks) if only is None else only)
    if not ranks <= set(range(collective.ranks)):
        raise ValueError(f"ranks {sorted(ranks)} are not all within 0..{collective.ranks - 1}")
    program = Program(collective, algorithm, ranks)
    found.kinds[collective.kind](program)
    return program
