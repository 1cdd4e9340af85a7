"""From a kernel and its nest of decisions to the loop tree."""

from __future__ import annotations

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.kernel.online import online_pair
from manygrad.runtime.codegen.loops import fragments
from manygrad.runtime.codegen.loops.blocks import parallel
from manygrad.runtime.codegen.loops.context import in_context
from manygrad.runtime.codegen.loops.groups import dealt_out
from manygrad.runtime.codegen.loops.index import FIRST_ITEM
from manygrad.runtime.codegen.loops.local import Local
from manygrad.runtime.codegen.loops.pack import pack
from manygrad.runtime.codegen.loops.reduce import reduces
from manygrad.runtime.codegen.loops.rows import each_row, has_rows
from manygrad.runtime.codegen.loops.tiles import Around, Tiler
from manygrad.runtime.codegen.loops.tree import If, Nodes, PrefetchAhead, Store, Tree
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.uop.uop import UOp


def build(sig: Signature, nest: LoopNest) -> Tree:
    kernel = in_context(sig, nest)
    pairs = {p.maximum: p for r, x in nest.online if (p := online_pair(sig, r, x)) is not None}
    rows = has_rows(kernel)

    def opened(t: Tiler, r: UOp, around: Around) -> tuple[Nodes, Around]:
        if around.packing:
            return (), around
        first = pack(t, r, around)
        nodes, inner = reduces(t, around, pairs)
        return (*first, *nodes), inner

    def all_stores(around: Around) -> Nodes:
        store = Store(around.row, around.stored, nest.streamed, nest.aligned is not None)
        return (store,) if nest.warp_matrix is None else fragments.stores(t, around, store)

    def stores(around: Around) -> Nodes:
        return (If(FIRST_ITEM, all_stores(around)),) if nest.reduce_bound else all_stores(around)

    def loops(around: Around, i: int) -> Nodes:
        if i == len(nest.loops):
            return stores(around)
        if nest.reduce_bound and i >= nest.parallel and not around.waiting:
            return dealt_out(t, nest.loops[i], around, lambda inner: inside(inner, i + 1))
        if rows and nest.loops[i] is nest.vectorized:
            return each_row(t, around, stores)
        return t.loop(nest.loops[i], around, lambda inner: loops(inner, i + 1))

    def inside(around: Around, i: int) -> Nodes:
        """The loops in one that is dealt out."""
        if i == len(nest.loops):
            return all_stores(around)
        return t.loop(nest.loops[i], around, lambda inner: inside(inner, i + 1))

    t = Tiler(kernel, Local(kernel), opened)
    first, around = reduces(t, Around(kernel.tiling.lanes, waiting=sig.reduces), pairs)
    if nest.parallel:
        body = stores if nest.reduce_block is not None else lambda inner: loops(inner, nest.parallel)
        nodes = (*first, *parallel(t, around, body))
    else:
        nodes = (*first, *loops(around, 0))
    for argument, nbytes in reversed(nest.read_ahead):
        nodes = (PrefetchAhead(argument, nbytes, nodes),)
    return Tree(sig, kernel.tiling, t.local, nodes, nest.counts, nest.group)
