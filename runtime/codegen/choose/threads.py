"""Which loops are cut over the threads."""

from __future__ import annotations

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import size_max
from manygrad.runtime.codegen.choose.facts import Facts, order_of, tiles_along
from manygrad.runtime.codegen.opts import Block, CacheRead, Opts, Parallel, ReduceBlock, Reorder, Tile, Vectorize
from manygrad.runtime.codegen.opts.in_order import injective
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.tensor.uop.ranges import ranges_of


def parallelize(facts: Facts, opts: Opts) -> Opts:
    """As few of the outermost loops as give enough pieces for any number of threads; with a block all loops, or those
    up to the blocked one where the others run inside of a block of the reduction."""
    order = order_of(facts, opts)
    if (block := chosen(opts, Block)) is not None:
        blocked = next(i for i, r in enumerate(order) if r.arg.id == block.axis)
        return (*opts, Parallel(len(order) if chosen(opts, ReduceBlock) is None else blocked + 1))
    enough = cost.PIECES if chosen(opts, CacheRead) is None else cost.PACKED_PIECES
    repeated = {r for u in facts.sig.reduces for r in facts.sig.loops if r not in ranges_of(u)}
    pieces, n = 1, 0
    for r in order:
        # (of a loop that a reduction does not depend on, every piece would make it again)
        if pieces >= enough or (pieces > 1 and r in repeated):
            break
        pieces *= tiles_along(opts, r, size_max(r))
        n += 1
    return (*opts, Parallel(n)) if n else opts


def run_in_order(facts: Facts, opts: Opts) -> Opts:
    """A kernel whose stores may meet at one address (scatters) runs them in order on one thread; a loop whose
    iterations provably do not meet is vectorized and cut over the threads.

    If what that loop stores does not lie side by side (positions of each element of a row): cut by rows. (Not by
    columns: stripes of them are read across memory, which takes longer than one thread needs.)
    """
    sig, lanes = facts.sig, facts.lanes
    sized_by_loops = {x for r in sig.loops for x in ranges_of(r.src[0])}
    apart = [r for r in sig.loops if r not in sized_by_loops and all(injective(s.src[0], r) for s in sig.stores)]
    along = [r for r in apart if facts.stored_along(r)]
    if along:
        r = along[-1]
        opts = (*opts, Vectorize(r.arg.id, lanes))
        fits = (n for n in cost.IN_ORDER_VECTORS if size_max(r) // lanes >= 2 * n and size_max(r) % (n * lanes) == 0)
        if vectors := next(fits, 0):
            opts = (*opts, Tile(r.arg.id, vectors * lanes))
    elif apart and apart[0] is sig.loops[0]:
        r = apart[0]
    else:
        return ()
    moved = (Reorder(r.arg.id, sig.loops[0].arg.id),) if r is not sig.loops[0] else ()
    return (*opts, *moved, Parallel(1))
