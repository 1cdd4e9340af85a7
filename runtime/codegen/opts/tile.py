from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, size_max
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, at_least_one, without
from manygrad.tensor.uop.uop import UOp

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # tiles of a loop that is not vectorized
VECTORS = (1, 2, 3, 4, 6)  # vectors of a tile of the one that is


@dataclass(frozen=True, repr=False)
class Tile(RangeOpt):
    """The loop is split into tiles of `size` iterations that are held in registers at once. Any loop; a multiple of its
    lanes.

    before:  for m in 60: for k: c[m] += a[m, k] * b[k]
    after:   for m in 60 by 6: for k: c[m..m+5] += a[m..m+5, k] * b[k]          # tile(m, 6)
    """

    kind = "tile"
    shapes = True
    size: int

    @property
    def unique(self) -> tuple[str, int]:
        return (self.kind, self.axis)

    def wrong(self) -> str | None:
        return at_least_one(self, self.size)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, tile={**nest.tile, self.loop(self.axis, ranges): self.size})

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for r in nest.tile:
            if nest.tile[r] % nest.lanes_of(r):
                return f"the tile of range {r.arg.id} ({nest.tile[r]}) is no multiple of its {nest.lanes_of(r)} lanes"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        tiled = {r.arg.id: n for r, n in nest.tile.items() if r.arg.kind == "loop" and n != nest.lanes_of(r)}
        return [Tile(axis, n) for axis, n in sorted(tiled.items())]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        for r in search.sig.loops:
            at = search.nest.lanes_of(r)
            for n in VECTORS if at > 1 else ROWS:
                if (n - 1) * at < size_max(r):
                    yield (*without(search.opts, Tile, axis=r.arg.id), Tile(r.arg.id, n * at))
