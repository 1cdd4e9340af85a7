"""From a kernel and its nest of decisions to the loop tree."""

from __future__ import annotations

from dataclasses import dataclass

from manygrad.runtime.codegen.kernel.online import online_pair
from manygrad.runtime.codegen.loops.blocks import parallel
from manygrad.runtime.codegen.loops.index import FIRST_LANE
from manygrad.runtime.codegen.loops.lanes import KernelContext
from manygrad.runtime.codegen.loops.local import Local
from manygrad.runtime.codegen.loops.pack import pack
from manygrad.runtime.codegen.loops.reduce import reduces
from manygrad.runtime.codegen.loops.rows import each_row, has_rows
from manygrad.runtime.codegen.loops.tiles import Around, Tiler
from manygrad.runtime.codegen.loops.tree import If, Nodes, Store
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class Tree:
    """The loops of a kernel, and what lies in the local memory that they use."""

    kernel: KernelContext
    local: Local
    nodes: Nodes


def build(kernel: KernelContext) -> Tree:
    nest, sig = kernel.nest, kernel.sig
    pairs = {p.maximum: p for r, x in nest.online if (p := online_pair(sig, r, x)) is not None}
    rows = has_rows(kernel)

    def opened(t: Tiler, r: UOp, around: Around) -> tuple[Nodes, Around]:
        if around.packing:
            return (), around
        first = pack(t, r, around)
        nodes, inner = reduces(t, around, pairs)
        return (*first, *nodes), inner

    def stores(around: Around) -> Nodes:
        store = Store(around.row, around.stored, nest.streamed, nest.aligned is not None)
        return (If(FIRST_LANE, (store,)),) if nest.reduce_bound else (store,)

    def loops(around: Around, i: int) -> Nodes:
        if i == len(nest.loops):
            return stores(around)
        if rows and nest.loops[i] is nest.lane:
            return each_row(t, around, stores)
        return t.loop(nest.loops[i], around, lambda inner: loops(inner, i + 1))

    t = Tiler(kernel, Local(kernel), opened)
    first, around = reduces(t, Around(kernel.lanes, waiting=sig.reduces), pairs)
    if not nest.parallel:
        return Tree(kernel, t.local, (*first, *loops(around, 0)))
    body = stores if nest.reduce_block is not None else lambda inner: loops(inner, nest.parallel)
    return Tree(kernel, t.local, (*first, *parallel(t, around, body)))
