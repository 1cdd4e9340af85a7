"""exec_collective: a collective's calls on this worker's memory, resolved once and then replayed.

Every message carries a key made from the LINEAR's plan (`schedule/plan.py`, compared over all ranks when it is first
made) and the collective's number in it: ranks that run two plans in different orders are told apart by their first
messages.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable
from typing import Any

from manygrad.collectives.lower import sent_nbytes
from manygrad.collectives.wanted import describe, text_of
from manygrad.runtime import profile
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.counters import GlobalCounters
from manygrad.runtime.current import current
from manygrad.runtime.exchange import Exchange
from manygrad.runtime.items import ExecItem, Vars, report
from manygrad.tensor.environment import DEBUG
from manygrad.tensor.uop import UOp


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
        self.name = f"{c.kind} {c.count}"
        self.key = int.from_bytes(hashlib.blake2b(f"{plan} {members.place}".encode(), digest_size=8).digest(), "little")
        self.text = self.communication.descriptions[self.key] = text_of(what)
        self.by_all = len({world.rank_of(d) for d in members.devices}) == world.size
        endpoint = self.communication.endpoint if world.size > 1 else None
        self.exchange = Exchange(what.src[0], buffers, len(members.mine), endpoint)
        self.bytes_sent = sent_nbytes(what.src[0])

    @property
    def written(self) -> list[Buffer]:
        n = len(self.mine)
        return self.buffers[:n] + self.buffers[2 * n :]

    def facts(self) -> dict[str, Any]:
        return (
            {"line": self.line} if self.idle else {"line": self.line, "plan": self.text, "bytes sent": self.bytes_sent}
        )

    @property
    def crosses(self) -> bool:
        """Whether other workers take part."""
        return not self.idle and self.exchange.endpoint is not None

    def count(self) -> None:
        GlobalCounters.kernel_count += 1
        if not self.idle:
            GlobalCounters.net_bytes += self.bytes_sent

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

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        if self.idle or any((b.base or b) is buffer for b in self.written):
            return None
        return lambda to: self.exchange.move(buffer, to)

    def communicate(self, vars: Vars) -> None:
        """`run`, but for what only the thread that runs kernels may count."""
        self.begin(vars)
        self.finish()

    def begin(self, vars: Vars) -> None:
        """Sends what may be sent while collectives before this one are carried out; `finish` does all else."""
        runs = self.communication.runs
        sequence = runs[self.key] = runs.get(self.key, 0) + 1
        if vars:  # ranks that bind a variable to different values are in different programs
            sequence |= zlib.crc32(repr(sorted(vars.items())).encode()) << 32
        self.exchange.begin(self.key, sequence)

    def finish(self) -> None:
        start = time.perf_counter()
        if self.by_all:
            self.communication.entered = (self.communication.entered[0] + 1, self.text)
        self.exchange.finish()
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
