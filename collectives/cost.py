"""Who chooses the algorithm: an α-β-γ model over (kind, nbytes, ranks, group) and the link, and nothing else.

All ranks must choose the same: so the link is the slowest one between workers, measured when they met, and agreed on
(`transport/measure.py`). Only algorithms of order `tree` are candidates, so no choice changes a bit.
Terms: α a step's latency, o one message's handling, β a byte moved, γ a byte reduced.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from manygrad.collectives.algorithms import ALGORITHMS
from manygrad.collectives.transport.measure import PIECES
from manygrad.multi.world import Link
from manygrad.tensor.environment import COLLECTIVE


class Terms(NamedTuple):
    """Seconds."""

    step: float  # α
    message: float  # o
    byte: float  # β


SHM = Terms(3e-6, 1e-6, 0.10e-9)  # round numbers of shared memory on one host [allreduce.py]
WORKER = Terms(0.0, 1.2e-6, 0.02e-9)  # between the ranks of one worker
ZMQ_MESSAGE_S = 30e-6  # [allreduce.py, TRANSPORT=zmq]
REDUCED_S = 0.05e-9  # γ
# what is sent takes longer by so much where several hosts send to each at once: 1.05 to 1.1 with TCP's cubic, 1.9 with
# BBR [hosts.py, mlp, 4 hosts, 200 Mbit/s, COLLECTIVE=direct and halving_doubling]
CROWDED = 1.2


def terms_of(link: Link | None) -> Terms:
    """Figures of the link between workers."""
    if link is None or link.route == "shm":
        return SHM
    return Terms(max(link.latency_s, SHM.step), ZMQ_MESSAGE_S, max(1 / link.bytes_per_s, SHM.byte))


def cost_s(algorithm: str, kind: str, nbytes: int, ranks: int, group: int = 1, link: Link | None = None) -> float:
    """Predicted seconds of one collective over `nbytes` (the `count` of `Collective`, in bytes).

    `group`: neighbouring ranks in one worker, which take turns, or on one host, which share its link: so their times
    add up.
    """
    p, lg = ranks, max(ranks - 1, 0).bit_length()
    part = nbytes * (p - 1) / p
    far = terms_of(link)
    near = SHM if link is not None and link.group > 1 else WORKER
    if p == 1:
        return nbytes * far.byte
    groups = p // group
    if algorithm == "hierarchical":
        across = far.step + (groups - 1) * far.message * group + nbytes * (groups - 1) / groups * far.byte
        within = (group - 1) * near.message * group + nbytes * (group - 1) * near.byte
        return 2 * (across + within) + nbytes * group * REDUCED_S
    steps: float
    messages: float
    moved: float
    reduced: float
    reducing = REDUCED_S if kind in ("all_reduce", "reduce_scatter") else 0.0
    rounds = 2 if kind == "all_reduce" else 1
    steps, messages, moved, reduced = {
        "naive": (1, p - 1, nbytes * (p - 1), nbytes * (p - 1)),
        "direct": (rounds, rounds * (p - 1), rounds * part, part),
        "put": (2, 2 * (p - 1), part, part),
        "halving_doubling": (rounds * lg, p - 1 if kind == "reduce_scatter" else rounds * lg, rounds * part, part),
        "ring": (rounds * (p - 1), rounds * (p - 1), rounds * part, part),
    }[algorithm]
    if kind == "broadcast":  # the root's link carries every copy, or the tree's depth is paid
        moved = nbytes * (p - 1) if algorithm == "direct" else nbytes * lg
    crowded = algorithm == "direct" and kind in ("all_reduce", "reduce_scatter", "all_gather") and groups > 2
    if crowded and link is not None and link.route == "zmq":
        moved *= CROWDED
    if kind == "send":
        steps, messages, moved = 1, 1, nbytes
    if group == 1:
        return steps * far.step + messages * far.message + moved * far.byte + reduced * reducing
    inner, outer = group * (group - 1) / (p - 1), group * (p - group) / (p - 1)  # of a rank's p-1 partners
    return (
        steps * far.step
        + messages * (outer * far.message + inner * near.message)
        + moved * (outer * far.byte + inner * near.byte)
        + reduced * group * reducing
    )


def choose(
    kind: str, nbytes: int, ranks: int, group: int = 1, link: Link | None = None, share_memory: bool = False
) -> str:
    """The algorithm's name. `share_memory`: ranks may write each other's. `COLLECTIVE` forces one wherever it can do
    this kind; an unknown name is a `ValueError`."""
    forced = COLLECTIVE.value
    if forced:
        if forced not in ALGORITHMS:
            raise ValueError(f"COLLECTIVE={forced!r} is no algorithm; known: {sorted(ALGORITHMS)}")
        if ALGORITHMS[forced].can(kind, ranks, group) and share_memory >= ALGORITHMS[forced].writes:
            return str(forced)
    able = [a for a in ALGORITHMS.values() if a.can(kind, ranks, group) and share_memory >= a.writes]
    candidates = [a.name for a in able if a.order == "tree"]
    return min(candidates, key=lambda a: (cost_s(a, kind, nbytes, ranks, group, link), a))


LEAST_HALF_NBYTES = 1 << 20  # of a message, from which on it is two, the first of which is summed while the other comes


def message_nbytes(nbytes: int, ranks: int, link: Link | None) -> int:
    """How long messages of a collective of `nbytes` are at most; 0: of any length, as over shared memory."""
    if link is None or not link.piece_nbytes:
        return 0
    part = -(-nbytes // ranks)
    most = min(link.piece_nbytes, max(LEAST_HALF_NBYTES, _aligned(part // 2)))
    if part <= most:
        return most
    pieces = -(-(part - most // 4) // most)  # all as long: a short rest takes as long to handle as a whole one
    even = _aligned(-(-part // pieces))
    return even if even <= PIECES[1] else most


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


# what one more part of a long all-reduce costs two workers [allreduce.py, TRANSPORT=zmq, step against bare]; more have
# more messages
PART_COST_S = 0.5e-3
MAX_PARTS = 32
HALVINGS = 3  # of the part that is sent last [hosts.py, gpt, 2 hosts, 1,000 Mbit/s: 2 % of a step]
PART_ALIGN = 1024  # elements
ALIGN_NBYTES = 4 * PART_ALIGN


def count_of_parts(nbytes: int, ranks: int, link: Link, rounds: int) -> int:
    """How many equal parts of `nbytes` hide most of a reduce-scatter, or, with two rounds, an all-reduce. What is not
    hidden is the last part and what all parts cost, seconds / n + n cost: least at the square root of seconds / cost.
    Shared memory moves nothing while processors compute, so there it stays whole."""
    if link.route == "shm" or ranks == 1:
        return 1
    sent = nbytes * rounds * (ranks - 1) // ranks  # over each rank's link
    cost = PART_COST_S * (ranks - 1).bit_length()
    return max(1, min(MAX_PARTS, math.isqrt(int(sent / link.bytes_per_s / cost))))


def parts_of(count: int, itemsize: int, ranks: int, link: Link) -> tuple[int, ...]:
    """The n+1 places, in elements, where an all-reduce is cut; its parts are sent from the last to the first. Half as
    many as would be best if all were equal, as the first one of memory is cut in halves, the nearer to its begin the
    more often: what is sent last is short. The last one is halved once, for what is sent first is waited for, too."""
    n = count_of_parts(count * itemsize, ranks, link, rounds=2)
    size = -(-count // -(-n // 2) // PART_ALIGN) * PART_ALIGN
    bounds = [*range(0, count, size), count] if n > 1 else [0, count]
    for _ in range(min(HALVINGS, n.bit_length() - 1)):
        _halve(bounds, 0)
    if n >= 1 << HALVINGS:
        _halve(bounds, len(bounds) - 2)
    return tuple(bounds)


def _halve(bounds: list[int], part: int) -> None:
    begin, end = bounds[part : part + 2]
    half = (end - begin) // 2 // PART_ALIGN * PART_ALIGN
    if half:
        bounds.insert(part + 1, begin + half)
