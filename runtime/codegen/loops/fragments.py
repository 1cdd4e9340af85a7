"""A warp's matrix product: where its threads stand in the product, and how a group copies the factors that it shares.

for i0 in 0..4, group: for i1 in 0..32, group:        warps, threads of a warp
  r0 = 8 from ..; r1 = 8 from ..                      8 threads below each other, 4 side by side
    for 32 of k:
      share a[128 rows, 32 of k]: 16 bytes at a time
      share b[32 of k, 64 columns]
      barrier; k = 32 from ..: accumulate; barrier
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import product
from math import prod

from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.ahead import copied_ahead
from manygrad.runtime.codegen.loops.index import ITEM, Index
from manygrad.runtime.codegen.loops.lanes import Lanes
from manygrad.runtime.codegen.loops.local import FragmentStage, SharedLoop
from manygrad.runtime.codegen.loops.tiles import Around, Body, Tiler
from manygrad.runtime.codegen.loops.tree import (
    Barrier,
    BlockLoop,
    CopyPart,
    Fetch,
    FetchPart,
    For,
    Holds,
    If,
    Node,
    Nodes,
    Ragged,
    Scope,
    Share,
    SharePart,
    StartCopies,
    Store,
    TileLoop,
    Vectors,
)
from manygrad.runtime.codegen.opts.cache_shared import part_size
from manygrad.runtime.codegen.opts.copy_ahead import copied_chunks, runs_along
from manygrad.runtime.codegen.opts.warp_matrix import fragment_bytes, is_ragged, product_sides, warps_beside
from manygrad.runtime.codegen.target import CHUNK_BYTES, WARP_BESIDE, WARP_DOWN
from manygrad.tensor.uop.args import RangeArg
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.uop import UOp

ACROSS = 8  # chunks of a row that neighbouring threads read


def warp_items(t: Tiler) -> tuple[dict[UOp, Index], list[tuple[int, Index]]]:
    """As `groups._items`: a thread's place in its warp, and the warp's in its group."""
    nest = t.kernel.nest
    sides = product_sides(nest, t.kernel.sig.reduces[0])
    assert sides is not None
    thread, warp = t.counters.new(), t.counters.new()
    beside, four = index.const(warps_beside(nest, sides[1])), index.const(WARP_BESIDE)

    def at(of_warp: Index, threads: int, of_thread: Index) -> Index:
        return index.add(index.mul(of_warp, threads), of_thread)

    rows = at(index.div(warp, beside), WARP_DOWN, index.div(thread, four))
    columns = at(index.mod(warp, beside), WARP_BESIDE, index.mod(thread, four))
    return dict(zip(sides, (rows, columns))), [(0, thread), (1, warp)]


def fragments_along(t: Tiler, k: UOp, around: Around, inner: Callable[[Around], Nodes]) -> Nodes:
    """The loop over `k` in blocks. While the warps multiply one, what the next one has is on its way to registers."""
    size, terms = k.src[0].arg, t.kernel.nest.tile_of(k)
    stages = [stage_of(t, k, u, around) for w in t.kernel.sig.reduces for u in w.src[0].src]
    if k in t.kernel.nest.ring:
        copied, others = [s for s in stages if s.is_copied], [s for s in stages if not s.is_copied]
        return copied_ahead(
            t, k, terms,
            copies=lambda begin: tuple(StartCopies(s, _parts(t, s, begin, CopyPart)) for s in copied),
            inner=lambda begin: inner(replace(around, blocks={**around.blocks, k: (begin, terms)})),
            fetched=lambda begin: tuple(fetch(t, s, begin) for s in others),
            shared=lambda begin: tuple(share(t, s, begin) for s in others),
        )  # fmt: skip
    counter = t.counters.new()
    first = tuple(fetch(t, s, index.const(0)) for s in stages)
    following = index.add(counter, index.const(terms))
    after = tuple(fetch(t, s, following) for s in stages)
    ahead = (If(index.less(following, index.const(size)), after),) if size > terms else ()
    rest = inner(replace(around, blocks={**around.blocks, k: (counter, terms)}))
    shared = tuple(share(t, s, counter) for s in stages)
    block = BlockLoop(k, counter, (*shared, Barrier(), *ahead, *rest, Barrier()))
    return (*first, For(counter, index.const(0), index.const(size), terms, (block,)))


def stage_of(t: Tiler, k: UOp, u: UOp, around: Around) -> FragmentStage:
    """Where the group shares a factor."""
    if (known := t.local.fragments.get(u)) is not None:
        return known
    nest = t.kernel.nest
    (loop,) = (r for r in nest.bound if r in ranges_of(u))
    own = {r: r.replace(arg=RangeArg(fresh_number(t) + i, r.arg.kind)) for i, r in enumerate((k, loop))}
    side = SharedLoop(loop, own[loop], around.groups[loop], part_size(nest, loop), nest.tile_of(k))
    source = substitute(u, own)
    ring = nest.ring.get(k, 1)
    offset = t.local.share(fragment_bytes(nest, loop) * ring)
    along = runs_along(source, own[k], own[loop], CHUNK_BYTES // u.dtype.itemsize)
    is_copied = copied_chunks(nest, u, k)
    tile = nest.tile_of(loop)
    read = tile // 2 if loop is nest.vectorized else tile
    stage = FragmentStage(u, source, k, own[k], side, tile, read, along, offset, ring, is_copied)
    t.local.fragments[u] = stage
    return stage


def fetch(t: Tiler, stage: FragmentStage, block: Index) -> Node:
    """Reads what this work item will share of a block."""
    return Fetch(stage, _parts(t, stage, block, FetchPart))


def share(t: Tiler, stage: FragmentStage, block: Index) -> Node:
    return Share(stage, _parts(t, stage, block, SharePart))


def _parts(t: Tiler, stage: FragmentStage, block: Index, leaf: type[FetchPart | SharePart | CopyPart]) -> Nodes:
    """Neighbouring threads read what lies side by side in the argument. Of what lies along the rows a thread reads two
    iterations of the reduction, which are stored in pairs, or copies one."""
    items, side, k_size = prod(t.kernel.nest.group), stage.side, stage.k.src[0].arg
    terms, each = stage.terms, stage.chunk
    terms_at_once = 1 if stage.is_copied else 2
    chunks, pairs, across = (
        terms // each,
        terms // terms_at_once,
        min(ACROSS, side.size // each),
    )

    def opened(number: int, row: Index, rows: int, term: Index, count: int) -> Nodes:
        to, row, term = (term, row), index.add(side.begin, row), index.add(block, term)
        inside = index.const(1)
        if leaf is not SharePart:
            row = _up_to(row, side.loop.src[0].arg - rows) if is_ragged(t.kernel.nest, side.loop) else row
            if k_size % terms:
                inside, term = index.less(term, index.const(k_size)), _up_to(term, k_size - count)
        node: Node = CopyPart(stage, to, inside)
        if leaf is not CopyPart:
            node = SharePart(stage, number) if leaf is SharePart else FetchPart(stage, number, inside)
        inner = (TileLoop(stage.k_source, term, count, (node,)),)
        nodes: Nodes = (TileLoop(side.source, row, rows, inner),)
        return (Scope(nodes if stage.along is None else (Vectors(Lanes(stage.along, each), nodes),)),)

    def digit(number: int, below: int, count: int) -> Index:
        """A digit of the part's number among all, from `below` on, of so many. (All are powers of two, so what is a
        work item's own and what is the part's do not meet.)"""
        own = ITEM if below == 1 else index.div(ITEM, index.const(below))
        own = own if below * count >= items else index.mod(own, index.const(count))
        own = index.const(0) if below >= items else own
        return index.add(own, index.const(number * items // below % count))

    def part(number: int) -> Nodes:
        if stage.along is None:
            return opened(number, digit(number, terms, side.size), 1, digit(number, 1, terms), 1)
        if stage.along is stage.k_source:
            chunk = index.mul(digit(number, 1, chunks), each)
            return opened(number, digit(number, chunks, side.size), 1, chunk, each)
        chunk = digit(number, 1, across)
        if (more := side.size // each // across) > 1:
            chunk = index.add(chunk, index.mul(digit(number, across * pairs, more), across))
        term = digit(number, across, pairs)
        term = index.mul(term, terms_at_once) if terms_at_once > 1 else term
        return opened(number, index.mul(chunk, each), each, term, terms_at_once)

    at_once = 1 if stage.along is None else each * (terms_at_once if stage.along is side.source else 1)
    count = stage.elements // at_once
    if count < items:
        return (If(index.less(ITEM, index.const(count)), part(0)),)
    return tuple(n for i in range(count // items) for n in part(i))


def _up_to(x: Index, most: int) -> Index:
    """(What is beyond is read as the last there is.)"""
    return index.choose(index.less(x, index.const(most)), x, index.const(most))


def stores(t: Tiler, around: Around, store: Store) -> Nodes:
    """The stores of a thread's tile, of which a part, or all, may be beyond the end: vector by vector."""
    nest = t.kernel.nest
    ragged = [r for r in nest.bound if is_ragged(nest, r)]
    steps = {r: nest.lanes if r is nest.vectorized else 1 for r in ragged}
    if not ragged:
        return (store,)
    found = list[Node]()
    for at in product(*(range(0, nest.tile_of(r), steps[r]) for r in ragged)):
        inside = [index.less(index.add(around.origins[r], index.const(i)), index.size(r)) for r, i in zip(ragged, at)]
        one = replace(store, row=tuple(zip(ragged, at)))
        found.append(If(reduce(index.both, inside), (Holds((), (one,)),)))
    return tuple(found)


def tile(t: Tiler, r: UOp, origin: Index, around: Around, body: Body) -> Nodes:
    """A thread's tile, whole, wherever it begins: the group's other threads need this one."""
    nest, is_partial = t.kernel.nest, is_ragged(t.kernel.nest, r) and r is t.kernel.nest.vectorized
    masked = is_partial and r.src[0].arg % nest.lanes > 0
    how = (Ragged.SIZE, index.size(r)) if masked else (Ragged.NO, None)
    return (Scope((t.tile(r, index.mul(origin, nest.tile_of(r)), nest.tile_of(r), around, body, *how),)),)


def fresh_number(t: Tiler) -> int:
    """A number that no range of the kernel has, nor any beyond it."""
    reduced = (r for w in t.kernel.sig.reduces for r in w.src[1:])
    return 1 + max(r.arg.id for r in (*t.kernel.nest.loops, *reduced))
