from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, in_whole_tiles, is_fixed
from manygrad.runtime.codegen.kernel.dots import is_dot
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, without
from manygrad.runtime.codegen.opts.skip import Skip
from manygrad.runtime.codegen.opts.unroll import Unroll
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class Tensorize(RangeOpt):
    """`terms` neighbouring iterations of a sum of products in one lane (4 of bytes, 2 of bfloat16): one instruction
    multiplies and adds them.

    All REDUCEs over the range are such sums, in a form that the machine has (`dots.py`); a fixed size, or one that its
    tiles cut evenly; no `skip`; its tile a multiple.

    before:  for k in 64: s += int32(a[k]) * int32(b[k])
    after:   for k in 64 by 4: s = dot(a[k:k+4], b[k:k+4], s)           # tensorize(k, 4)
    """

    kind = "tensorize"
    shapes = True
    changes_sums = True
    terms: int

    @property
    def unique(self) -> tuple[str, int]:
        return (self.kind, self.axis)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        r = self.reduced(self.axis, ranges)
        tile = max(nest.tile_of(r), self.terms * nest.reduce_lanes.get(r, 1))
        return replace(nest, dots={**nest.dots, r: self.terms}, tile={**nest.tile, r: tile})

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for o in mine:
            r = next(r for r in nest.dots if r.arg.id == o.axis)
            if nest.tile[r] % (each := o.terms * nest.reduce_lanes.get(r, 1)):
                return (
                    f"the tile of range {o.axis} ({nest.tile[r]}) is no multiple of the {each} iterations in its lanes"
                )
            over = [u for u in sig.reduces if r in u.src[1:]]
            if not all(u.arg is Ops.ADD and is_dot(u.src[0]) for u in over):
                return (
                    f"{o}: the REDUCEs over it are no sums of products of bytes or bfloat16, "
                    "or of such as the machine does not multiply"
                )
            if any(o.terms != u.src[0].arg.terms for u in over):
                return f"{o}: an instruction adds up {over[0].src[0].arg.terms} products"
            if not is_fixed(r) and not in_whole_tiles(r, nest.tile[r]):
                return f"{o}: the size of the range is not fixed, and may leave a rest of its tiles"
            if any(r in ranges_of(v) for v in sig.reduces) or any(
                x in nest.dots for u in over for x in u.src[1:] if x is not r
            ):
                return f"{o}: a REDUCE inside of it depends on it, or another range of it is grouped"
            if any(x in nest.skipped for u in over for x in u.src[1:]) or any(r in pair for pair in nest.kept):
                return f"{o}: not where single iterations are skipped or kept"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Tensorize(axis, n) for axis, n in sorted((r.arg.id, n) for r, n in nest.dots.items())]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        for r in search.reduced:
            yield without(search.opts, Tensorize, Unroll, axis=r.arg.id)
            over = [u for u in search.sig.reduces if r in u.src[1:]]
            for n in {u.src[0].arg.terms for u in over if is_dot(u.src[0])}:
                yield (*without(search.opts, Tensorize, Unroll, Skip, axis=r.arg.id), Tensorize(r.arg.id, n))
