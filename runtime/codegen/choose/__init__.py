"""Which Opts a kernel is run with, from its shapes and strides, without measuring.

`decide` is the whole of it: named decisions, one after the other, each a function of the facts about the kernel and of
the list so far, which gives the list with what it decides. What they weigh is in `codegen/cost.py`.

    facts       strides, loads, the main reduction; the list so far
    reductions  what is accumulated in lanes            vectors     which loop is vectorized
    conditions  what masks leave out                    tiles       what stands in registers at once
    operands    what can be packed                      packing     which operand stays in a cache
    matrices    what a matrix unit multiplies
    blocks      how much runs before the next           memory      what is kept, prefetched, streamed
    threads     what is cut over the threads              groups      all of it, on a GPU
    ahead       what a group copies while it computes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from manygrad.runtime.codegen.analysis.describe import signature
from manygrad.runtime.codegen.choose.ahead import copy_ahead
from manygrad.runtime.codegen.choose.blocks import sum_rows_in_turn
from manygrad.runtime.codegen.choose.conditions import skip_masked, unroll_reduction
from manygrad.runtime.codegen.choose.facts import Facts
from manygrad.runtime.codegen.choose.groups import bind_groups
from manygrad.runtime.codegen.choose.matrices import (
    fits_matrix_unit,
    multiply_in_parts,
    single_row,
    use_matrix_unit,
    vectorized_for_matrices,
)
from manygrad.runtime.codegen.choose.memory import (
    limit_rows_of_tile,
    prefetch_rows,
    read_ahead,
    reuse_row_values,
    row_passes,
    stream_results,
)
from manygrad.runtime.codegen.choose.operands import is_thin
from manygrad.runtime.codegen.choose.packing import (
    keep_columns_in_cache,
    keep_rows_in_cache,
    pack_strided,
    packing,
    product_knows_conditions,
    product_of,
    read_columns_in_place,
    split_columns_over_threads,
    turn_columns,
    unroll_product,
)
from manygrad.runtime.codegen.choose.reductions import (
    Split,
    accumulate_in_lanes,
    blocks_of_bytes,
    multiply_blocks_of_bytes,
    split_of,
    sum_exponentials_online,
    use_dot_instructions,
)
from manygrad.runtime.codegen.choose.threads import parallelize, run_in_order
from manygrad.runtime.codegen.choose.tiles import (
    rows_of,
    tile_elementwise,
    tile_outputs_of_dot_product,
    tile_results_side_by_side,
    tile_rows_and_vectors,
    write_out_blocks,
)
from manygrad.runtime.codegen.choose.vectors import cheapest_loop, vectorize_loop
from manygrad.runtime.codegen.opts import Matrix, Online, Opts, Parallel
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

# in the order in which they are made; of a product exactly one of those that pack
DECISIONS: tuple[Callable[..., Opts], ...] = (
    bind_groups,
    copy_ahead,
    multiply_in_parts,
    run_in_order,
    multiply_blocks_of_bytes,
    accumulate_in_lanes,
    vectorize_loop,
    use_dot_instructions,
    sum_exponentials_online,
    tile_outputs_of_dot_product,
    write_out_blocks,
    tile_elementwise,
    tile_rows_and_vectors,
    pack_strided,
    use_matrix_unit,
    turn_columns,
    read_columns_in_place,
    split_columns_over_threads,
    keep_rows_in_cache,
    keep_columns_in_cache,
    unroll_product,
    sum_rows_in_turn,
    unroll_reduction,
    skip_masked,
    tile_results_side_by_side,
    parallelize,
    reuse_row_values,
    prefetch_rows,
    limit_rows_of_tile,
    read_ahead,
    stream_results,
)
P = ParamSpec("P")


@dataclass
class Choice:
    """The list so far, and the list after each decision."""

    facts: Facts
    opts: Opts = ()
    steps: list[tuple[str, Opts]] = field(default_factory=list)

    def take(self, decision: Callable[Concatenate[Facts, Opts, P], Opts], *args: P.args, **named: P.kwargs) -> None:
        self.opts = decision(self.facts, self.opts, *args, **named)
        self.steps.append((decision.__name__, self.opts))

    def explained(self) -> str:
        """A line for each decision that changed the list: its name, and what it gave, in place of what."""
        lines, before = [], Opts()
        for name, after in self.steps:
            given = " ".join(repr(o) for o in after if o not in before)
            gone = " ".join(repr(o) for o in before if o not in after)
            if given or gone:
                lines.append(f"{name:30}{given or 'nothing'}{f' in place of {gone}' if gone else ''}")
            before = after
        return "\n".join(lines)


def choose(ast: UOp, machine: Machine, written: Mapping[UOp, UOp] | None = None) -> Opts:
    """The Opts of `ast` on `machine`; `written`: see `Facts`."""
    return decide(Facts(ast, machine, written or {})).opts


def plain(ast: UOp) -> Opts:
    """No optimisation: scalar loops (NOOPT=1)."""
    sig = signature(ast)
    return () if any(s.arg is not None for s in sig.stores) or not sig.loops else (Parallel(1),)


def decide(facts: Facts, in_parts: Facts | None = None) -> Choice:
    """All decisions about a kernel, in order; `in_parts`: of the kernel with its product in parts, which is taken where
    a matrix unit multiplies it then."""
    if in_parts is not None:
        choice = Choice(in_parts)
        choice.take(multiply_in_parts)
        if chosen(_decide(choice).opts, Matrix) is not None:
            return choice
    return _decide(Choice(facts))


def _decide(choice: Choice) -> Choice:
    facts = choice.facts
    if facts.machine.warp_items:
        choice.take(bind_groups)
        choice.take(copy_ahead)
        return choice
    if any(s.arg is not None for s in facts.sig.stores):
        choice.take(run_in_order)
        return choice
    if (found := blocks_of_bytes(facts)) is not None:
        choice.take(multiply_blocks_of_bytes, found)
        choice.take(parallelize)
        choice.take(read_ahead)
        return choice
    split = split_of(facts)
    choice.take(accumulate_in_lanes, split)
    vectorized = vectorized_for_matrices(facts, split) or cheapest_loop(facts, choice.opts, split)
    choice.take(vectorize_loop, vectorized)
    choice.take(use_dot_instructions, vectorized, split)
    choice.take(sum_exponentials_online, vectorized, split)
    if chosen(choice.opts, Online) is None:
        decide_tiles(choice, vectorized, split)
    if vectorized is not None:
        choice.take(tile_results_side_by_side, vectorized)
    choice.take(parallelize)
    choice.take(reuse_row_values)
    passes = row_passes(facts, choice.opts)
    choice.take(prefetch_rows, passes)
    choice.take(limit_rows_of_tile, passes)
    choice.take(read_ahead)
    choice.take(stream_results)
    return choice


def decide_tiles(choice: Choice, vectorized: UOp | None, split: Split) -> None:
    """Decides what stands in registers and in caches: by whether the main reduction runs along the vectorized loop, in
    lanes of its own, or beside it."""
    facts = choice.facts
    main, reduces = facts.main, facts.sig.reduces
    if main is None or not ranges_of(main) & frozenset(facts.sig.loops):
        if vectorized is not None:
            choice.take(tile_elementwise, vectorized)
        return
    sharing = [u for u in reduces if u.src[1:] == main.src[1:]]
    if any(v not in sharing and v in main.src[0].toposort() for v in reduces):
        return  # one REDUCE inside of another
    accumulators = max(1, facts.machine.accumulators // len(sharing))
    known = False
    if vectorized is None or vectorized not in ranges_of(main):
        if main in split:
            choice.take(tile_outputs_of_dot_product, main, accumulators)
            choice.take(write_out_blocks, split, accumulators)
        if vectorized is not None:
            choice.take(tile_elementwise, vectorized)
    elif is_thin(facts, main, vectorized):
        choice.take(tile_elementwise, vectorized)
    else:
        known = decide_product(choice, main, vectorized, accumulators, len(sharing))
    choice.take(unroll_reduction, main, frozenset(split.values()), known)
    choice.take(skip_masked, main, known)


def decide_product(choice: Choice, main: UOp, vectorized: UOp, accumulators: int, sharing: int) -> bool:
    """A sum along a vectorized loop: its tile, and which operand stays in a cache. Whether its tile knows the
    conditions under which the operands are read."""
    facts = choice.facts
    choice.take(tile_rows_and_vectors, main, vectorized, accumulators)
    rows = rows_of(facts, choice.opts, main, vectorized)
    product = (
        product_of(facts, choice.opts, main, vectorized, rows)
        if rows
        else single_row(facts, choice.opts, main, vectorized)
    )
    if product is not None and fits_matrix_unit(facts, choice.opts, product):
        choice.take(use_matrix_unit, product)
        choice.take(keep_columns_in_cache, product)
        return False
    if product is None or not rows:
        choice.take(pack_strided, main, vectorized)
        if not rows:
            choice.take(sum_rows_in_turn, main, vectorized, sharing)
        return False
    decision = packing(facts, choice.opts, product)
    known = decision in (keep_rows_in_cache, keep_columns_in_cache) and product_knows_conditions(
        facts, choice.opts, product
    )
    choice.take(decision, product)
    choice.take(unroll_product, product)
    return known
