from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, at_least_one, without
from manygrad.runtime.codegen.opts.parallel import Parallel
from manygrad.tensor.uop.uop import UOp

SIZES = (4, 8, 16, 32, 64)


@dataclass(frozen=True, repr=False)
class Block(RangeOpt):
    """The loop is split once more: one iteration of the parallel loop runs `tiles` of its tiles, inside of all other
    loops, so that what they read stays in a cache. All loops are in the parallel loop, but for those that
    `reduce_block` runs inside.

    before:  parallel for (n by 64, m by 6): ..
    after:   parallel for (n by 64, m by 6*8): for 8 tiles of m: ..         # block(m, 8)
    """

    kind = "block"
    needs_vectors = True
    tiles: int

    @property
    def unique(self) -> str:
        return self.kind

    def wrong(self) -> str | None:
        return at_least_one(self, self.tiles)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, block={self.loop(self.axis, ranges): self.tiles})

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        if not nest.block:
            return None
        inside = nest.reduce_block is not None
        wanted = 1 + nest.loops.index(next(iter(nest.block))) if inside else len(nest.loops)
        if nest.parallel != wanted:
            return f"a block needs {'all loops up to its own' if inside else 'all loops'} in the parallel loop"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [Block(r.arg.id, n) for r, n in nest.block.items()]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        """With a block all loops are cut over the threads."""
        yield tuple(o for o in search.opts if not (isinstance(o, Block) or o.needs_block))
        everything = Parallel(len(search.sig.loops))
        for r in search.sig.loops:
            for n in SIZES:
                yield (*without(search.opts, Block, Parallel), Block(r.arg.id, n), everything)
