"""How reductions are accumulated.

Decided by the pattern of the accesses alone, never by the size of a loop: along a loop if one runs contiguously through
the operands, else in lanes along the reduction if that does. (Sums of exponentials also by the length of their rows.)
So a batch of any size, cut over any number of threads or devices, gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import in_whole_tiles, is_fixed, size_max, volume
from manygrad.runtime.codegen.choose.facts import Facts, reordered
from manygrad.runtime.codegen.choose.operands import packs_across, packs_along_own_loop
from manygrad.runtime.codegen.kernel.dots import is_dot
from manygrad.runtime.codegen.kernel.online import online_pairs
from manygrad.runtime.codegen.opts import Online, Opts, RFactor, Tensorize, Tile, Unroll, Vectorize
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

Split = Mapping[UOp, UOp]  # REDUCE -> the reduce range that is accumulated in lanes


def split_of(facts: Facts) -> Split:
    """The reduce ranges that are accumulated in lanes: those that run contiguously through all that is read.

    A product of two operands that are both contiguous along the reduction is split even where a loop is contiguous,
    too, if the range fills a vector and no operand can be packed across it (the gradient of few filters' weights).
    """
    found: dict[UOp, UOp] = {}
    reduces = facts.sig.reduces
    for u in reduces:
        loads = facts.loads_of[u]
        inner = {r for v in reduces if v is not u and v in u.src[0].toposort() for r in v.src[1:]}
        taken = inner | {r for v in reduces if v is not u for r in ranges_of(v)}
        along = any(facts.contiguous(loads, r) for r in facts.sig.loops if r in ranges_of(u))
        least = facts.lanes if along else cost.LEAST_LANES_TERMS
        for r in reversed(u.src[1:]):
            if r in taken or not loads or not facts.contiguous(loads, r) or size_max(r) < least:
                continue
            product = len(loads) > 1 and all(facts.stride(v.src[0], r) == 1 for v in loads)
            if product and not (packs_along_own_loop(facts, u) if along else packs_across(facts, u)):
                found[u] = r
                break
            if not product and not along:
                found[u] = r
                break
    return found


def accumulate_in_lanes(facts: Facts, opts: Opts, split: Split) -> Opts:
    """A reduction that runs contiguously through all it reads, where no loop does, is accumulated in the lanes of a
    vector."""
    return (*opts, *(RFactor(r.arg.id, facts.lanes) for r in dict.fromkeys(split.values())))


def use_dot_instructions(facts: Facts, opts: Opts, vectorized: UOp | None, split: Split) -> Opts:
    """Products of bytes are added up four at a time, of bfloat16 two, where the machine has an instruction for it:
    along the range that is accumulated in lanes, or the innermost one, if that leaves no rest where only a variable
    says how long it is. Sums over one range share it, or, where one of them is of something else, none takes it; nor
    does one over a range that another sum inside of it depends on."""
    found: dict[Tensorize, None] = {}
    for u in facts.sig.reduces:
        product = len(facts.loads_of[u]) > 1 and (vectorized is None or vectorized in ranges_of(u))
        if is_dot(u.src[0]) and (u in split or product) and not u.src[0].arg.in_parts:
            r, terms = split.get(u, u.src[-1]), u.src[0].arg.terms
            shared = all(is_dot(v.src[0]) and v.src[0].arg.terms == terms for v in facts.sig.reduces if r in v.src[1:])
            alone = not any(r in ranges_of(v) for v in facts.sig.reduces)
            if shared and alone and (is_fixed(r) or in_whole_tiles(r, terms * (facts.lanes if u in split else 1))):
                found[Tensorize(r.arg.id, terms)] = None
    return (*opts, *found)


def sum_exponentials_online(facts: Facts, opts: Opts, vectorized: UOp | None, split: Split) -> Opts:
    """The sum of exponentials below a maximum, where nothing else needs these (logsumexp), goes over long rows once
    instead of twice."""
    for pair in online_pairs(facts.sig) if vectorized is None else []:
        r = pair.total.src[1]
        long = size_max(r) * cost.ELEMENT_BYTES >= cost.LONG_ROW_BYTES
        if pair.total in split and long and frozenset(facts.sig.loops) <= ranges_of(pair.total):
            online = Online(r.arg.id, pair.maximum.src[1].arg.id)
            return (*opts, online, Unroll(r.arg.id, cost.ONLINE_VECTORS * facts.lanes))
    return opts


def blocks_of_bytes(facts: Facts) -> UOp | None:
    """Where a sum of bytes stands in a sum: the loop in whose vectors the bytes of its iterations follow each other
    (the rows of packed weights)."""
    main = facts.main
    if main is None or not is_dot(main.src[0]) or not any(main in u.src[0].toposort() for u in facts.sig.reduces):
        return None
    terms = main.src[0].arg.terms
    for r in reversed(facts.sig.loops):
        strides = {facts.stride(v.src[0], r) for v in facts.loads_of[main] if r in ranges_of(v)}
        if strides == {terms} and size_max(main.src[-1]) == terms and size_max(r) % facts.lanes == 0:
            return r
    return None


def multiply_blocks_of_bytes(facts: Facts, opts: Opts, vectorized: UOp) -> Opts:
    """A product of packed weights and of inputs in bytes, in blocks that have a scale each: the weights' rows, side by
    side in memory, in vectors; a block is written out, four bytes an instruction, or as much of it as stays in
    registers for all rows. As many rows of inputs in a tile as there are registers for, and all of them inside of the
    weights' rows, so that these come from memory once."""
    sums = [u for u in facts.sig.reduces if is_dot(u.src[0])]
    width = min(size_max(vectorized), cost.BLOCK_COLUMNS)
    opts = (*opts, Vectorize(vectorized.arg.id, facts.lanes), Tile(vectorized.arg.id, width))
    weights = [v for u in sums for v in facts.loads_of[u] if vectorized in ranges_of(v)]
    columns = [r for r in facts.sig.loops if any(r in ranges_of(v) for v in weights)]
    rows = [r for r in facts.sig.loops if r not in columns]
    for u in sums:
        *outer, last = u.src[1:]
        whole = outer[:-1] if rows and unpacked_in_turn(facts, u, vectorized, width // facts.lanes) else outer
        opts = (*opts, Tensorize(last.arg.id, u.src[0].arg.terms), *(Unroll(r.arg.id, size_max(r)) for r in whole))
    if rows:
        inside = [vectorized] if width == size_max(vectorized) else []
        most = cost.block_rows(facts.machine, width // facts.lanes, any(u.src[0].arg.words for u in sums))
        opts = reordered(facts, opts, [*(r for r in columns if r not in inside), *rows, *inside])
        opts = (*opts, Tile(rows[-1].arg.id, min(size_max(rows[-1]), most)))
    return opts


def unpacked_in_turn(facts: Facts, u: UOp, vectorized: UOp, vectors: int) -> bool:
    """Whether a block's sum is better a loop, for several rows to share what is unpacked: written out, it overflows the
    registers, and each iteration has weights of its own (else they would be shifted by what is only known when it
    runs). Where several instructions multiply; of one, with 16 registers, nothing was measured."""
    *outer, _ = u.src[1:]
    weights = [v for v in facts.loads_of[u] if vectorized in ranges_of(v)]
    unpacked = vectors * volume(frozenset(outer))
    own = bool(outer) and all(outer[-1] in ranges_of(v) for v in weights)
    return u.src[0].arg.words and own and cost.block_overflows(facts.machine, unpacked)
