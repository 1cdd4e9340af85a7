from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from manygrad.runtime.codegen.analysis.describe import Signature, in_whole_tiles, is_fixed, size_max
from manygrad.runtime.codegen.kernel.dots import is_dot, is_total
from manygrad.runtime.codegen.kernel.float32_parts import parts_of
from manygrad.runtime.codegen.lowered import SCRATCH_BYTES
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts, RangeOpt
from manygrad.runtime.codegen.target import LINE_BYTES
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True, repr=False)
class CacheRead(RangeOpt):
    """What the reductions read of an argument in one tile of the loop (of a blocked loop: in a block) is packed into
    local memory, contiguous and converted.

    What is read depends on that loop, on no loop inside it, and on reductions of fixed sizes, or one that its tiles cut
    evenly; the kernel does not write it; it fits `SCRATCH_BYTES`.

    before:  for n in 512 by 64: for m: for k: c[m, n..n+63] += a[m, k] * b[k*512 + n .. n+63] after:   for n in 512 by
    64: { for k: local[k*64 ..] = b[k*512 + n ..] }; for m: for k: .. a[m, k] * local[k*64 ..]   # cache_read(n, b)
    """

    kind = "cache_read"
    needs_vectors = True
    argument: int

    @property
    def unique(self) -> tuple[str, int]:
        return (self.kind, self.argument)

    def apply(self, nest: LoopNest, ranges: Mapping[int, UOp]) -> LoopNest:
        return replace(nest, staged=(*nest.staged, (self.loop(self.axis, ranges), self.argument)))

    @classmethod
    def illegal(cls, sig: Signature, mine: Sequence[Self], nest: LoopNest) -> str | None:
        nbytes = 0
        for loop, slot in nest.staged:
            if not (values := staged_values(sig, slot)):
                return f"no REDUCE reads argument {slot}"
            if slot in {s.src[0].src[0].arg for s in sig.stores}:
                return f"argument {slot} is written by the kernel, so a packed copy of it may be out of date"
            for u, ranges in values:
                if (reason := _cannot_pack(nest, loop, slot, u, ranges)) is not None:
                    return reason
                elements = stage_rows(nest, loop, stage_sizes(nest, loop, ranges)) * nest.block.get(loop, 1)
                elements *= math.prod(nest.tile_of(r) for r in tiled_loops(nest, loop, u))
                parts, dtype = packed_as(nest, u, ranges)
                nbytes += -(-elements * parts * dtype.itemsize // LINE_BYTES) * LINE_BYTES
        return f"{nbytes} bytes of local memory, of {SCRATCH_BYTES // 2}" if nbytes > SCRATCH_BYTES // 2 else None

    @classmethod
    def of(cls, nest: LoopNest) -> list[Opt]:
        return [CacheRead(axis, slot) for slot, axis in sorted((slot, r.arg.id) for r, slot in nest.staged)]

    @classmethod
    def neighbours(cls, search: Neighbourhood) -> Iterator[Opts]:
        loads = [v for u in search.sig.reduces for v in u.src[0].toposort() if v.op is Ops.LOAD]
        for slot in sorted({v.src[0].src[0].arg for v in loads}):
            others = tuple(o for o in search.opts if not (isinstance(o, CacheRead) and o.argument == slot))
            yield others
            for r in search.sig.loops:
                yield (*others, CacheRead(r.arg.id, slot))


def _cannot_pack(nest: LoopNest, loop: UOp, slot: int, u: UOp, ranges: tuple[UOp, ...]) -> str | None:
    """Why the value `u` of argument `slot` cannot be packed at `loop`."""
    argument, at = f"argument {slot} cannot be staged", f"argument {slot} cannot be staged at loop {loop.arg.id}"
    outside = frozenset(nest.loops[: nest.loops.index(loop) + 1])
    blocked = next(iter(nest.block), None)
    if not all(is_fixed(r) or (len(ranges) == 1 and in_whole_tiles(r, nest.tile_of(r))) for r in ranges):
        return f"{argument}: the size of a reduction over it is not fixed, and may leave a rest of its tiles"
    if loop not in ranges_of(u) or not ranges_of(u) <= outside | frozenset(ranges):
        return f"{at}: it changes with a loop inside it, or not with this one"
    if loop is blocked and len(tiled_loops(nest, loop, u)) > 1:
        return (
            f"argument {slot} cannot be staged at the blocked loop {loop.arg.id}: "
            "it changes within the tiles of other loops, too"
        )
    if blocked is not None and loop is not blocked and blocked in ranges_of(u):
        return f"{at}: it changes with the blocked loop {blocked.arg.id}"
    if any(r in nest.reduce_lanes for r in ranges):
        return f"{argument}: a reduction over it has lanes of its own"
    mask = u.src[0].src[2:]
    fours = mask and any(nest.tile_of(r) % 4 == 0 for r in ranges_of(mask[0]) & frozenset(ranges))
    if fours and nest.vectorized not in ranges_of(u):
        return (
            f"{argument}: it is masked along a reduction of which fours are written out, "
            "and packed without looking at each"
        )
    return None


def staged_values(sig: Signature, slot: int) -> list[tuple[UOp, tuple[UOp, ...]]]:
    """Values that REDUCEs read of argument `slot` (a conversion, or a factor of bytes, rather than its LOAD), each with
    its reduce ranges, outer first."""
    casts = {s: u for u in sig.nodes for s in u.src if u.op is Ops.CAST and u.dtype.is_float and s.op is Ops.LOAD}
    products = [u for u in sig.reduces if not is_total(u)]
    inside = {v for u in products for v in u.src[0].toposort() if v.op is Ops.LOAD and v.src[0].src[0].arg == slot}
    reduced = tuple(dict.fromkeys(r for v in sig.reduces for r in v.src[1:]))
    bytes_of: dict[UOp, list[UOp]] = {}
    for s in dict.fromkeys(s for u in sig.nodes if is_dot(u) for s in u.src):
        for v in s.toposort():
            bytes_of.setdefault(v, []).append(s)
    values = list(dict.fromkeys(v for u in sig.nodes if u in inside for v in bytes_of.get(u, [casts.get(u, u)])))
    return [(u, tuple(r for r in reduced if r in ranges_of(u))) for u in values]


def packed_as(nest: LoopNest, u: UOp, ranges: tuple[UOp, ...]) -> tuple[int, DType]:
    """As how many numbers an element of `u` is packed, and of which type."""
    if u.dtype is dtypes.float32 and any(r in nest.dots for r in ranges):
        return parts_of(u), dtypes.bfloat16
    return 1, u.dtype


def stage_sizes(nest: LoopNest, loop: UOp, ranges: tuple[UOp, ...]) -> list[int]:
    """How many iterations of `ranges` are packed at a time at `loop`, at most, those of one lane of a dot product
    whole."""
    sizes = {r: size_max(r) for r in ranges}
    if nest.reduce_block is not None and nest.reduce_block[0] in sizes and loop in nest.packed_in_blocks:
        sizes[nest.reduce_block[0]] = min(nest.reduce_block[1], sizes[nest.reduce_block[0]])
    return [-(-n // nest.dots.get(r, 1)) * nest.dots.get(r, 1) for r, n in sizes.items()]


def stage_rows(nest: LoopNest, loop: UOp, sizes: list[int]) -> int:
    """The same as one number; for the tiles of a block with a little space, so that they do not all meet in one set of
    a cache."""
    return math.prod(sizes) + (max(1, 16 // nest.tile_of(loop)) if nest.block.get(loop, 1) > 1 else 0)


def tiled_loops(nest: LoopNest, loop: UOp, value: UOp) -> tuple[UOp, ...]:
    """The tiled loops on which `value` depends, down to `loop`, where it is staged; the vectorized one last."""
    outside = nest.loops[: nest.loops.index(loop)]
    tiled = [*(r for r in outside if nest.tile_of(r) > 1 and r in ranges_of(value)), loop]
    return tuple(sorted(tiled, key=lambda r: r is nest.vectorized))
