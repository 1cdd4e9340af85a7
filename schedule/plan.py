"""plan_of: what all ranks must agree on before they run a LINEAR that communicates.

Every worker builds the same graph over global devices; what it alone does (a sum on its own CPU, a print on rank 0)
stands beside it. So a graph is told apart in effects that ranks share, which stand first and are numbered first, and
the rest; the plan is a digest of the shared effects: ops, shapes, placements, constants, order. Lines are no part of
it: two ranks may come to the same graph on different lines.

A group of workers may have plans of its own, as replicas of a model have that is cut over each group: the others do not
build such a graph. Its members are told apart by their messages, which carry the plan.

`leaves` are the arguments that every rank must hold alike: values replicated over workers, and local values that are
cut over them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, lru_cache

from manygrad.multi.placement import Replicate
from manygrad.multi.rules import placement
from manygrad.multi.world import World, rank_of
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.source import LINE
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.serial import encode
from manygrad.tensor.uop.show import show_arg
from manygrad.tensor.uop.table import Inferred

OUTLINE_NODES = 20_000  # of a larger graph the first so many are told


@dataclass(frozen=True)
class Plan:
    """The part of one LINEAR that ranks have in common. `key`: equal on all ranks that run the same program."""

    key: int
    by_all: bool  # whether all workers communicate in it: not a group of them, two in a send, or none at all
    leaves: tuple[int, ...]  # slots of the arguments that are replicated over workers
    cut: tuple[int, ...]  # slots of local arguments that are cut over workers
    graph: UOp  # the shared effects
    lines: tuple[str | None, ...]  # the user's, of the first nodes of the graph

    def outline(self) -> str:
        """A line for each node: the user's line, a tab, what it is; to find where two ranks differ."""
        order = self.graph.toposort()[: len(self.lines)]
        line: dict[UOp, str] = {}  # where a node has none, that of what reads it
        for u, own in zip(reversed(order), reversed(self.lines)):
            line[u] = own = own or line.get(u, "")
            for s in u.src:
                if s not in line:
                    line[s] = own
        told: dict[object, str] = {}  # (layers of one kind have the same)
        out = []
        for u in order:
            alike = (u.op, u.dtype, u.shape, repr(u.arg) if isinstance(u.arg, (bool, int, float)) else u.arg)
            text = told.get(alike)
            if text is None:
                text = told[alike] = f"{u.op.name} {u.dtype.name} {show_arg(u.shape)} {show_arg(u.arg)}"
            out.append(f"{line[u]}\t{text}")
        return "\n".join(out)


def spans_workers(device: object, me: World) -> bool:
    """Whether `device` is a tuple with devices of several workers."""
    return isinstance(device, tuple) and _spans(device, me.rank)


@lru_cache(1024)
def _spans(devices: tuple[str, ...], rank: int) -> bool:
    return len({rank_of(d, rank) for d in devices}) > 1


def is_shared(u: UOp, me: World) -> bool:
    """Whether workers may have to communicate for it: it is cut over several of them (or summed, or copied between
    them), or made from such."""
    return _shared_on(me.rank)(u)


@cache
def _shared_on(rank: int) -> Inferred[bool]:
    """`is_shared` as the worker `rank` sees it."""
    shared: Inferred[bool] = Inferred(f"shared on {rank}")

    def communicates(u: UOp) -> bool:
        if u.op is Ops.COPY and isinstance(source := u.src[0].device, str):
            return "@" in source and ("@" not in u.arg or rank_of(source, rank) != rank_of(u.arg, rank))
        if u.op is Ops.FUNCTION:
            return any(isinstance(s.device, tuple) and _spans(s.device, rank) for s in u.src)
        return isinstance(u.device, tuple) and _spans(u.device, rank) and not isinstance(placement(u), Replicate)

    @shared.by
    def rule(u: UOp) -> bool:
        return any(shared[s] for s in u.src) or communicates(u)

    return shared


def shared_first(sink: UOp, me: World) -> tuple[UOp, int]:
    """The SINK with the effects that ranks share first, and how many these are."""
    if me.size == 1:
        return sink, 0
    first = [s for s in sink.src if is_shared(s, me)]
    return sink.replace(src=(*first, *(s for s in sink.src if not is_shared(s, me)))), len(first)


def plan_of(normal: UOp, shared: int, linear: UOp, me: World) -> Plan | None:
    """The plan of a normalised graph whose first `shared` effects are the ranks'; None where the ranks have nothing in
    common."""
    collectives = [
        c.src[0]
        for c in linear.src
        if c.src[0].op in GroupOp.COLLECTIVE and spans_workers(c.src[0].arg.members.devices, me)
    ]
    graph = UOp(Ops.SINK, dtypes.void, normal.src[:shared])
    leaves, cut = leaves_of(graph, me)
    if not collectives and not cut:
        return None
    key = int.from_bytes(hashlib.sha256(encode(graph)).digest()[:8], "little") >> 1  # (a positive int64)
    by_all = any(
        c.op is not Ops.POINT_TO_POINT and len({me.rank_of(d) for d in c.arg.members.devices}) == me.size
        for c in collectives
    )
    lines = tuple([LINE.get(u) for u in graph.toposort()[:OUTLINE_NODES]]) if by_all else ()
    return Plan(key, by_all, leaves, cut, graph, lines)


def leaves_of(graph: UOp, me: World) -> tuple[tuple[int, ...], tuple[int, ...]]:
    order = graph.toposort()
    whole = [u.arg.uid for u in order if u.op is Ops.PARAM and u.arg.axis is None and spans_workers(u.arg.device, me)]
    below = UOp(
        Ops.SINK, dtypes.void, tuple(u.src[0] for u in order if u.op is Ops.SHARD and spans_workers(u.arg.devices, me))
    )
    local = [
        u.arg.uid
        for u in below.toposort()
        if u.op is Ops.PARAM and isinstance(u.arg.device, str) and "@" not in u.arg.device
    ]
    return tuple(whole), tuple(local)
