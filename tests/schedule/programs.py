"""What the tests of the scheduler look at: the calls of a program, its kernels, their loops."""

from __future__ import annotations

import numpy as np

from manygrad import Tensor
from manygrad.runtime.current import current
from manygrad.runtime.engine.realize import new_buffer
from manygrad.schedule import Scheduled, create_linear_with_vars, normalize
from manygrad.schedule.facts.buffers import Temps
from manygrad.schedule.facts.fused import StoredValue
from manygrad.schedule.lower import PASSES, Lowering
from manygrad.schedule.stores.fusion import decide_stores
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.passes import run_passes
from manygrad.tensor.uop.shape import unviewed


def stored(*shape: int, device: str | None = None) -> Tensor:
    """Ones in memory of their own."""
    return Tensor(np.ones(shape, np.float32), device=device).realize()


def sink_of(tensors: Tensor | list[Tensor]) -> UOp:
    """What `realize` hands to the scheduler: a buffer for each value, assignments as they are."""
    effects = []
    for t in tensors if isinstance(tensors, list) else [tensors]:
        base = unviewed(t.uop)
        effects.append(
            base if base.op is Ops.AFTER else UOp(Ops.STORE, dtypes.void, (new_buffer(t.uop, t.device), t.uop))
        )
    return UOp(Ops.SINK, dtypes.void, tuple(effects))


def scheduled(tensors: Tensor | list[Tensor]) -> Scheduled:
    return create_linear_with_vars(sink_of(tensors), current().world, current().schedules)


def linear_of(tensors: Tensor | list[Tensor]) -> UOp:
    return scheduled(tensors).linear


def kernels_of(tensors: Tensor | list[Tensor]) -> list[UOp]:
    """The kernel ASTs, in order, without those that look at indices; every call must be a kernel."""
    linear, _, buffers, _ = scheduled(tensors)
    words = {i for i, b in enumerate(buffers) if b.arg.uid < 0}  # (`runtime/faults.py`)
    calls = [c.src[0] for c in linear.src if not (c.src[1].op is Ops.PARAM and c.src[1].arg.uid in words)]
    assert all(c.op is Ops.SINK for c in calls), [c.op for c in calls]
    return calls


def stores_of(tensors: Tensor | list[Tensor]) -> dict[UOp, StoredValue]:
    """The values that are stored between kernels, each with the rule that says so."""
    graph = normalize(sink_of(tensors)).graph
    before = PASSES[: [p.name for p in PASSES].index("insert_stores")]
    lowered: UOp = run_passes("schedule", before, graph, Lowering(current().world, Temps()))
    return decide_stores(lowered.toposort())


def reduce_ranges(kernel: UOp) -> list[int]:
    """Sizes of the loops that reductions are left with."""
    return [r.src[0].arg for r in kernel.toposort() if r.op is Ops.RANGE and r.arg.kind == "reduce"]
