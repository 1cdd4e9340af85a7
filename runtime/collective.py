"""exec_collective: a collective's program for this worker's devices, prepared once and then replayed.

The algorithm is chosen by the cost model from (kind, bytes, device count), so every rank chooses the same. Every
message carries a key made from the LINEAR's plan (`schedule/plan.py`, compared over all ranks when it is first made)
and the collective's number in it: ranks that run two plans in different orders are told apart by their first messages.

Programs move host memory. What lies in memory that the host does not see is copied to a buffer of the CPU before, and
the result back after it.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from manygrad.collectives.algorithms import build
from manygrad.collectives.cost import choose
from manygrad.collectives.execute import Prepared, prepare
from manygrad.collectives.program import Collective
from manygrad.multi.world import World
from manygrad.runtime import profile
from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.counters import GlobalCounters
from manygrad.runtime.current import current
from manygrad.runtime.items import ExecItem, Vars, report
from manygrad.tensor.environment import DEBUG
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.args import (
    AllGatherArg,
    AllReduceArg,
    AllToAllArg,
    BroadcastArg,
    CollectiveArg,
    ReduceScatterArg,
    SendArg,
)

if TYPE_CHECKING:
    from manygrad.runtime.runtime import Runtime

OPS = {Ops.ADD: "add", Ops.MAX: "max", Ops.MUL: "mul"}


def prepared_of(
    c: Collective, dtype: str, mine: tuple[int, ...], devices: tuple[str, ...], runtime: Runtime
) -> Prepared:
    """The program of one collective over one tuple of devices, ready to run."""
    prepared, world = runtime.communication.prepared, runtime.world
    found = prepared.get((c, dtype, mine, devices))
    if found is None:
        endpoint = runtime.communication.endpoint if world.size > 1 else None
        program = build(choose(c.kind, c.count * _itemsize(dtype), c.ranks, c.group, world.link), c, mine)
        owner = [world.rank_of(d) for d in devices] if endpoint is not None else [0] * len(devices)
        found = prepared[c, dtype, mine, devices] = prepare(program, dtype, endpoint=endpoint, rank_to_worker=owner)
    return found


def _itemsize(dtype: str) -> int:
    from manygrad.tensor.dtype import to_dtype

    return to_dtype(dtype).itemsize


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


def describe(what: UOp) -> tuple[Collective, str]:
    """The collective of a CALL, and its line of text."""
    arg: CollectiveArg = what.arg
    n, dtype = len(arg.members.devices), what.dtype.name
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
        case SendArg(size):
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


class CollectiveItem(ExecItem):
    """`plan`: the key of the LINEAR's plan; 0 where one worker is alone."""

    lane = "collectives"

    def __init__(self, what: UOp, buffers: list[Buffer], plan: int):
        members = what.arg.members
        self.buffers, self.line, self.name, self.mine = buffers, members.line, what.op.name.lower(), members.mine
        self.idle = buffers[0].device.kind == "NULL"
        if self.idle:
            return
        runtime = current()
        self.communication, world = runtime.communication, runtime.world
        c, _ = describe(what)
        c = replace(c, group=group_of(members.devices, world))
        self.name = f"{c.kind} {c.count}"
        self.key = int.from_bytes(hashlib.blake2b(f"{plan} {members.place}".encode(), digest_size=8).digest(), "little")
        self.text = self.communication.descriptions[self.key] = text_of(what)
        self.by_all = len({world.rank_of(d) for d in members.devices}) == world.size
        self.prepared = prepared_of(c, what.dtype.name, members.mine, members.devices, runtime)
        self.addresses: dict[int, dict[str, int]] | None = None
        # (buffer, its place in host memory): of devices whose memory the host does not see
        self.staged_in: list[tuple[Buffer, Buffer]] = []
        self.staged_out: list[tuple[Buffer, Buffer]] = []

    @property
    def written(self) -> list[Buffer]:
        return self.buffers[: len(self.mine)]

    def facts(self) -> dict[str, Any]:
        return (
            {"line": self.line}
            if self.idle
            else {"line": self.line, "plan": self.text, "bytes sent": self.prepared.bytes_sent}
        )

    @property
    def crosses(self) -> bool:
        """Whether other workers take part."""
        return not self.idle and self.prepared.endpoint is not None

    def count(self) -> None:
        GlobalCounters.kernel_count += 1
        if not self.idle:
            GlobalCounters.net_bytes += self.prepared.bytes_sent

    def run(self, vars: Vars) -> None:
        if self.idle:
            return
        self.count()
        before = self.communication.time_s
        self.communicate(vars)
        self.waited(self.communication.time_s - before)

    def waited(self, seconds: float) -> None:
        GlobalCounters.net_wait_s += seconds
        self.communication.waited_s += seconds

    def located(self) -> dict[int, dict[str, int]]:
        """The addresses of each rank's `in` and `out`, found once."""
        if self.addresses is None:
            n = len(self.mine)
            outs = [seen_by_host(b, self.staged_out) for b in self.buffers[:n]]
            ins = [seen_by_host(b, self.staged_in) for b in self.buffers[n:]]
            self.addresses = {r: {"in": _address(i), "out": _address(o)} for r, i, o in zip(self.mine, ins, outs)}
        return self.addresses

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        n = len(self.mine)
        if self.idle or buffer.device.allocator.host is None or any((b.base or b) is buffer for b in self.buffers[:n]):
            return None
        addresses = self.located()
        places = [(r, b.offset) for r, b in zip(self.mine, self.buffers[n:]) if (b.base or b) is buffer]

        def move(to: Any) -> None:
            address = buffer.device.address(to)
            for rank, offset in places:
                addresses[rank]["in"] = address + offset

        return move

    def communicate(self, vars: Vars) -> None:
        """`run`, but for what only the thread that runs kernels may count."""
        addresses = self.located()
        start = time.perf_counter()
        runs = self.communication.runs
        sequence = runs[self.key] = runs.get(self.key, 0) + 1
        if vars:  # ranks that bind a variable to different values are in different programs
            sequence |= zlib.crc32(repr(sorted(vars.items())).encode()) << 32
        if self.by_all:
            self.communication.entered = (self.communication.entered[0] + 1, self.text)
        for b, staged in self.staged_in:
            copy_buffer(staged, b)
        self.prepared.run(addresses, sequence, plan=self.key)
        for b, staged in self.staged_out:
            copy_buffer(b, staged)
        end = time.perf_counter()
        GlobalCounters.net_time_s += end - start
        self.communication.time_s += end - start
        if DEBUG >= 2:
            nbytes = 2 * sum(b.nbytes for b in self.buffers)
            report(self.name, self.buffers[0].device.name, end - start, 0, nbytes, self.line)
        if profile.active:
            profile.record(self.lane, self.name, start, end, self.facts())

    def run_profiled(self, vars: Vars) -> None:
        self.run(vars)  # (told in `communicate`, also where that runs beside kernels)


def seen_by_host(b: Buffer, staged: list[tuple[Buffer, Buffer]]) -> Buffer:
    """`b`, or, where the host does not see its memory, a buffer of the CPU in its place, which `staged` is told."""
    if b.device.allocator.host is not None or not b.nbytes:
        return b
    staged.append((b, Buffer("CPU", b.count, b.dtype)))
    return staged[-1][1]


def _address(b: Buffer) -> int:
    return b.device.address(b.handle) if b.nbytes else 0
