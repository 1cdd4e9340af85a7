"""Groups: the grid loop, the loops over a group's work items, and what these share.

before:  parallel for (m by 4, n by 4): reduce over k: accumulate
after:   grid for (m by 32, n by 32): group for m': group for n':
           reduce over k: for 16 of k: { share a[32 of m, 16 of k]; barrier; for k in 16: accumulate; barrier }

A sum may also be dealt out to the work items of a subgroup:

after:   grid for (m, n): reduce over k, across 32 work items: for k in member..512 by 32: accumulate
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.ahead import copied_ahead
from manygrad.runtime.codegen.loops.fragments import fresh_number, warp_items
from manygrad.runtime.codegen.loops.fragments import tile as one_tile
from manygrad.runtime.codegen.loops.index import BEGIN, FINISH, FIRST_ITEM, ITEM, MEMBER, Index
from manygrad.runtime.codegen.loops.lanes import Lanes, fixed_size
from manygrad.runtime.codegen.loops.local import GroupStage, SharedLoop
from manygrad.runtime.codegen.loops.tiles import Around, Body, Tiler
from manygrad.runtime.codegen.loops.tree import (
    Barrier,
    BlockLoop,
    CopyElement,
    CopyPart,
    For,
    If,
    Kind,
    Node,
    Nodes,
    Share,
    StartCopies,
    TileLoop,
    Vectors,
)
from manygrad.runtime.codegen.opts.cache_read import staged_values
from manygrad.runtime.codegen.opts.cache_shared import part_size
from manygrad.runtime.codegen.opts.copy_ahead import copied_width, is_in_vectors
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.args import RangeArg
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.uop import UOp


def grid(t: Tiler, counter: Index, number: dict[UOp, Index], around: Around, body: Body) -> Nodes:
    """The grid loop, its `counter` counting groups; `number`: of each of its loops, which group of tiles it is at."""
    nest = t.kernel.nest
    loops = list(number)
    begins = {r: index.mul(number[r], part_size(nest, r)) for r in loops}
    items, threads = _items(t)
    tiles = {r: index.add(index.mul(number[r], nest.bound[r]), items[r]) if r in items else number[r] for r in loops}

    def opened(around: Around, i: int) -> Nodes:
        if i == len(loops):
            return body(around)
        r = loops[i]
        if nest.warp_matrix is not None and r in items:
            return one_tile(t, r, tiles[r], around, lambda inner: opened(inner, i + 1))
        size = fixed_size(r)
        is_even = r not in items or (size is not None and size % part_size(nest, r) == 0)
        # (what a tile beyond the last one would read is read nowhere)
        tile = tiles[r] if is_even else index.here(tiles[r])
        own = t.one(r, tile, around, lambda inner: opened(inner, i + 1))
        return own if is_even else (If(index.less(tiles[r], t.tiles_of(r)), own),)

    inside = opened(replace(around, groups=begins), 0)
    for dim, one in threads:
        inside = (For(one, index.const(0), index.const(nest.group[dim]), 1, inside, Kind.GROUP, dim),)
    return (For(counter, BEGIN, FINISH, 1, inside, Kind.GRID),)


def _items(t: Tiler) -> tuple[dict[UOp, Index], list[tuple[int, Index]]]:
    """Which tile of each bound loop a work item has, of its group's; and the dimensions of the group, innermost loop
    first, each with its counter."""
    nest = t.kernel.nest
    if nest.warp_matrix is not None:
        return warp_items(t)
    items = {r: t.counters.new() for r in nest.loops if r in nest.bound}
    before = len(nest.group) - len(items)
    return items, [(before + i, items[r]) for i, r in enumerate(reversed(items))]


def dealt_out(t: Tiler, k: UOp, around: Around, body: Body) -> Nodes:
    """The loop over `k`, of which each work item runs every so many tiles; the first one what is no loop. All sums of a
    kernel are dealt out to the same work items, and so is what is stored along a loop."""
    items, found = next(iter(t.kernel.nest.reduce_bound.values())), list[Node]()
    for n in t.loop(k, around, body):
        if isinstance(n, For):
            begin = index.add(n.begin, index.mul(MEMBER, n.step) if n.step > 1 else MEMBER)
            found.append(replace(n, begin=begin, step=items * n.step, kind=Kind.SUBGROUP))
        else:
            found.append(If(FIRST_ITEM, (n,)))
    return tuple(found)


def shared_along(t: Tiler, k: UOp, around: Around, inner: Callable[[Around], Nodes]) -> Nodes:
    """The loop over `k` in blocks, each copied by all work items before they go through it."""
    size, iterations = fixed_size(k), next(n for r, _, n in t.kernel.nest.shared if r is k)
    assert size is not None
    slots = [slot for r, slot, _ in t.kernel.nest.shared if r is k]
    counter = t.counters.new()
    values = [u for slot in slots for u, _ in staged_values(t.kernel.sig, slot)]
    stages = [_stage(t, k, u, iterations, around) for u in values]
    if k in t.kernel.nest.ring:
        return copied_ahead(
            t, k, iterations,
            copies=lambda begin: tuple(StartCopies(s, (_copy(t, s, begin),)) for s in stages),
            inner=lambda begin: inner(replace(around, blocks={**around.blocks, k: (begin, iterations)})),
            fetched=lambda begin: (),
            shared=lambda begin: (),
        )  # fmt: skip
    copies = tuple(Share(s, (_copy(t, s, counter),)) for s in stages)
    rest = inner(replace(around, blocks={**around.blocks, k: (counter, iterations)}))
    block = BlockLoop(k, counter, (*copies, Barrier(), *rest, Barrier()))
    return (For(counter, index.const(0), index.const(size), iterations, (block,)),)


def _stage(t: Tiler, k: UOp, u: UOp, iterations: int, around: Around) -> GroupStage:
    if (known := t.local.shared.get(u)) is not None:
        return known
    nest = t.kernel.nest
    number = fresh_number(t)
    depends = sorted((r for r in nest.loops if r in ranges_of(u)), key=lambda r: r is nest.vectorized)
    own = {r: r.replace(arg=RangeArg(number + i, r.arg.kind)) for i, r in enumerate((k, *depends))}
    loops, pitch = list[SharedLoop](), 1
    for r in reversed(depends):
        vectors = nest.tile_of(r) // nest.lanes if is_in_vectors(nest, u, r) else 1
        loops.insert(0, SharedLoop(r, own[r], around.groups[r], part_size(nest, r), pitch, vectors, nest.lanes))
        pitch *= part_size(nest, r)
    ring = nest.ring.get(k, 1)
    offset = t.local.share(iterations * pitch * u.dtype.itemsize * ring)
    width = copied_width(nest, u, k)
    stage = GroupStage(u, substitute(u, own), k, own[k], iterations, pitch, tuple(loops), offset, ring, width)
    t.local.shared[u] = stage
    return stage


def _copy(t: Tiler, stage: GroupStage, block: Index) -> Node:
    """Every element once, what lies side by side in the argument by neighbouring work items, or in one copy."""
    counter = t.counters.new()
    places = [(stage.k_source, block, stage.iterations), *((x.source, x.begin, x.size) for x in stage.loops)]
    load = next(v for v in stage.value.toposort() if v.op is Ops.LOAD)
    if sym.linear(load.src[0].src[1])[0].get(stage.k) == 1:
        places = [*places[1:], places[0]]
    width = stage.width or 1
    extents = {stage.loops[-1].source: width} if width > 1 else {}
    at, below, count = dict[UOp, Index](), 1, stage.elements // width
    for source, _, size in reversed(places):
        each = extents.get(source, 1)
        place = index.div(counter, index.const(below)) if below > 1 else counter
        below *= size // each
        place = index.mod(place, index.const(size // each)) if below < count else place
        at[source] = index.mul(place, each) if each > 1 else place
    to = at[stage.k_source], *(at[x.source] for x in stage.loops)
    body: Nodes = (CopyElement(stage) if stage.width is None else CopyPart(stage, to, index.const(1)),)
    for source, begin, _ in reversed(places):
        body = (TileLoop(source, index.add(begin, at[source]), extents.get(source, 1), body),)
    if width > 1:
        body = (Vectors(Lanes(stage.loops[-1].source, width), body),)
    return For(counter, ITEM, index.const(count), prod(t.kernel.nest.group), body)
