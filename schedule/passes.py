"""A stage as a list of passes: each has a name, what it does, and the spec of what it makes; `run_passes` runs them.

A pass goes by the name of its function, in DEBUG=5, in messages of SPEC=1, in profiles and in tests. None runs inside
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from manygrad.multi.world import World
from manygrad.schedule import trace
from manygrad.schedule.buffers import Temps
from manygrad.schedule.items import Item
from manygrad.schedule.spec import GRAPHS, KERNEL, LINEAR
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.spec import verify


@dataclass(frozen=True)
class Lowering:
    """What the passes of one schedule are told besides the graph: which devices are this worker's, where temporaries
    are numbered, and whether older values are copied, as there is no order otherwise."""

    me: World
    temps: Temps
    copies: bool = False


@dataclass(frozen=True)
class Pass:
    """`run(graph or items, lowering)`, and a `spec(what it made, name)` that raises AssertionError where that is not
    legal."""

    name: str
    run: Callable[[Any, Lowering], Any]
    spec: Callable[[Any, str], None]


def graph_spec(graph: UOp, name: str) -> None:
    verify(graph, GRAPHS[name], name)


def items_spec(items: Sequence[Item], name: str) -> None:
    """Each kernel by itself, and the calls as those of a LINEAR."""
    for item in items:
        kernels = item.what.src if item.what.op is Ops.CHAIN else (item.what,) if item.what.op is Ops.SINK else ()
        for kernel in kernels:
            verify(kernel, KERNEL, name)
    calls = (UOp(Ops.CALL, dtypes.void, (i.what, *i.args)) for i in items)
    linear_spec(UOp(Ops.LINEAR, dtypes.void, tuple(calls)), name)


def linear_spec(linear: UOp, name: str) -> None:
    verify(linear, LINEAR, name, lambda u: u.op is not Ops.SINK and u.op is not Ops.CHAIN)


def run_passes(passes: Sequence[Pass], graph: Any, lowering: Lowering) -> Any:
    trace.begin()
    for p in passes:
        graph = trace.traced(p.name, p.run(graph, lowering), graph, p.spec)
    return graph
