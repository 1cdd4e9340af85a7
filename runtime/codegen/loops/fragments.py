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
from manygrad.runtime.codegen.loops.index import ITEM, Index
from manygrad.runtime.codegen.loops.lanes import Lanes
from manygrad.runtime.codegen.loops.local import FragmentStage, SharedLoop
from manygrad.runtime.codegen.loops.tiles import Around, Body, Tiler
from manygrad.runtime.codegen.loops.tree import (
    Barrier,
    BlockLoop,
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
    Store,
    TileLoop,
    Vectors,
)
from manygrad.runtime.codegen.opts.cache_shared import part_size
from manygrad.runtime.codegen.opts.warp_matrix import fragment_bytes, is_ragged, product_sides, warps_beside
from manygrad.runtime.codegen.target import FRAGMENT_CHUNK, FRAGMENT_TERMS, WARP_BESIDE, WARP_DOWN
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.args import RangeArg
from manygrad.tensor.uop.ops import Ops
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
    size = k.src[0].arg
    counter = t.counters.new()
    stages = [stage_of(t, k, u, around) for w in t.kernel.sig.reduces for u in w.src[0].src]
    first = tuple(fetch(t, s, index.const(0)) for s in stages)
    following = index.add(counter, index.const(FRAGMENT_TERMS))
    after = tuple(fetch(t, s, following) for s in stages)
    ahead = (If(index.less(following, index.const(size)), after),) if size > FRAGMENT_TERMS else ()
    rest = inner(replace(around, blocks={**around.blocks, k: (counter, FRAGMENT_TERMS)}))
    shared = tuple(share(t, s, counter) for s in stages)
    block = BlockLoop(k, counter, (*shared, Barrier(), *ahead, *rest, Barrier()))
    return (*first, For(counter, index.const(0), index.const(size), FRAGMENT_TERMS, (block,)))


def stage_of(t: Tiler, k: UOp, u: UOp, around: Around) -> FragmentStage:
    """Where the group shares a factor."""
    if (known := t.local.fragments.get(u)) is not None:
        return known
    nest = t.kernel.nest
    (loop,) = (r for r in nest.bound if r in ranges_of(u))
    own = {r: r.replace(arg=RangeArg(fresh_number(t) + i, r.arg.kind)) for i, r in enumerate((k, loop))}
    side = SharedLoop(loop, own[loop], around.groups[loop], part_size(nest, loop), FRAGMENT_TERMS)
    source = substitute(u, own)
    offset = t.local.share(fragment_bytes(nest, u, loop))
    along = _along(source, own[k], own[loop])
    stage = FragmentStage(u, source, k, own[k], side, nest.tile_of(loop), along, offset)
    t.local.fragments[u] = stage
    return stage


def _along(source: UOp, k: UOp, loop: UOp) -> UOp | None:
    """The range along which whole chunks lie side by side in the argument."""
    indices = [u.src[0].src[1] for u in source.toposort() if u.op is Ops.LOAD]
    for r in (k, loop):
        mine = [sym.linear(x) for x in indices if r in ranges_of(x)]
        rest = [c for steps, constant in mine for c in (constant, *(c for x, c in steps.items() if x is not r))]
        in_chunks = r.src[0].arg % FRAGMENT_CHUNK == 0 and k.src[0].arg % 2 == 0
        if in_chunks and all(steps.get(r) == 1 for steps, _ in mine) and all(c % FRAGMENT_CHUNK == 0 for c in rest):
            return r
    return None


def fetch(t: Tiler, stage: FragmentStage, block: Index) -> Node:
    """Reads what this work item will share of a block."""
    return Fetch(stage, _parts(t, stage, block, FetchPart))


def share(t: Tiler, stage: FragmentStage, block: Index) -> Node:
    return Share(stage, _parts(t, stage, block, SharePart))


def _parts(t: Tiler, stage: FragmentStage, block: Index, leaf: type[FetchPart | SharePart]) -> Nodes:
    """Neighbouring threads read what lies side by side in the argument. Of what lies along the rows a thread reads two
    iterations of the reduction, which are stored in pairs."""
    items, side, k_size = prod(t.kernel.nest.group), stage.side, stage.k.src[0].arg
    chunks, pairs, across = (
        FRAGMENT_TERMS // FRAGMENT_CHUNK,
        FRAGMENT_TERMS // 2,
        min(ACROSS, side.size // FRAGMENT_CHUNK),
    )

    def opened(number: int, row: Index, rows: int, term: Index, terms: int) -> Nodes:
        row, term = index.add(side.begin, row), index.add(block, term)
        inside = index.const(1)
        if leaf is FetchPart:
            row = _up_to(row, side.loop.src[0].arg - rows) if is_ragged(t.kernel.nest, side.loop) else row
            if k_size % FRAGMENT_TERMS:
                inside, term = index.less(term, index.const(k_size)), _up_to(term, k_size - terms)
        node = FetchPart(stage, number, inside) if leaf is FetchPart else SharePart(stage, number)
        inner = (TileLoop(stage.k_source, term, terms, (node,)),)
        nodes: Nodes = (TileLoop(side.source, row, rows, inner),)
        return (Scope(nodes if stage.along is None else (Vectors(Lanes(stage.along, FRAGMENT_CHUNK), nodes),)),)

    def digit(number: int, below: int, count: int) -> Index:
        """A digit of the part's number among all, from `below` on, of so many. (All are powers of two, so what is a
        work item's own and what is the part's do not meet.)"""
        own = ITEM if below == 1 else index.div(ITEM, index.const(below))
        own = own if below * count >= items else index.mod(own, index.const(count))
        own = index.const(0) if below >= items else own
        return index.add(own, index.const(number * items // below % count))

    def part(number: int) -> Nodes:
        if stage.along is None:
            return opened(number, digit(number, FRAGMENT_TERMS, side.size), 1, digit(number, 1, FRAGMENT_TERMS), 1)
        if stage.along is stage.k_source:
            chunk = index.mul(digit(number, 1, chunks), FRAGMENT_CHUNK)
            return opened(number, digit(number, chunks, side.size), 1, chunk, FRAGMENT_CHUNK)
        chunk = digit(number, 1, across)
        if (more := side.size // FRAGMENT_CHUNK // across) > 1:
            chunk = index.add(chunk, index.mul(digit(number, across * pairs, more), across))
        return opened(
            number, index.mul(chunk, FRAGMENT_CHUNK), FRAGMENT_CHUNK, index.mul(digit(number, across, pairs), 2), 2
        )

    count = (
        side.size
        * FRAGMENT_TERMS
        // (1 if stage.along is None else FRAGMENT_CHUNK if stage.along is stage.k_source else 2 * FRAGMENT_CHUNK)
    )
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
