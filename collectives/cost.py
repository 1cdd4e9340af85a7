"""Who chooses the algorithm: an α-β-γ model over (kind, nbytes, ranks), and nothing else.

Never the transport, the host or a measurement of this run: all ranks must choose the same, and a choice may not change
between runs. Only algorithms of order `tree` are candidates, so even a change of the constants changes no bit.
Terms: α a step's latency, o one message's handling, β a byte moved, γ a byte reduced. The constants are round numbers
of shared memory on one host (see docs/collectives.md); over TCP all of them grow together, and the order hardly moves.
"""

from __future__ import annotations

from manygrad.collectives.algorithms import ALGORITHMS
from manygrad.tensor.environment import COLLECTIVE

STEP_S, MESSAGE_S, MOVE_S, REDUCE_S = 40e-6, 6e-6, 0.10e-9, 0.05e-9


def cost_s(algorithm: str, kind: str, nbytes: int, ranks: int) -> float:
    """Predicted seconds of one collective over `nbytes` (the `count` of `Collective`, in bytes)."""
    p, lg = ranks, max(ranks - 1, 0).bit_length()
    part = nbytes * (p - 1) / p
    if p == 1:
        return nbytes * MOVE_S
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
    return steps * STEP_S + messages * MESSAGE_S + moved * MOVE_S + reduced * reducing


def choose(kind: str, nbytes: int, ranks: int) -> str:
    """The algorithm's name. `COLLECTIVE` forces one wherever it can do this kind; an unknown name is a `ValueError`."""
    forced = COLLECTIVE.value
    if forced:
        if forced not in ALGORITHMS:
            raise ValueError(f"COLLECTIVE={forced!r} is no algorithm; known: {sorted(ALGORITHMS)}")
        if ALGORITHMS[forced].can(kind, ranks):
            return str(forced)
    candidates = [a.name for a in ALGORITHMS.values() if a.order == "tree" and a.can(kind, ranks)]
    return min(candidates, key=lambda a: (cost_s(a, kind, nbytes, ranks), a))
