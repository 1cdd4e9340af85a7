"""Versions of a reduction by where its tile lies: at the edge of an image other taps of a filter count than in its
midst.

before:  LOOP x 56 (8 at a time): LOOP c: FMA where 0 <= x + k - 1 < 56 after:   LOOP x 56 (8 at a time): IF x < 8: {
LOOP c: FMAs of the left edge } ELSE IF x < 48: { LOOP c: all FMAs } ELSE: { .. }
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from manygrad.runtime.codegen.affine import Affine
from manygrad.runtime.codegen.cost import EDGE_VERSIONS
from manygrad.runtime.codegen.describe import conjuncts
from manygrad.runtime.codegen.emit import INDEX
from manygrad.runtime.codegen.keeper import Keeper
from manygrad.runtime.codegen.lowered import Low
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


class Asked(NamedTuple):
    """A condition at a tile position which is known once it is known where the tile of one loop begins."""

    condition: UOp
    position: dict[UOp, int]
    form: Affine

    def holds(self, origin: int) -> bool:
        ((_, c),) = self.form.terms
        value = c * origin + self.form.constant
        return value < 0 if self.condition.op is Ops.CMPLT else (value == 0) == (self.condition.op is Ops.CMPEQ)


class Placer(Keeper):
    def by_place(self, masks: list[UOp], body: Callable[[], None]) -> None:
        """`body` for the tile that is open, in versions that know which of the `masks` hold at its positions."""
        for r in reversed(self.nest.loops):
            if self.tile.get(r, 1) > 1 and r.src[0].op is Ops.CONST and (asked := self.asked(masks, r)):
                places = [
                    (k, list(v))
                    for k, v in itertools.groupby(self.places(r), lambda x: tuple(a.holds(x) for a in asked))
                ]
                if len(places) <= EDGE_VERSIONS:
                    self.version(r, asked, [(v[-1], k) for k, v in places], body)
                    return
        body()

    def asked(self, masks: list[UOp], r: UOp) -> list[Asked]:
        """What is asked at run time of the tile of `r` alone."""
        found = []
        for c in dict.fromkeys(
            c for m in masks for c in conjuncts(m) if c.op in GroupOp.COMPARE and c.src[0].dtype is INDEX
        ):
            out = {
                x: x.src[0].arg
                for x in ranges_of(c)
                if x.arg[1] == "reduce" and self.nest.tile.get(x) == self.fixed_size(x)
            }
            if r not in ranges_of(c) or any(x.arg[1] == "reduce" and x not in out for x in ranges_of(c)):
                continue
            for at in itertools.product(*(range(n) for n in out.values())):
                for p in self.positions(ranges_of(c) - out.keys()):
                    position = {**p, **dict(zip(out, at))}
                    form = self.analysis.compare(c, position)
                    if isinstance(form, Affine) and [x.expr for x, _ in form.terms] == [r]:
                        found.append(Asked(c, position, form))
        return found

    def places(self, r: UOp) -> list[int]:
        """Where a tile of `r` may begin, if it is one like the open one."""
        origin, size, tile = self.origin[r], r.src[0].arg, self.tile[r]
        if origin.op in (Low.HERE, Low.CONST):
            return [origin.arg]
        return list(range(0, size - tile + 1, tile))

    def version(
        self, r: UOp, asked: list[Asked], places: list[tuple[int, tuple[bool, ...]]], body: Callable[[], None]
    ) -> None:
        """`body` for tiles that begin at up to the last of each group of `places`, each with what holds there."""
        (last, holds), *others = places
        around = self.reads_from

        def known() -> None:
            self.reads_from = len(self.blocks) - 1
            for a, true in zip(asked, holds):
                self.blocks[-1].values[self.key(a.condition, a.position)] = self.const(true, dtypes.bool)
            body()
            self.reads_from = around

        if not others:
            self.open()
            known()
            self.close()
            return
        here = self.emit(Ops.CMPLT, dtypes.bool, (self.origin[r], self.const(last + 1)))
        self.branch(here, known, lambda: self.version(r, asked, others, body))
