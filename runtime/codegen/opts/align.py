from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.affine import TileAnalysis
from manygrad.runtime.codegen.analysis.describe import Signature, is_fixed
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Align(RangeOpt):
    """The loop's vectors begin where what they store is aligned, in each row elsewhere
    (`runtime/codegen/loops/tiles.py`).

    It is the vectorized loop, of a fixed size; the only STORE, in a kernel without REDUCEs or blocks, contiguous and
    known but for a multiple of the lanes.

    before:  for y: for x by 16: out[y*1001 + x ..] = ..        (most vectors in two cache lines)
    after:   for y: the first elements up to a line; for x by 16 from there on: ..; the rest    # align(x)
    """

    kind = "align"

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, aligned=self.loop(self.axis, ranges))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        r = nest.aligned
        if r is None:
            return None
        store = sig.stores[0]
        one = len(sig.stores) == 1 and not sig.reduces and store.arg is None and len(store.src[0].src) < 3
        if r is not nest.vectorized or not one:
            return (
                f"{cls(r.arg.id)}: not the vectorized loop of a kernel with one STORE, no condition on it and no REDUCE"
            )
        if not is_fixed(r) or r.src[0].arg < nest.tile[r] + nest.lanes or not _known_place(nest, store):
            return (
                f"{cls(r.arg.id)}: the loop is short, or where a vector is stored is not known "
                "but for a multiple of its length"
            )
        return f"{cls(r.arg.id)}: not with a block" if nest.block else None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Align(nest.aligned.arg.id)] if nest.aligned is not None else []

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        return search.toggled([Align(r.arg.id) for r in search.sig.loops])


def _known_place(nest: LoopNest, store: UOp) -> bool:
    """Whether the place of each vector stored is known but for a multiple of its length."""
    analysis = TileAnalysis({r: t for r, t in nest.tile.items() if is_fixed(r)}, nest.vectorized, nest.lanes)
    a = analysis.affine(store.src[0].src[1], {})
    return a is not None and a.stride == 1 and analysis.alignment(a.terms) % nest.lanes == 0
