"""Where REDUCEs are computed: in the outermost tile in which all is open that they need, those over the same ranges in
one nest of loops.

Versions by place: at the edge of an image other taps of a filter count than in its midst.

before:  for x in 0..56 (8 at a time): reduce over c: FMA where 0 <= x + k - 1 < 56
after:   for x in 0..56 (8 at a time):
           if x < 8: { reduce, the taps of the left edge } else if x < 48: { reduce, all taps } else: { .. }
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from manygrad.runtime.codegen.analysis.affine import Affine
from manygrad.runtime.codegen.analysis.describe import conjuncts, factor_masks
from manygrad.runtime.codegen.cost import EDGE_VERSIONS
from manygrad.runtime.codegen.kernel.dots import fits_words
from manygrad.runtime.codegen.kernel.online import Pair
from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.context import KernelContext
from manygrad.runtime.codegen.loops.fragments import fragments_along
from manygrad.runtime.codegen.loops.groups import dealt_out, shared_along
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.loops.lanes import fixed_size
from manygrad.runtime.codegen.loops.tiles import Around, Tiler
from manygrad.runtime.codegen.loops.tree import (
    Accumulate,
    Holds,
    If,
    Node,
    Nodes,
    OnlineReduce,
    ReduceLoop,
    Rest,
    Scope,
)
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.table import memo
from manygrad.tensor.uop.uop import UOp


def reduces(t: Tiler, around: Around, pairs: Mapping[UOp, Pair]) -> tuple[Nodes, Around]:
    """The REDUCEs whose value needs no loop that is not open yet; and what is around the rest."""
    found: list[Node] = []
    while True:
        ready = [u for u in around.waiting if ranges_of(u) <= around.tiles.keys() and _inner_done(u, around)]
        if around.inside:
            ready = [u for u in ready if ranges_of(u) & around.inside]
        if not ready:
            return tuple(found), around
        # one of several that share their ranges waits for the others
        first = next((u for u in ready if all(v in ready for v in around.waiting if v.src[1:] == u.src[1:])), ready[0])
        vectorized = around.lanes.range
        group = tuple(
            u
            for u in ready
            if u.src[1:] == first.src[1:] and (vectorized in ranges_of(u)) == (vectorized in ranges_of(first))
        )
        around = replace(around, waiting=tuple(u for u in around.waiting if u not in group))
        pair = pairs.get(group[0])
        if pair is not None and pair.total in around.waiting:
            around = replace(around, waiting=tuple(u for u in around.waiting if u is not pair.total))
            found.append(_online(t, pair, replace(around, running=around.running | {*group})))
        else:
            found.append(reduction(t, group, replace(around, running=around.running | {*group})))


@memo
def _reductions_below(u: UOp) -> list[UOp]:
    return [v for v in u.src[0].toposort() if v.op is Ops.REDUCE]


def _inner_done(u: UOp, around: Around) -> bool:
    """Whether all REDUCEs that `u` reads and that do not depend on its own ranges have been computed, but for those
    that need a range which only an inner REDUCE opens."""
    own = frozenset(u.src[1:])
    return not any(
        (v in around.waiting or v in around.running)
        and not (ranges_of(v) & own)
        and ranges_of(v) <= (around.tiles.keys() | own)
        for v in _reductions_below(u)
    )


def reduction(t: Tiler, group: tuple[UOp, ...], around: Around, rest: Rest | None = None) -> ReduceLoop:
    lanes, split = t.kernel.tiling.lanes_of(group, around.lanes)
    ranges = group[0].src[1:]
    skipped = masks(t.kernel, [u.src[0] for u in group], frozenset(ranges))
    inner = replace(around, lanes=lanes, inside=frozenset(ranges), added=tuple(u.src[0] for u in group))
    body = _by_place(t.kernel, skipped, inner, _loops(t, ranges, inner, Accumulate()))
    across = max(t.kernel.nest.reduce_bound.get(r, 1) for r in ranges)
    words = rest is None and split is None and across == 1 and all(_in_words(t.kernel, u) for u in group)
    tiling = t.kernel.tiling
    partials = 1 if split is None else tiling.sizes[split] // tiling.step_of(split, lanes)
    nest = t.kernel.nest
    matrix, warp = nest.matrix in ranges, nest.warp_matrix in ranges
    return ReduceLoop(group, lanes, split, skipped, body, rest, partials, across, words, matrix, warp)


def _in_words(kernel: KernelContext, u: UOp) -> bool:
    """Whether a sum is one of products that an instruction adds up, and of so few and small ones that it fits 16
    bits."""
    return any(fits_words(u, r) for r in u.src[1:] if r in kernel.nest.dots)


def _online(t: Tiler, pair: Pair, around: Around) -> OnlineReduce:
    lanes, _ = t.kernel.tiling.lanes_of((pair.total,), around.lanes)
    ranges = pair.total.src[1:]
    added = (pair.maximum.src[0], pair.total.src[0])
    inner = replace(around, lanes=lanes, inside=frozenset(ranges), added=added)
    body = _loops(t, ranges, inner, Accumulate())
    apart = reduction(t, (pair.maximum,), around), reduction(t, (pair.total,), around)
    return OnlineReduce(pair, lanes, body, apart)


def _loops(t: Tiler, ranges: tuple[UOp, ...], around: Around, leaf: Node) -> Nodes:
    if not ranges:
        return (leaf,)
    nest, is_shared = t.kernel.nest, any(r is ranges[0] for r, *_ in t.kernel.nest.shared)
    if (is_shared or ranges[0] is nest.warp_matrix) and ranges[0] not in around.blocks:
        along = shared_along if is_shared else fragments_along
        return along(t, ranges[0], around, lambda inner: _loops(t, ranges, inner, leaf))
    loop = dealt_out if ranges[0] in t.kernel.nest.reduce_bound else Tiler.loop
    return loop(t, ranges[0], around, lambda inner: _loops(t, ranges[1:], inner, leaf))


def masks(kernel: KernelContext, values: list[UOp], ranges: frozenset[UOp]) -> tuple[UOp, ...]:
    """Under which conditions the factors of products are read, if one of `ranges` is skipped and they are the same for
    all `values`: without any of them nothing is added."""
    if not kernel.nest.skipped & ranges:
        return ()
    shared = [set(factor_masks(v)) for v in values]
    return tuple(m for m in factor_masks(values[0]) if all(m in s for s in shared))


# *** versions ***


class TileCondition(NamedTuple):
    """A condition at a tile position which is known once it is known where the tile of one loop begins."""

    condition: UOp
    position: tuple[tuple[UOp, int], ...]
    form: Affine

    def holds(self, origin: int) -> bool:
        ((_, c),) = self.form.terms
        value = c * origin + self.form.constant
        return value < 0 if self.condition.op is Ops.CMPLT else (value == 0) == (self.condition.op is Ops.CMPEQ)


def _by_place(kernel: KernelContext, skipped: tuple[UOp, ...], around: Around, body: Nodes) -> Nodes:
    """`body` in versions that know which of the masks hold at the positions of the tile that is open."""
    for r in reversed(kernel.nest.loops):
        if around.tiles.get(r, 1) > 1 and r.src[0].op is Ops.CONST and (asked := _asked(kernel, skipped, r, around)):
            begins = itertools.groupby(_begins(r, around), lambda x: tuple(a.holds(x) for a in asked))
            places = [(list(same)[-1], holds) for holds, same in begins]
            if len(places) <= EDGE_VERSIONS:
                return _versions(index.origin(r), asked, places, body)
    return body


def _asked(kernel: KernelContext, skipped: tuple[UOp, ...], r: UOp, around: Around) -> list[TileCondition]:
    """Conditions that are asked at run time of the tile of `r` alone."""
    found = []
    analysis, tile = kernel.tiling.analysis(around.lanes), kernel.nest.tile
    for c in compared(skipped):
        sizes = {x: fixed_size(x) for x in ranges_of(c) if x.arg.kind == "reduce"}
        out = {x: n for x, n in sizes.items() if n is not None and n == tile.get(x)}
        if r not in ranges_of(c) or any(x.arg.kind == "reduce" and x not in out for x in ranges_of(c)):
            continue
        for at in itertools.product(*(range(n) for n in out.values())):
            for p in kernel.tiling.positions(ranges_of(c) - out.keys(), around.tiles, around.lanes):
                position = {**p, **dict(zip(out, at))}
                form = analysis.compare(c, position)
                if isinstance(form, Affine) and [x.expr for x, _ in form.terms] == [r]:
                    found.append(TileCondition(c, tuple(position.items()), form))
    return found


def compared(skipped: tuple[UOp, ...] | list[UOp]) -> list[UOp]:
    """The comparisons of indices that masks are made of."""
    every = (c for m in skipped for c in conjuncts(m) if c.op in GroupOp.COMPARE and c.src[0].dtype is dtypes.index)
    return list(dict.fromkeys(every))


def _begins(r: UOp, around: Around) -> list[int]:
    """Where a tile of `r` may begin, if it is one like the open one."""
    only, extent = around.origins[r].number, around.tiles[r]
    return list(range(0, r.src[0].arg - extent + 1, extent)) if only is None else [only]


def _versions(
    origin: Index, asked: list[TileCondition], places: list[tuple[int, tuple[bool, ...]]], body: Nodes
) -> Nodes:
    """`body` for tiles that begin at up to the last of each group of `places`, each with what holds there."""
    (last, holds), *others = places
    known = Holds(tuple((a.condition, a.position, true) for a, true in zip(asked, holds)), body)
    if not others:
        return (Scope((known,)),)
    return (If(index.less(origin, index.const(last + 1)), (known,), _versions(origin, asked, others, body)),)
