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
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.exchange.exchange import Exchange
from manygrad.runtime.executors.items import ExecItem, Vars, report
from manygrad.runtime.profile import profile
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.tensor.environment import DEBUG
from manygrad.tensor.uop import UOp


class CollectiveItem(ExecItem):
    """`plan`: the key of the LINEAR's plan; 0 where one worker is alone."""

    track = "collectives"

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
        self.counter = self.communication.counter(self.key)
        by_all = len({world.rank_of(d) for d in members.devices}) == world.size
        self.text_number = self.communication.text_number(self.text) if by_all else -1  # of what all workers enter
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

    @property
    def ahead_nbytes(self) -> int:
        """Bytes that `begin` sends."""
        return 0 if self.idle else self.exchange.ahead_nbytes

    @property
    def link_s(self) -> float:
        """Seconds of sending over the link between hosts, roughly; 0 in shared memory."""
        link = self.communication.endpoint.link if self.crosses and self.communication.endpoint is not None else None
        return 0.0 if link is None or link.route == "shm" else link.latency_s + self.bytes_sent / link.bytes_per_s

    def count(self) -> None:
        GlobalCounters.kernel_count += 1
        if not self.idle:
            GlobalCounters.net_bytes += self.bytes_sent

    def run(self, vars: Vars) -> None:
        if self.idle:
            return
        self.count()
        self.run_uncounted(vars)

    def run_uncounted(self, vars: Vars) -> None:
        before = self.communication.time_s
        self.communicate(vars)
        self.communication.waited(self.communication.time_s - before)

    def resume(self, vars: Vars, stopped: int) -> None:
        """Goes on after a native call that began it and came to its step `stopped`."""
        before = self.communication.time_s
        sequence = int(self.counter[0]) | variables_word(vars)
        self._carry_out(lambda: self.exchange.resume(self.key, sequence, stopped))
        self.settle()
        self.communication.waited(self.communication.time_s - before)

    def mover(self, buffer: Buffer) -> Callable[[Any], None] | None:
        if self.idle or any((b.base or b) is buffer for b in self.written):
            return None
        return lambda to: self.exchange.move(buffer, to)

    def communicate(self, vars: Vars) -> None:
        """`run`, but for what only the thread that runs kernels may count."""
        self.begin(vars)
        self.finish()
        self.settle()

    def begin(self, vars: Vars) -> None:
        """Sends what may be sent while collectives before this one are carried out."""
        self.counter[0] += 1
        sequence = int(self.counter[0]) | variables_word(vars)
        self.communication.spend(lambda: self.exchange.begin(self.key, sequence))

    def advance(self) -> Callable[[], bool] | None:
        """Goes on, after `begin`, as far as what has come allows; returns what says that more has come."""
        return self.communication.spend(self.exchange.advance)

    def finish(self) -> None:
        """All else, until the results are there."""
        if self.text_number >= 0:
            self.communication.enter(self.text_number)
        self._carry_out(self.exchange.finish)

    def _carry_out(self, calls: Callable[[], None]) -> None:
        start = time.perf_counter()
        self.communication.spend(calls)
        end = time.perf_counter()
        if DEBUG >= 2:
            nbytes = 2 * sum(b.nbytes for b in self.buffers)
            report(self.name, self.buffers[0].device.name, end - start, 0, nbytes, self.line)
        if profile.active:
            profile.record(self.track, self.name, start, end, self.facts())

    def settle(self) -> None:
        """Until all memory may be written again."""
        self.communication.spend(self.exchange.settle)

    def run_profiled(self, vars: Vars) -> None:
        self.run(vars)  # (told in `communicate`, also where that runs beside kernels)


def variables_word(vars: Vars) -> int:
    """The word of a sequence besides the number of the run: ranks that bind a variable to different values are in
    different programs."""
    return zlib.crc32(repr(sorted(vars.items())).encode()) << 32 if vars else 0
