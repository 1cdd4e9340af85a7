"""Description of a collective of the graph: its `Collective`, its line of text, how its ranks are grouped."""

from __future__ import annotations

from itertools import pairwise

from manygrad.collectives.program import Collective
from manygrad.multi.world import World
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.args import (
    AllGatherArg,
    AllReduceArg,
    AllToAllArg,
    BroadcastArg,
    CollectiveArg,
    PointToPointArg,
    ReduceScatterArg,
    terms_dtype,
)

OPS = {Ops.ADD: "add", Ops.MAX: "max", Ops.MUL: "mul"}


def describe(what: UOp) -> tuple[Collective, str]:
    """The Collective of a node, and its line of text."""
    arg: CollectiveArg = what.arg
    n, dtype = len(arg.members.devices), terms_dtype(what).name
    match arg:
        case AllReduceArg(op, size):
            c = Collective("all_reduce", n, size, op=OPS[op])
            return c, f"all_reduce {c.op} of {size} {dtype}"
        case ReduceScatterArg(op, bounds):
            c = Collective("reduce_scatter", n, bounds[-1], op=OPS[op], sizes=widths(bounds))
            return c, f"reduce_scatter {c.op} of {bounds[-1]} {dtype}"
        case AllToAllArg(rows, columns):
            c = Collective("all_to_all", n, columns[-1], sizes=widths(columns), rows=widths(rows))
            return c, f"all_to_all of {rows[-1]} x {columns[-1]} {dtype}"
        case BroadcastArg(root, size):
            return Collective("broadcast", n, size, root=root), f"broadcast of {size} {dtype} from rank {root}"
        case PointToPointArg(size):
            return Collective("send", n, size, root=0, target=1), f"send of {size} {dtype}"
        case AllGatherArg(bounds):
            c = Collective("all_gather", n, bounds[-1], sizes=widths(bounds))
            return c, f"all_gather of {bounds[-1]} {dtype}"


def text_of(what: UOp) -> str:
    """`all_reduce add of 3 float32 over 2 devices (CPU:0@0..CPU:0@1) at train.py:31`."""
    members = what.arg.members
    return (
        f"{describe(what)[1]} over {len(members.devices)} devices ({members.devices[0]}..{members.devices[-1]}) at "
        f"{members.line}"
    )


def widths(bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(bounds))


def group_of(devices: tuple[str, ...], world: World) -> int:
    """How many neighbours in `devices` are on one host, or one worker's where hosts hold one worker each, if all hold
    equally many in a row; else 1."""
    owners = [world.rank_of(d) for d in devices]
    size = owners.count(owners[0])
    firsts = owners[::size]
    if owners != [o for o in firsts for _ in range(size)] or len(set(firsts)) != len(firsts):
        return 1
    n = world.link.group if world.link is not None else 1
    hosts = [firsts[i : i + n] for i in range(0, len(firsts), n)]
    return size * n if all(h[0] % n == 0 and h == list(range(h[0], h[0] + n)) for h in hosts) else size
