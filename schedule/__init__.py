"""From the SINK of all tensors to realize, to a LINEAR: an ordered list of CALLs with planned memory.

`create_linear_with_vars` reads top to bottom as the pipeline: variables and buffers are taken out, so that the graph is
its own cache key; what is left is lowered once and kept, in memory and on disk (`Schedules` in `schedule/cache.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from manygrad.multi.finish_sums import finish_sums
from manygrad.multi.lower_shards import lower_shards
from manygrad.multi.world import World
from manygrad.schedule.buffers import Temps
from manygrad.schedule.cache import Schedule, Schedules
from manygrad.schedule.chain_kernels import chain_kernels
from manygrad.schedule.clean import clean
from manygrad.schedule.compute_in_parts import compute_in_parts
from manygrad.schedule.copy_old_values import copy_old_values
from manygrad.schedule.cut_collectives import cut_collectives
from manygrad.schedule.cut_sums import cut_sums
from manygrad.schedule.drop_unread import drop_unread
from manygrad.schedule.insert_stores import insert_stores
from manygrad.schedule.limit_columns import limit_columns
from manygrad.schedule.lower_checks import lower_checks
from manygrad.schedule.lower_collectives import lower_collectives
from manygrad.schedule.lower_storage import lower_storage
from manygrad.schedule.merge_kernels import merge_kernels
from manygrad.schedule.merge_reductions import merge_reductions
from manygrad.schedule.order_items import NoOrder, order_items
from manygrad.schedule.pass_parts import pass_parts
from manygrad.schedule.plan import Plan, plan_of, shared_first
from manygrad.schedule.plan_memory import plan_memory
from manygrad.schedule.rangeify import rangeify
from manygrad.schedule.simplify import simplify
from manygrad.schedule.spec import graph_spec, items_spec, linear_spec, stores_spec
from manygrad.schedule.split_kernels import split_kernels
from manygrad.schedule.split_operands import split_operands
from manygrad.schedule.split_reductions import split_reductions
from manygrad.schedule.split_updates import split_updates
from manygrad.tensor.environment import COLLECTIVE, DEBUG, SCACHE, SPEC, SUM_BLOCKS, TRACK_MATCH_STATS
from manygrad.tensor.source import LINE, forget_inherited, line_of
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.passes import Pass, run_passes, timed
from manygrad.tensor.uop.track import history

SHAPED = frozenset({Ops.BUFFER, Ops.RESHAPE, Ops.EXPAND, Ops.SHRINK})  # a symbolic dim may stand in their arg
BOUND = SHAPED | {Ops.BIND}


class Scheduled(NamedTuple):
    """A Schedule; `var_vals` by name; `buffers` by PARAM slot."""

    linear: UOp
    var_vals: dict[str, int]
    buffers: list[UOp]
    plan: Plan | None


def create_linear_with_vars(sink: UOp, me: World, schedules: Schedules) -> Scheduled:
    """The LINEAR of a SINK of STOREs and AFTERs, from `schedules` where the same graph was scheduled before."""
    unbound, var_vals, originals = strip_binds(sink)
    ordered, shared = shared_first(unbound, me)
    normal, buffers = number_buffers(ordered)
    linear, plan = create_schedule(normal, me, schedules, shared)
    return Scheduled(linear, var_vals, [originals.get(b, b) for b in buffers], plan)


def create_schedule(normal: UOp, me: World, schedules: Schedules, shared: int = 0) -> Schedule:
    """The LINEAR of a graph over numbered PARAMs, from `schedules` where it was scheduled before.

    The first `shared` effects are those for which workers communicate. On several workers the lines are part of the
    key: errors name the lines of collectives, and equal graphs may stand on different ones.
    """
    lines = tuple([LINE.get(u) for u in normal.toposort()]) if shared else ()
    key = (normal, me.rank, me.size, me.link, shared, lines, SUM_BLOCKS.value, COLLECTIVE.value)
    found = schedules.find(key) if SCACHE else None
    if found is None:
        schedules.misses += 1
        linear = _load_or_lower(normal, me, schedules) if SCACHE else lower_sink_to_linear(normal, me)
        found = Schedule(linear, plan_of(normal, shared, linear, me) if shared else None)
        if SCACHE:
            schedules.keep(key, found)
    else:
        schedules.hits += 1
    return found


def create_linear(normal: UOp, me: World, schedules: Schedules) -> UOp:
    """The LINEAR of a graph over numbered PARAMs that is one worker's own."""
    return create_schedule(normal, me, schedules).linear


