"""From the SINK of all tensors to realize, to a LINEAR: an ordered list of CALLs with planned memory.

`create_linear_with_vars` reads top to bottom as the pipeline: variables and buffers are taken out, so that the graph is
its own cache key; what is left is lowered once and kept, in memory and on disk (`Schedules` in `schedule/cache.py`).
"""

from __future__ import annotations

import time
from typing import NamedTuple

from manygrad.multi.world import World
from manygrad.schedule.cache import Schedule, Schedules
from manygrad.schedule.normalize import as_param, normalize
from manygrad.schedule.plan import Plan, plan_of, shared_first
from manygrad.tensor.environment import COLLECTIVE, DETECT_ANOMALY, SCACHE, SUM_BLOCKS
from manygrad.tensor.source import LINE
from manygrad.tensor.uop import UOp
from manygrad.tensor.uop.passes import timed


class Scheduled(NamedTuple):
    """A Schedule; `var_vals` by name; `buffers` by PARAM slot."""

    linear: UOp
    var_vals: dict[str, int]
    buffers: list[UOp]
    plan: Plan | None


def create_linear_with_vars(sink: UOp, me: World, schedules: Schedules, is_recorded: bool = False) -> Scheduled:
    """The LINEAR of a SINK of STOREs and AFTERs, from `schedules` where the same graph was scheduled before.
    `is_recorded`: by a TinyJit, which keeps what comes of it, so the graph need not be kept for the next time."""
    ordered, shared = shared_first(sink, me)
    graph, buffers, var_vals = normalize(ordered)
    schedule = create_schedule(graph, me, schedules, shared, is_recorded)
    return Scheduled(schedule.linear, var_vals, buffers, schedule.plan)


def create_schedule(
    normal: UOp, me: World, schedules: Schedules, shared: int = 0, is_recorded: bool = False
) -> Schedule:
    """The LINEAR of a graph over numbered PARAMs, from `schedules` where it was scheduled before.

    The first `shared` effects are those for which workers communicate. On several workers, and where anomalies are
    looked for, the lines are part of the key: errors name them, and equal graphs may stand on different ones.
    """
    if not SCACHE:
        schedules.misses += 1
        return _planned(normal, _lower(normal, me), me, shared)
    is_named = bool(shared or DETECT_ANOMALY)
    lines = tuple([LINE.get(u) for u in normal.toposort()]) if is_named else ()
    key = (normal, me.rank, me.size, me.link, shared, lines, SUM_BLOCKS.value, COLLECTIVE.value)
    found = schedules.find(key)
    if found is None and (digests := schedules.digests(normal, me)) is not None:
        digest = (digests.entry if is_named else digests.graph, shared)
        found = schedules.find_again(digest, key, is_recorded)
    if found is not None:
        schedules.hits += 1
        if DETECT_ANOMALY:
            found.tell_lines()
        return found
    schedules.misses += 1
    if digests is None:
        schedules.keep(key, found := _planned(normal, _lower(normal, me), me, shared))
        return found
    found = _planned(normal, _load_or_lower(normal, digests.entry, me, schedules), me, shared)
    schedules.keep_digest(digest, found)
    return found


def _lower(normal: UOp, me: World) -> UOp:
    from manygrad.schedule.lower import lower_sink_to_linear  # (thirty modules, for what is not on disk)

    return lower_sink_to_linear(normal, me)


def _planned(normal: UOp, linear: UOp, me: World, shared: int) -> Schedule:
    plan = plan_of(normal, shared, linear, me) if shared else None
    return Schedule(linear, plan, tuple([LINE.get(call) for call in linear.src]))


def create_linear(normal: UOp, me: World, schedules: Schedules) -> UOp:
    """The LINEAR of a graph over numbered PARAMs that is one worker's own."""
    return create_schedule(normal, me, schedules).linear


def _load_or_lower(normal: UOp, key: bytes, me: World, schedules: Schedules) -> UOp:
    start = time.perf_counter()
    linear = schedules.load(key)
    if linear is not None:
        timed("schedule", "load schedule", start, calls=len(linear.src))
    if linear is None:
        linear = _lower(normal, me)
        schedules.save(key, linear)
    else:
        schedules.loaded += 1
    return linear


__all__ = ["Scheduled", "as_param", "create_linear", "create_linear_with_vars", "create_schedule", "normalize"]
