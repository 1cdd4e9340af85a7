from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.opts.cache_read import staged_values
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt, without
from manygrad.runtime.codegen.target import CHUNK_BYTES
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

RINGS = (4, 3, 2)  # blocks in shared memory


@dataclass(frozen=True, repr=False)
class CopyAhead(RangeOpt):
    """What a group shares of a block of the reduction is copied by asynchronous instructions while the group computes
    with the blocks before it: shared memory is a ring of so many blocks, and a barrier is met once a block.

    With `cache_shared` or `warp_matrix` along the range, which has as many blocks at least. All that is shared is an
    argument's elements as they are, in runs of 16 bytes where they lie so (else single elements of 4 bytes or more); of
    a warp's product one of the factors is, the other one goes through registers.

    before:  for 32 of k: { shared = a[32 of k]; barrier; for k in 32: accumulate; barrier }
    after:   start 2 copies; for 32 of k: { wait for the first one; barrier; start the copy of what comes 64 later;
             for k in 32: accumulate }                                                       # copy_ahead(k, 3)
    """

    kind = "copy_ahead"
    blocks: int

    @property
    def unique(self) -> str:
        return self.kind

    def wrong(self) -> str | None:
        return None if self.blocks in RINGS else f"{self}: a ring has 2 to {max(RINGS)} blocks"

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, ring={self.reduced(self.axis, ranges): self.blocks})

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        for k, blocks in nest.ring.items():
            at = f"copy_ahead({k.arg.id})"
            iterations = block_of_shared(nest, k)
            if iterations is None:
                return f"{at}: a group shares nothing along it"
            if k.src[0].arg <= iterations * (blocks - 1):
                return f"{at}: the reduction has fewer blocks than {blocks}"
            if k is nest.warp_matrix:
                if not any(copied_chunks(nest, f, k) for f in sig.reduces[0].src[0].src):
                    return f"{at}: neither factor is an argument's, in runs of 16 bytes"
            else:
                values = [u for r, slot, _ in nest.shared for u, _ in staged_values(sig, slot)]
                if any(copied_width(nest, u, k) is None for u in values):
                    return f"{at}: what is shared is converted, or its elements are of less than 4 bytes"
        return None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [CopyAhead(k.arg.id, n) for k, n in nest.ring.items()]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        others = without(search.opts, CopyAhead)
        yield others
        for r in search.reduced if search.nest.bound else ():
            for n in RINGS:
                yield (*others, CopyAhead(r.arg.id, n))


def block_of_shared(nest: LoopNest, k: UOp) -> int | None:
    """Iterations of a reduction that a group shares at a time; None: it shares nothing along it."""
    if k is nest.warp_matrix:
        return nest.tile_of(k)
    return next((n for r, _, n in nest.shared if r is k), None)


def runs_along(value: UOp, k: UOp, loop: UOp, run: int) -> UOp | None:
    """Which of the two ranges whole runs of so many elements lie side by side along in the arguments. (Of the other one
    two iterations are taken at a time.)"""
    indices = [u.src[0].src[1] for u in value.toposort() if u.op is Ops.LOAD]
    for r in (k, loop):
        mine = [sym.linear(x) for x in indices if r in ranges_of(x)]
        rest = [c for steps, constant in mine for c in (constant, *(c for x, c in steps.items() if x is not r))]
        in_runs = r.src[0].arg % run == 0 and k.src[0].arg % 2 == 0
        if in_runs and all(steps.get(r) == 1 for steps, _ in mine) and all(c % run == 0 for c in rest):
            return r
    return None


def is_copied(value: UOp) -> bool:
    """Whether a value is what an argument holds, wherever it is read."""
    return value.op is Ops.LOAD and len(value.src[0].src) == 2


def copied_chunks(nest: LoopNest, factor: UOp, k: UOp) -> bool:
    """Whether asynchronous instructions copy a factor of a warp's product."""
    loop = next(r for r in nest.bound if r in ranges_of(factor))
    return (
        k in nest.ring
        and is_copied(factor)
        and runs_along(factor, k, loop, CHUNK_BYTES // factor.dtype.itemsize) is not None
    )


def copied_width(nest: LoopNest, value: UOp, k: UOp) -> int | None:
    """How many elements of what a group shares an asynchronous instruction copies: those of 16 bytes side by side, in
    the argument and in shared memory, or one; None: none can."""
    if k not in nest.ring or not is_copied(value):
        return None
    size, last = value.dtype.itemsize, last_loop(nest, value)
    run = CHUNK_BYTES // size
    wide = last is not None and nest.tile_of(last) * nest.part_of(last) % run == 0
    if wide and last is not None and runs_along(value, last, last, run) is last:
        return run
    return 1 if size in (4, 8) else None


def is_in_vectors(nest: LoopNest, value: UOp, r: UOp) -> bool:
    """Whether the vectors of a thread's tile along the loop may lie apart in shared memory: what is copied at once is
    not in two of them."""
    return r is nest.vectorized and nest.lanes * value.dtype.itemsize % CHUNK_BYTES == 0


def last_loop(nest: LoopNest, value: UOp) -> UOp | None:
    """The loop along which what a group shares lies side by side: the vectorized one, or the innermost."""
    depends = sorted((r for r in nest.loops if r in ranges_of(value)), key=lambda r: r is nest.vectorized)
    return depends[-1] if depends else None