def _load_or_lower(normal: UOp, me: World, schedules: Schedules) -> UOp:
    key = schedules.entry_key(normal, me)
    if key is None:
        return lower_sink_to_linear(normal, me)
    start = time.perf_counter()
    linear = schedules.load(key)
    if linear is not None:
        timed("schedule", "load schedule", start, calls=len(linear.src))
    if linear is None:
        linear = lower_sink_to_linear(normal, me)
        schedules.save(key, linear)
    else:
        schedules.loaded += 1
    return linear


def lower_sink_to_linear(sink: UOp, me: World) -> UOp:
    """The stage's pipeline: from the graph of all devices to the calls of this worker; where these have no order, once
    more with copies."""
    start = time.perf_counter()
    if SPEC:
        graph_spec(sink, "number_buffers")
    try:
        linear: UOp = run_passes("schedule", PASSES, sink, Lowering(me, Temps()))
    except NoOrder:
        linear = run_passes("schedule", PASSES, sink, Lowering(me, Temps(), copies=True))
    finally:
        forget_inherited()
    timed("schedule", "schedule", start, calls=len(linear.src))
    if TRACK_MATCH_STATS and DEBUG >= 5:
        print("\n".join(map(_explained, linear.src)))
    return linear


def _explained(call: UOp) -> str:
    """How a call came about, a line a rewrite."""
    what = call.src[0]
    return "\n  ".join([f"{what.op.name} of {line_of(call)}:", *map(str, history(what))])


@dataclass(frozen=True)
class Lowering:
    """What the passes of one schedule are told besides the graph: which devices are this worker's, where temporaries
    are numbered, and whether older values are copied, as there is no order otherwise."""

    me: World
    temps: Temps
    copies: bool = False


PASSES: tuple[Pass[Lowering], ...] = (
    Pass("clean", lambda graph, _: clean(graph), graph_spec),
    Pass("merge_reductions", lambda graph, _: merge_reductions(graph), graph_spec),
    Pass("finish_sums", lambda graph, _: finish_sums(graph), graph_spec),
    Pass("cut_sums", lambda graph, to: cut_sums(graph, to.me.link), graph_spec),
    Pass("lower_shards", lambda graph, to: lower_shards(graph, to.me), graph_spec),
    Pass("lower_checks", lambda graph, _: lower_checks(graph), graph_spec),
    Pass("simplify", lambda graph, _: simplify(graph), graph_spec),
    Pass("split_reductions", lambda graph, _: split_reductions(graph), graph_spec),
    Pass("compute_in_parts", lambda graph, _: compute_in_parts(graph), graph_spec),
    Pass("lower_storage", lambda graph, to: lower_storage(graph, to.temps), graph_spec),
    Pass("copy_old_values", lambda graph, to: copy_old_values(graph, to.temps) if to.copies else graph, graph_spec),
    Pass("split_updates", lambda graph, _: split_updates(graph), graph_spec),
    Pass("insert_stores", lambda graph, to: insert_stores(graph, to.temps), graph_spec),
    Pass("split_kernels", lambda graph, _: split_kernels(graph), stores_spec),
    Pass("rangeify", lambda items, to: rangeify(items, to.temps), items_spec),
    Pass("drop_unread", lambda items, _: drop_unread(items), items_spec),
    Pass("split_operands", lambda items, _: split_operands(items), items_spec),
    Pass("cut_collectives", lambda items, to: cut_collectives(items, to.me.link), items_spec),
    Pass("order_items", lambda items, _: order_items(items), items_spec),
    Pass("merge_kernels", lambda items, _: merge_kernels(items), items_spec),
    Pass("chain_kernels", lambda items, _: chain_kernels(items), items_spec),
    Pass("limit_columns", lambda items, _: limit_columns(items), items_spec),
    Pass("pass_parts", lambda items, _: pass_parts(items), items_spec),
    Pass("lower_collectives", lambda items, to: lower_collectives(items, to.me, to.temps), items_spec),
    Pass("plan_memory", lambda items, _: plan_memory(items), linear_spec),
)


