"""Who chooses the algorithm: an α-β-γ model over (kind, nbytes, ranks, group), and nothing else.

Never the transport, the host or a measurement of this run: all ranks must choose the same, and a choice may not change
between runs. Only algorithms of order `tree` are candidates, so even a change of the constants changes no bit.
Terms: α a step's latency, o one message's handling, β a byte moved, γ a byte reduced. The constants are round numbers
of shared memory on one host (see docs/benchmarks.md); over TCP all of them grow together, and the order hardly moves.
"""

from __future__ import annotations

from manygrad.collectives.algorithms import ALGORITHMS
from manygrad.tensor.environment import COLLECTIVE

STEP_S, MESSAGE_S, MOVE_S, REDUCE_S = 40e-6, 6e-6, 0.10e-9, 0.05e-9
NEAR = 0.2  # what a message or a byte costs between the ranks of one worker, compared with between workers


def cost_s(algorithm: str, kind: str, nbytes: int, ranks: int, group: int = 1) -> float:
    """Predicted seconds of one collective over `nbytes` (the `count` of `Collective`, in bytes).

    `group`: neighbouring ranks in one worker; they take turns, so their times add up.
    """
    p, lg = ranks, max(ranks - 1, 0).bit_length()
    part = nbytes * (p - 1) / p
    if p == 1:
        return nbytes * MOVE_S
    groups = p // group
    if algorithm == "hierarchical":
        far = STEP_S + (groups - 1) * MESSAGE_S * group + nbytes * (groups - 1) / groups * MOVE_S
        near = (group - 1) * MESSAGE_S * group * NEAR + nbytes * (group - 1) * MOVE_S * NEAR
        return 2 * (far + near) + nbytes * group * REDUCE_S
    steps: float
    messages: float
    moved: float
    reduced: float
    reducing = REDUCE_S if kind in ("all_reduce", "reduce_scatter") else 0.0
    rounds = 2 if kind == "all_reduce" else 1
    steps, messages, moved, reduced = {
        "naive": (1, p - 1, nbytes * (p - 1), nbytes * (p - 1)),
        "direct": (rounds, rounds * (p - 1), rounds * part, part),
        "halving_doubling": (rounds * lg, rounds * lg, rounds * part, part),
        "ring": (rounds * (p - 1), rounds * (p - 1), rounds * part, part),
    }[algorithm]
    if kind == "broadcast":  # the root's link carries every copy, or the tree's depth is paid
        moved = nbytes * (p - 1) if algorithm == "direct" else nbytes * lg
    if kind == "send":
        steps, messages, moved = 1, 1, nbytes
    if group > 1:  # of a rank's p-1 partners group-1 are near; all ranks of the worker share its link and its core
        share = group * ((p - group) + (group - 1) * NEAR) / (p - 1)
        messages, moved, reduced = messages * share, moved * share, reduced * group
    return steps * STEP_S + messages * MESSAGE_S + moved * MOVE_S + reduced * reducing


def choose(kind: str, nbytes: int, ranks: int, group: int = 1) -> str:
    """The algorithm's name. `COLLECTIVE` forces one wherever it can do this kind; an unknown name is a `ValueError`."""
    forced = COLLECTIVE.value
    if forced:
        if forced not in ALGORITHMS:
            raise ValueError(f"COLLECTIVE={forced!r} is no algorithm; known: {sorted(ALGORITHMS)}")
        if ALGORITHMS[forced].can(kind, ranks, group):
            return str(forced)
    candidates = [a.name for a in ALGORITHMS.values() if a.order == "tree" and a.can(kind, ranks, group)]
    return min(candidates, key=lambda a: (cost_s(a, kind, nbytes, ranks, group), a))
