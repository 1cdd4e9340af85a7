"""Conditions that leave parts of a product out: padding, strides.

A tile may be made such that it knows its conditions: then iterations are skipped, and operands are read where they lie.
"""

from __future__ import annotations

import math
from functools import lru_cache

from manygrad.runtime.codegen import cost
from manygrad.runtime.codegen.analysis.describe import conjuncts, factor_masks, is_fixed, part_held, size_max
from manygrad.runtime.codegen.choose.facts import Facts, tile_of
from manygrad.runtime.codegen.opts import Opts, Skip, Unroll, Vectorize
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@lru_cache(256)
def conditions(main: UOp) -> tuple[UOp, ...]:
    """Under which the factors of a sum of products are read."""
    return (
        tuple(dict.fromkeys(c for m in factor_masks(main.src[0]) for c in conjuncts(m))) if main.arg is Ops.ADD else ()
    )


def short_inner_ranges(main: UOp, vectors: int) -> list[UOp]:
    """The inner ranges of a reduction that are short enough to be written out, with so many vectors of sums."""
    found, room = [], cost.WRITTEN_OUT // max(1, vectors)
    for r in reversed(main.src[1:]):
        if not is_fixed(r) or not 1 < r.src[0].arg <= min(room, cost.WRITTEN_OUT_ITERATIONS):
            break
        found.append(r)
        room //= r.src[0].arg
    return found


def knows_conditions(main: UOp, vectorized: UOp, tiles: dict[UOp, int], vectors: int) -> bool:
    """Whether the conditions are the same for a whole tile, or known at most of its positions, as all iterations of the
    reduction that they depend on are written out, or asked at a few."""
    out = short_inner_ranges(main, math.prod(tiles.values()) * vectors)
    for c in conditions(main):
        inside = [r for r in ranges_of(c) if tiles.get(r, 1) > 1]
        if vectorized in ranges_of(c) or not all(map(is_fixed, inside)):
            return False
        asked = any(r in ranges_of(c) and r not in out for r in main.src[1:])
        if asked and math.prod(tiles[r] for r in inside) > cost.ASKED_POSITIONS:
            return False
    return True


def part_done(main: UOp, vectorized: UOp, tiles: dict[UOp, int], vectors: int) -> tuple[float, float]:
    """The computed part of a tile, and of the whole product; or 1 and what it costs to pack what is read under
    conditions."""
    found = conditions(main)
    if not found:
        return 1.0, 1.0
    if not knows_conditions(main, vectorized, tiles, vectors):
        return 1.0, cost.PACK_MASKED_TIME
    inside = math.prod(part_held(c) for c in found if any(tiles.get(r, 1) > 1 for r in ranges_of(c)))
    partly = any(1 < t < size_max(r) for c in found for r, t in tiles.items() if r in ranges_of(c))
    asked = cost.ASKED_TIME if inside == 1.0 or partly else 1.0  # not all are known beforehand
    return inside, math.prod(part_held(c) for c in found) * asked


def unroll_reduction(facts: Facts, opts: Opts, main: UOp, lanes_along: frozenset[UOp], known: bool) -> Opts:
    """Short inner ranges of the main reduction (the taps of a filter) are written out, so that conditions and addresses
    are known. Where a tile knows its conditions (`known`), few more than those that they depend on: each is code for
    every position. Not what is accumulated in lanes (`lanes_along`), or is written out already."""
    area = math.prod(tile_of(opts, r) for r in facts.sig.loops if r in ranges_of(main))
    if chosen(opts, Vectorize) is not None:
        area //= facts.lanes
    tiled = [c for c in conditions(main) if any(tile_of(opts, r) > 1 for r in ranges_of(c))] if known else []
    phased = [c for c in conditions(main) if any(u.op is Ops.MOD for u in c.toposort())]
    for r in short_inner_ranges(main, area):
        area *= r.src[0].arg
        decides = any(r in ranges_of(c) for c in tiled + phased)
        if r in lanes_along or chosen(opts, Unroll, r.arg.id) is not None:
            break
        if tiled and area > cost.KNOWN_BODY and not decides:
            break
        opts = (*opts, Unroll(r.arg.id, r.src[0].arg))
    return opts


def skip_masked(facts: Facts, opts: Opts, main: UOp, known: bool) -> Opts:
    """Iterations that a condition leaves out of sums are skipped: where the tiles know it, or where a quarter of all
    cases are left out."""
    if any(u.arg is not Ops.ADD for u in facts.sig.reduces):
        return opts
    together: dict[frozenset[UOp], UOp] = {}
    for c in conditions(main):
        other = together.get(ranges_of(c))
        together[ranges_of(c)] = c if other is None else other.alu(Ops.AND, c)
    if together and (known or any(part_held(c) <= cost.LEFT_OUT for c in together.values())):
        return (*opts, Skip(main.src[-1].arg.id))
    return opts
