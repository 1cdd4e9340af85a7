"""Decisions about what conditions leave out of a product: padding, strides.

A tile may be made such that it knows its conditions: then iterations are skipped, and operands are read where they lie.
"""

from __future__ import annotations

import math
from functools import lru_cache

from manygrad.runtime.codegen.describe import conjuncts, factor_masks, part_held, size_max
from manygrad.runtime.codegen.facts import Facts
from manygrad.runtime.codegen.opts import Skip
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@lru_cache(256)
def conditions(main: UOp) -> tuple[UOp, ...]:
    """Under which the factors of a sum of products are read."""
    return (
        tuple(dict.fromkeys(c for m in factor_masks(main.src[0]) for c in conjuncts(m))) if main.arg is Ops.ADD else ()
    )


class Masks(Facts):
    skipping = False  # whether tiles were chosen for what conditions leave out

    def settled(self, main: UOp, lane: UOp, tiles: dict[UOp, int], g: int) -> bool:
        """Whether the conditions are the same for a whole tile, or known at most of its positions, as all iterations of
        the reduction that they depend on are written out, or asked at a few."""
        out = self.written_out(main, math.prod(tiles.values()) * g)
        for c in conditions(main):
            inside = [r for r in ranges_of(c) if tiles.get(r, 1) > 1]
            if lane in ranges_of(c) or any(r.src[0].op is not Ops.CONST for r in inside):
                return False
            asked = (
                math.prod(tiles[r] for r in inside)
                if any(r in ranges_of(c) and r not in out for r in main.src[1:])
                else 1
            )
            if asked > 4:
                return False
        return True

    def part_done(self, main: UOp, lane: UOp, tiles: dict[UOp, int], g: int) -> tuple[float, float]:
        """What part of a tile is computed, and of the whole product; or 1 and what it costs to pack what is read under
        conditions."""
        found = conditions(main)
        if not found:
            return 1.0, 1.0
        if not self.settled(main, lane, tiles, g):
            return 1.0, 1.12
        inside = math.prod(part_held(c) for c in found if any(tiles.get(r, 1) > 1 for r in ranges_of(c)))
        partly = any(1 < t < size_max(r) for c in found for r, t in tiles.items() if r in ranges_of(c))
        asked = 1.1 if inside == 1.0 or partly else 1.0  # not all are known beforehand
        return inside, math.prod(part_held(c) for c in found) * asked

    def written_out(self, main: UOp, vectors: int) -> list[UOp]:
        """The inner ranges of a reduction that are short enough for it, with so many vectors of sums."""
        found, room = [], 256 // max(1, vectors)
        for r in reversed(main.src[1:]):
            if r.src[0].op is not Ops.CONST or not 1 < r.src[0].arg <= min(room, 16):
                break
            found.append(r)
            room //= r.src[0].arg
        return found

    def skip(self, main: UOp) -> None:
        """Iterations that a condition leaves out: where the rows' tiles are made for it, or where a quarter of all
        cases are left out."""
        if any(u.arg is not Ops.ADD for u in self.sig.reduces):
            return
        together: dict[frozenset[UOp], UOp] = {}
        for c in conditions(main):
            other = together.get(ranges_of(c))
            together[ranges_of(c)] = c if other is None else other.alu(Ops.AND, c)
        if together and (self.skipping or any(part_held(c) <= 0.75 for c in together.values())):
            self.opts.append(Skip(main.src[-1].arg[0]))
