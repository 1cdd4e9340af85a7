"""Whether all ranks run the same program on the same values: their plans, digests and counts of collectives."""

from __future__ import annotations

from collections.abc import Sequence

from .. import compare
from ..causes import Difference, finished_early, left_alone, left_by_peer
from ..messages import Finished, Planned, Progress, Values
from ..ranks import Rank

APART_STEPS = 100  # of every rank without any communication: worth a warning


class Programs:
    """Where each rank is in its program; `open_plans` are those that not all ranks have made yet."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.open_plans: dict[int, Planned] = {}
        self.values = compare.Comparisons(len(ranks))
        self.warned = False

    def position(self, rank: Rank, event: Progress | Finished) -> None:
        """How many collectives the rank has entered, and what they have cost."""
        if event.collectives >= rank.collectives:
            rank.collectives, rank.collective = event.collectives, event.collective
        rank.bytes_sent, rank.collective_ms, rank.waited_ms = event.bytes_sent, event.collective_ms, event.waited_ms

    def plan(self, rank: Rank, event: Planned, now: float) -> Difference | None:
        """The rank has come to its next plan; says how it differs from another rank's."""
        rank.plans, rank.plan_text, rank.stands_since = event.n, event.description, now
        rank.collectives = max(rank.collectives, event.collectives)
        first = self.open_plans.setdefault(event.n, event)
        if first.hash == event.hash:
            return None
        return event.rank, compare.plans_differ(
            event.n,
            (first.rank, event.rank),
            (first.description, event.description),
            (compare.unpack(first.outline), compare.unpack(event.outline)),
        )

    def agreed(self, n: int) -> bool:
        """Whether all ranks have made plan `n`, which is closed then."""
        if not all(r.plans >= n for r in self.ranks):
            return False
        del self.open_plans[n]
        return True

    def compare_values(self, event: Values) -> Difference | None:
        """Says which values of the rank differ from another rank's."""
        differs = self.values.take(event.rank, event.name, event.values)
        return None if differs is None else (event.rank, differs)

    def divergence(self, now: float) -> Difference | None:
        """A rank that waits for what another will never do."""
        return (
            finished_early(self.ranks)
            or left_alone(self.ranks, self.open_plans)
            or left_by_peer(self.ranks, self.open_plans, now)
        )

    def apart(self) -> str:
        """Ranks that train without ever communicating train a model each: the text of a warning, once."""
        if self.warned or len(self.ranks) == 1:
            return ""
        # (what groups of ranks do among themselves is in the bytes alone)
        if any((r.step or 0) < APART_STEPS or r.collectives or r.plans or r.bytes_sent for r in self.ranks):
            return ""
        self.warned = True
        return (
            f"{len(self.ranks)} ranks have each made {min(r.step or 0 for r in self.ranks)} steps without any "
            "communication: each trains a model of its own. Put the parameters on all devices "
            "(p.shard_(world.devices)) and cut the batch over them (x.shard(world.devices, axis=0))"
        )