def strip_binds(sink: UOp) -> tuple[UOp, dict[str, int], dict[UOp, UOp]]:
    """Bound variables become their definitions; their values by name; of BUFFERs with a bound variable in their shape,
    what they became -> what they were, which is where their memory hangs."""
    if not any(
        u.op is Ops.BIND or (u.op in SHAPED and _has_uop(u.arg.shape if u.op is Ops.BUFFER else u.arg))
        for u in sink.toposort()
    ):
        return sink, {}, {}
    unbinding = _Unbinding()
    return unbinding.walk(sink), unbinding.values, unbinding.buffers


class _Unbinding:
    """(A class, not nested functions that call each other: those would keep the graph until a garbage collection.)"""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.done: dict[UOp, UOp] = {}
        self.buffers: dict[UOp, UOp] = {}

    def unbind(self, u: UOp) -> UOp:
        name, n = u.src[0].arg.name, u.src[1].arg
        if self.values.setdefault(name, n) != n:
            raise ValueError(
                f"bind mismatch: variable {name!r} is bound to {self.values[name]} and to {n} in one graph; "
                "realize one of the tensors first"
            )
        return u.src[0]

    def of_arg(self, x: Any) -> Any:
        if isinstance(x, UOp):
            return sym.to_sint(self.walk(x))
        return tuple(self.of_arg(y) for y in x) if isinstance(x, tuple) else x

    def walk(self, root: UOp) -> UOp:
        done = self.done
        for u in root.toposort(lambda u: u not in done) if done else root.toposort():
            if u in done:
                continue
            src = tuple([done[s] for s in u.src])
            if u.op not in BOUND and src == u.src:
                done[u] = u
                continue
            if u.op is Ops.BIND:
                done[u] = self.unbind(u)
                continue
            arg = u.arg
            if u.op in SHAPED and u.op is not Ops.BUFFER and _has_uop(arg):
                arg = self.of_arg(arg)
            elif u.op is Ops.BUFFER and _has_uop(arg.shape):
                arg = BufferSpec(arg.uid, self.of_arg(arg.shape), arg.dtype, arg.device, arg.axis, arg.bounds)
            done[u] = (
                u
                if src == u.src and arg is u.arg
                else (sym.simplified(u, src) if arg is u.arg else u.replace(src=src, arg=arg))
            )
            if u.op is Ops.BUFFER and done[u] is not u:
                self.buffers[done[u]] = u
            if (line := LINE.get(u)) is not None:
                LINE.setdefault(done[u], line)
        return done[root]


def _has_uop(arg: Any) -> bool:
    if type(arg) is tuple:
        return not {*map(type, arg)} <= {int} and True in map(_has_uop, arg)
    return isinstance(arg, UOp)


def as_param(buffer: UOp, slot: int) -> UOp:
    b = buffer.arg
    return UOp(Ops.PARAM, buffer.dtype, (), BufferSpec(slot, b.shape, b.dtype, b.device, b.axis, b.bounds))


def number_buffers(sink: UOp) -> tuple[UOp, list[UOp]]:
    """Buffers become PARAMs numbered in graph order: equal programs on other data are then equal graphs."""
    buffers: list[UOp] = []
    done: dict[UOp, UOp] = {}
    for u in sink.toposort():
        if u.op is Ops.BUFFER:
            done[u] = as_param(u, len(buffers))
            buffers.append(u)
            continue
        src = tuple([done[s] for s in u.src])
        if u.op in (Ops.DETACH, Ops.CUSTOM):  # as a leaf's number, these matter to gradients only
            done[u] = src[0]
            continue
        arg = None if u.op is Ops.CONTIGUOUS else u.arg
        done[u] = normal = u if src == u.src and arg is u.arg else u.replace(src=src, arg=arg)
        if normal is not u:  # its line is that of this graph, not of an equal one before
            if (line := LINE.get(u)) is not None:
                LINE[normal] = line
            else:
                LINE.pop(normal)
    return done[sink], buffers
