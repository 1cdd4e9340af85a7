"""exec_collective: a collective's program for this worker's devices, prepared once a plan and then replayed.

The algorithm is chosen by the cost model from (kind, bytes, device count), so every rank chooses the same. The plan's hash
covers kind, type, sizes, devices and the user's source line; it is compared over all ranks when the plan is first made
(`collectives.plan_hook`, set by the launcher), and stands in every message.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

from manygrad import collectives
from manygrad.collectives.algorithms import build
from manygrad.collectives.cost import choose
from manygrad.collectives.execute import Prepared, prepare
from manygrad.collectives.program import Collective
from manygrad.collectives.transport import current
from manygrad.multi.world import world
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.counters import GlobalCounters
from manygrad.runtime.items import ExecItem, Vars, report
from manygrad.tensor.environment import DEBUG
from manygrad.tensor.uop import Ops, UOp

OPS = {Ops.ADD: "add", Ops.MAX: "max", Ops.MUL: "mul"}

_PLANS: dict[int, Plan] = {}
descriptions: dict[int, str] = {}  # plan hash -> text, for the errors of the transports
_entered = (0, "")


def entered() -> tuple[int, str]:
    """How many collectives of all workers this one has entered so far, and the text of the last. From any thread.

    All ranks enter the same ones in the same order, between the same plans; so the launcher finds a rank that does not.
    """
    return _entered


class Plan:
    """One collective over one device tuple: its program and how often it has run."""

    def __init__(self, key: int, text: str, name: str, what: Collective, mine: tuple[int, ...], devices: tuple[str, ...], dtype: str):
        endpoint = current() if world.size > 1 else None
        self.text, self.name, self.sequence = text, name, 0
        program = build(choose(what.kind, what.count * _itemsize(dtype), what.ranks, what.group), what, mine)
        owner = [world.rank_of(d) for d in devices] if endpoint is not None else [0] * len(devices)
        self.by_all = len(set(owner)) == world.size
        self.prepared: Prepared = prepare(program, dtype, plan=key, endpoint=endpoint, rank_to_worker=owner)


def _itemsize(dtype: str) -> int:
    from manygrad.tensor.dtype import to_dtype

    return to_dtype(dtype).itemsize


def group_of(devices: tuple[str, ...]) -> int:
    """How many neighbours in `devices` are one worker's, where all workers hold equally many in a row; else 1."""
    owners = [world.rank_of(d) for d in devices]
    size = owners.count(owners[0])
    rows = [owners[i : i + size] for i in range(0, len(owners), size)]
    return size if all(len(r) == size and len(set(r)) == 1 for r in rows) and len({r[0] for r in rows}) == len(rows) else 1


def describe(what: UOp) -> tuple[Collective, str]:
    """The collective of a CALL, and its line of text."""
    *arg, devices, _, _, _ = what.arg
    n = len(devices)
    if what.op is Ops.ALLREDUCE:
        op, count = arg
        c = Collective("all_reduce", n, count, op=OPS[op])
        return c, f"all_reduce {c.op} of {count} {what.dtype.name}"
    if what.op is Ops.REDUCESCATTER:
        op, bounds = arg
        c = Collective("reduce_scatter", n, bounds[-1], op=OPS[op], sizes=widths(bounds))
        return c, f"reduce_scatter {c.op} of {bounds[-1]} {what.dtype.name}"
    if what.op is Ops.ALLTOALL:
        rows, columns = arg
        c = Collective("all_to_all", n, columns[-1], sizes=widths(columns), rows=widths(rows))
        return c, f"all_to_all of {rows[-1]} x {columns[-1]} {what.dtype.name}"
    if what.op is Ops.BROADCAST:
        root, count = arg
        return Collective("broadcast", n, count, root=root), f"broadcast of {count} {what.dtype.name} from rank {root}"
    if what.op is Ops.SEND:
        return Collective("send", n, arg[0], root=0, target=1), f"send of {arg[0]} {what.dtype.name}"
    assert what.op is Ops.ALLGATHER, what.op
    (bounds,) = arg
    c = Collective("all_gather", n, bounds[-1], sizes=widths(bounds))
    return c, f"all_gather of {bounds[-1]} {what.dtype.name}"


def widths(bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in pairwise(bounds))


class CollectiveItem(ExecItem):
    lane = "collectives"

    def __init__(self, what: UOp, buffers: list[Buffer], line: str):
        self.buffers, self.line, self.name = buffers, line, what.op.name.lower()
        devices, self.mine = what.arg[-4], what.arg[-3]
        self.idle = buffers[0].device.kind == "NULL"
        if self.idle:
            return
        c, text = describe(what)
        c = replace(c, group=group_of(devices))
        text = f"{text} over {len(devices)} devices ({devices[0]}..{devices[-1]}) at {line}"
        key = int.from_bytes(hashlib.sha256(f"{text} {c.sizes} {c.rows} {devices}".encode()).digest()[:8], "little")
        plan = _PLANS.get(key)
        if plan is None:
            descriptions[key] = text
            if collectives.plan_hook is not None and world.size > 1 and what.op is not Ops.SEND:  # (only two ranks take part in a send)
                collectives.plan_hook(key, text)
            plan = _PLANS[key] = Plan(key, text, f"{c.kind} {c.count}", c, self.mine, devices, what.dtype.name)
        self.plan, self.name = plan, plan.name
        self.addresses: dict[int, dict[str, int]] | None = None

    @property
    def written(self) -> list[Buffer]:
        return self.buffers[: len(self.mine)]

    def facts(self) -> dict[str, Any]:
        return {"line": self.line} if self.idle else {"line": self.line, "plan": self.plan.text, "bytes sent": self.plan.prepared.bytes_sent}

    def run(self, vars: Vars) -> None:
        global _entered
        if self.idle:
            return
        n = len(self.mine)
        if self.addresses is None:
            outs, ins = self.buffers[:n], self.buffers[n:]
            self.addresses = {r: {"in": _address(i), "out": _address(o)} for r, i, o in zip(self.mine, ins, outs)}
        plan = self.plan
        GlobalCounters.kernel_count += 1
        GlobalCounters.net_bytes += plan.prepared.bytes_sent
        start = time.perf_counter()
        sequence = plan.sequence
        plan.sequence += 1
        if plan.by_all:
            _entered = (_entered[0] + 1, plan.text)
        plan.prepared.run(self.addresses, sequence)
        if DEBUG >= 2:
            report(plan.name, self.buffers[0].device.name, time.perf_counter() - start, 0, 2 * sum(b.nbytes for b in self.buffers), self.line)


def _address(b: Buffer) -> int:
    return b.device.address(b.handle) if b.nbytes else 0


def use_endpoint(endpoint: Any) -> None:
    """From now on buffers of the CPU devices live where peers of this host can read them in place."""
    arena = getattr(endpoint, "arena", None)
    endpoint.describe = lambda key: descriptions.get(key, "")
    if arena is not None:
        from manygrad.runtime.devices.cpu import set_arena

        set_arena(arena.alloc, arena.free, arena.addr(0))
