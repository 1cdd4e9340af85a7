"""A kernel and the decisions by which its loop tree is built."""

from __future__ import annotations

from dataclasses import dataclass

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.loops.lanes import Lanes, Tiling
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of


@dataclass(frozen=True)
class KernelContext:
    """The kernel as building sees it. Of the nest only what the tree says of it goes on to emission."""

    sig: Signature
    nest: LoopNest
    tiling: Tiling


def in_context(sig: Signature, nest: LoopNest) -> KernelContext:
    slots = {slot for _, slot in nest.staged}
    loads = [u for u in sig.nodes if u.op is Ops.LOAD and u.src[0].src[0].arg in slots]
    packed = frozenset(r for u in loads for r in ranges_of(u))
    lanes = Lanes(nest.vectorized, nest.lanes if nest.vectorized is not None else 1)
    return KernelContext(sig, nest, Tiling(nest.loops, lanes, nest.tile, nest.reduce_lanes, nest.dots, packed))
