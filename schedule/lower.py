"""lower_sink_to_linear: the passes, from the graph of all devices to the calls of this worker.

(Imported when a schedule is made: a program whose schedules are on disk needs none of them.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from manygrad.errors import NoOrder
from manygrad.multi.finish_sums import finish_sums
from manygrad.multi.lower_shards import lower_shards
from manygrad.multi.world import World
from manygrad.schedule.facts.buffers import Temps
from manygrad.schedule.graph.clean import clean
from manygrad.schedule.graph.compute_in_parts import compute_in_parts
from manygrad.schedule.graph.cut_sums import cut_sums
from manygrad.schedule.graph.lower_checks import lower_checks
from manygrad.schedule.graph.merge_reductions import merge_reductions
from manygrad.schedule.graph.simplify import simplify
from manygrad.schedule.graph.split_reductions import split_reductions
from manygrad.schedule.kernels.chain_kernels import chain_kernels
from manygrad.schedule.kernels.limit_columns import limit_columns
from manygrad.schedule.kernels.merge_kernels import merge_kernels
from manygrad.schedule.kernels.own_rows import own_rows
from manygrad.schedule.kernels.pass_parts import pass_parts
from manygrad.schedule.kernels.rangeify import rangeify
from manygrad.schedule.kernels.split_operands import split_operands
from manygrad.schedule.order.cut_collectives import cut_collectives
from manygrad.schedule.order.drop_unread import drop_unread
from manygrad.schedule.order.lower_collectives import lower_collectives
from manygrad.schedule.order.order_items import order_items
from manygrad.schedule.order.order_spec import order_spec
from manygrad.schedule.order.plan_memory import plan_memory
from manygrad.schedule.spec import graph_spec, items_spec, linear_spec, stores_spec
from manygrad.schedule.stores.copy_old_values import copy_old_values
from manygrad.schedule.stores.insert_stores import insert_stores
from manygrad.schedule.stores.lower_storage import lower_storage
from manygrad.schedule.stores.split_kernels import split_kernels
from manygrad.schedule.stores.split_updates import split_updates
from manygrad.tensor.environment import DEBUG, SPEC, TRACK_MATCH_STATS
from manygrad.tensor.source import forget_inherited, line_of
from manygrad.tensor.uop import UOp
from manygrad.tensor.uop.passes import Pass, run_passes, timed
from manygrad.tensor.uop.track import history


def lower_sink_to_linear(sink: UOp, me: World) -> UOp:
    """The stage's pipeline: from the graph of all devices to the calls of this worker; where these have no order, once
    more with copies."""
    start = time.perf_counter()
    if SPEC:
        graph_spec(sink, "normalize")
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
    """Setting of the passes of one schedule: which devices are this worker's, where temporaries
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
    Pass("own_rows", lambda items, _: own_rows(items), items_spec),
    Pass("cut_collectives", lambda items, to: cut_collectives(items, to.me.link), items_spec),
    Pass("order_items", lambda items, _: order_items(items), order_spec),
    Pass("merge_kernels", lambda items, _: merge_kernels(items), order_spec),
    Pass("chain_kernels", lambda items, _: chain_kernels(items), order_spec),
    Pass("limit_columns", lambda items, _: limit_columns(items), order_spec),
    Pass("pass_parts", lambda items, _: pass_parts(items), order_spec),
    Pass("lower_collectives", lambda items, to: lower_collectives(items, to.me, to.temps), order_spec),
    Pass("plan_memory", lambda items, _: plan_memory(items), linear_spec),
)
