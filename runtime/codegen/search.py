"""Beam search over lists of `Opt`s by measured time (BEAM=n).

    beam = the n fastest starts
    repeat: measure what is one decision away from a list of the beam; beam = the n fastest of all measured
    until a round finds nothing faster, or the time is up

Pure: what a list costs is asked of `measure`, so that the search is tested without a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from manygrad.runtime.codegen.opts import Opts

GAIN = 0.99  # a round that does not bring the best time below this part of what it was ends the search


@dataclass
class Found:
    """The lists measured, with their seconds; inf: dropped (it did not compile, was too slow to finish, or wrong)."""

    seconds: dict[Opts, float] = field(default_factory=dict)
    rounds: int = 0

    def fastest(self, n: int) -> list[Opts]:
        """The `n` fastest, those measured first before their equals."""
        alive = [o for o, s in self.seconds.items() if s < inf]
        return sorted(alive, key=lambda o: self.seconds[o])[:n]

    @property
    def best(self) -> float:
        return min(self.seconds.values(), default=inf)


def beam_search(
    starts: Iterable[Opts],
    neighbours: Callable[[Opts], Iterable[Opts]],
    measure: Callable[[Opts, float], float],
    width: int,
    limit_s: float = inf,
    progress: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Measures from `starts` on. `measure(opts, best_s)` gives seconds, or inf where it gave up on the list (it may,
    once it is clear that it is slower than `best_s` by far). No new measurement is begun after `limit_s`.
    """
    found, deadline = Found(), time.monotonic() + limit_s
    for opts in starts:
        if opts not in found.seconds:
            found.seconds[opts] = measure(opts, found.best)
    expanded: set[Opts] = set()
    while True:
        before = found.best
        for opts in [o for o in found.fastest(width) if o not in expanded]:
            expanded.add(opts)
            for near in neighbours(opts):
                if time.monotonic() > deadline:
                    return found
                if near not in found.seconds:
                    found.seconds[near] = measure(near, found.best)
        found.rounds += 1
        progress(found)
        if not found.best < before * GAIN:
            return found
