"""Every rank runs the same program on the same values, or all are told:
what is compared before a LINEAR with communication runs.

- The plan (`schedule/plan.py`): once, when it is first made. No rank goes on before all have made the same one.
- Values that every rank must hold alike: those replicated over workers when they first enter a plan, local ones that
  are cut over workers when their plan is first made. Digests are taken while kernels are compiled, and compared by the
  launcher while training goes on; what a plan computes from equal values is equal, and is not looked at again.

The Runtime's hooks (`runtime/exchange/communication.py`) carry it to the launcher, which knows all ranks.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from contextvars import ContextVar

import numpy as np

from manygrad.errors import LostValue
from manygrad.runtime.agreement.loops import wait_for_plans
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.storage import STORAGE, buffers_of
from manygrad.schedule.plan import Plan, spans_workers
from manygrad.tensor.environment import COLLECTIVE_TIMEOUT_S
from manygrad.tensor.source import LINE
from manygrad.tensor.stored import LOST
from manygrad.tensor.threads import ScopedThread
from manygrad.tensor.uop import GroupOp, Ops, UOp

_exempt: ContextVar[bool] = ContextVar("values may differ", default=False)
LOOK_S = 1.0  # so often a wait for digests looks whether they get on
COLUMNS = 1024  # of a digest: sums of 8-byte words down so many columns, and along so many rows


def digest(buffer: Buffer) -> str:
    """Digest of the bits, whatever they mean; one pass over memory."""
    raw = buffer.as_numpy()
    data = np.ascontiguousarray(buffer.copyout() if raw is None else raw).reshape(-1).view(np.uint8)
    rows = len(data) // (8 * COLUMNS)
    whole = data[: rows * 8 * COLUMNS].view(np.uint64).reshape(rows, COLUMNS)
    total = np.uint64(len(data))
    with np.errstate(over="ignore"):
        weights = 2 * np.arange(max(len(whole), COLUMNS), dtype=np.uint64) + np.uint64(1)
        for start in range(0, len(whole), 512):  # (4 MiB at a time: the second sum finds it in the cache)
            block = whole[start : start + 512]
            total += np.dot(block.sum(0, dtype=np.uint64), weights[:COLUMNS]) * np.uint64(0x9E3779B97F4A7C15)
            total += np.dot(block.sum(1, dtype=np.uint64), weights[start : start + len(block)])
    return f"{int(total):016x}{zlib.crc32(data[whole.nbytes :].tobytes()):08x}"


class Agreement:
    """One plan on its way: begun before its kernels are compiled, ended before it runs."""

    def __init__(self, plan: Plan, linear: UOp, buffers: list[UOp]):
        communication = current().communication
        for u in buffers:  # (before others are told of a plan that cannot run)
            if u not in STORAGE and (why := LOST.get(u)) is not None:
                raise LostValue(why)
        communication.check()
        if communication.hooks is not None and plan.by_all:
            wait_for_plans()
        hooks, compared = communication.hooks, communication.compared
        self.compared = compared
        self.plan, self.buffers = plan, buffers
        self.tell = None if hooks is None or _exempt.get() else hooks.compare_values
        first = plan.key not in compared
        values = _unseen(plan, buffers, first)
        ask = hooks.make_plan if hooks is not None and first and plan.by_all else None
        self.ready = ask(plan.key, text_of(linear), plan.outline()) if ask is not None else _nothing
        round = compared[plan.key] = compared.get(plan.key, -1) + 1
        self.thread: ScopedThread | None = None
        self.values, self.digests = values, list[tuple[int, str, str]]()
        if values and self.tell is not None:
            self.thread = current().epoch.threads.start("manygrad-digest", self._compare, f"{plan.key:x}.{round}")

    def _compare(self, name: str) -> None:
        assert self.tell is not None
        for slot, b, what in self.values:
            self.digests.append((slot, digest(b), what))
        self.tell(name, self.digests)

    def _wait_for_digests(self, thread: ScopedThread) -> None:
        """As long as they get on. Raises `TimeoutError` after COLLECTIVE_TIMEOUT_S without one, and what has ended the
        thread; time in which we were suspended does not count."""
        limit_s, waited_s = float(COLLECTIVE_TIMEOUT_S.value), 0.0
        while thread.is_alive():
            before, look_s = len(self.digests), min(LOOK_S, limit_s)
            thread.join(look_s)
            waited_s = waited_s + look_s if len(self.digests) == before else 0.0
            if thread.is_alive() and waited_s >= limit_s:
                n, of = len(self.digests), len(self.values)
                what = f"the digest of {self.values[n][2]}" if n < of else "the digests to be handed to the launcher"
                raise TimeoutError(
                    f"waited {limit_s:g} s for {what} ({n} of {of} are made), which the ranks compare before plan "
                    f"{self.plan.key:#018x} runs; is the memory of this machine swapped out? The knob is "
                    f"COLLECTIVE_TIMEOUT_S (now {limit_s:g})"
                )
        thread.check()

    def end(self) -> None:
        """Waits until all ranks have made this plan. Raises `PlanMismatch` where they have not; then it counts as not
        made."""
        try:
            self.ready()
        except BaseException:
            self.compared.pop(self.plan.key, None)
            raise
        if self.thread is not None:
            self._wait_for_digests(self.thread)
        for slot in self.plan.leaves if self.plan.by_all and self.tell is not None else ():
            for b in buffers_of(self.buffers[slot]):
                b.agreed = True


def _nothing() -> None:
    pass


def begin(plan: Plan | None, linear: UOp, buffers: list[UOp]) -> Agreement | None:
    """None where ranks have nothing in common."""
    return None if plan is None else Agreement(plan, linear, buffers)


def _unseen(plan: Plan, buffers: list[UOp], first: bool) -> list[tuple[int, Buffer, str]]:
    """(slot, memory, what it is) of the values to compare."""
    out = []
    for slot in (*(plan.leaves if plan.by_all else ()), *(plan.cut if first else ())):
        u = buffers[slot]
        if u not in STORAGE:  # yet to be computed, by this plan
            continue
        b = buffers_of(u)[0]
        if b.is_allocated and b.nbytes and not b.agreed:
            out.append((slot, b, f"{u.dtype.name} {tuple(u.shape)} of {LINE.get(u) or 'an earlier step'}"))
    return out


@contextlib.contextmanager
def values_may_differ() -> Iterator[None]:
    """Values of ranks are not compared inside: to make them equal, or to combine what each rank has of its own,
    `with values_may_differ(): Tensor([own] * n).shard(world.devices, axis=0).sum().item()`."""
    token = _exempt.set(True)
    try:
        yield
    finally:
        _exempt.reset(token)


def text_of(linear: UOp) -> str:
    """The first collective, and how many more there are."""
    from manygrad.collectives.wanted import text_of as collective_text

    world = current().world
    found = [
        c.src[0]
        for c in linear.src
        if c.src[0].op in GroupOp.COLLECTIVE and spans_workers(c.src[0].arg.members.devices, world)
    ]
    first = next(c for c in found if c.op is not Ops.POINT_TO_POINT)
    return collective_text(first) + (f", and {len(found) - 1} more" if len(found) > 1 else "")
