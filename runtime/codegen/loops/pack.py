"""The loops that fill local memory: what a tile's reductions read of an operand, packed contiguously and converted.

before:  for n (64 at a time): for m: for k: LOAD b[k*N + n]
after:   for n: { for k: local[k*64 + 0..63] = b[k*N + n] }; for m: for k: LOAD local[k*64]

Of a blocked loop all tiles of the block are packed, one after the other, before the block's tiles run for the first
time; of a blocked reduction as many iterations as a block has, before that runs. What is packed for the tiles of a
block lies a little more than their size apart: at distances of a power of two all of it would meet in one set of the
first cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from manygrad.runtime.codegen.analysis.describe import factor_masks
from manygrad.runtime.codegen.cost import PACK_BYTES
from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.context import KernelContext
from manygrad.runtime.codegen.loops.lanes import Lanes, fixed_size, step_along
from manygrad.runtime.codegen.loops.local import Stage
from manygrad.runtime.codegen.loops.reduce import masks
from manygrad.runtime.codegen.loops.tiles import Around, Body, Tiler
from manygrad.runtime.codegen.loops.tree import For, If, Nodes, Pack, PackLoop, PackStage, TileLoop
from manygrad.runtime.codegen.target import LANE_BYTES
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

ROWS_WRITTEN_OUT = 8  # of those that lie along the reduction and are packed for a matrix unit
Tiles = Callable[[Around, Body], Nodes]  # all the tiles of a block


def pack(t: Tiler, loop: UOp, around: Around, tiles: Tiles | None = None) -> Nodes:
    """Fills the stages of `loop` for the tile that is open, unless they hold it already; or for all the `tiles` of its
    block."""
    stages = [s for s in t.local.stages.values() if s.loop is loop]
    if not stages or (loop in t.kernel.nest.block and tiles is None):
        return ()
    read = PackStage(tuple(_packing(t, s, around, tiles) for s in stages))
    changed = around.changed.get(loop)
    return (read,) if changed is None else (If(changed, (read,)),)


def _packing(t: Tiler, stage: Stage, around: Around, tiles: Tiles | None) -> PackLoop:
    lanes = packing_lanes(t.kernel, stage, around.lanes)
    inner = replace(around, lanes=lanes, packing=True)

    def ranges(around: Around, i: int = 0, within: Tiles | None = None) -> Nodes:
        if i < len(stage.ranges):
            return t.loop(stage.ranges[i], around, lambda inside: ranges(inside, i + 1, within))
        if within is not None:
            return within(around, lambda inside: (_one(t, stage, inside),))
        return _vectors(t, stage, around)

    if tiles is None:
        body = ranges(inner)
    elif lanes.square is not None:
        body = tiles(inner, ranges)
    else:  # what lies side by side is read together
        body = ranges(inner, 0, tiles)
    return PackLoop(stage, lanes, body)


def _one(t: Tiler, stage: Stage, around: Around) -> Pack:
    vectorized, along = around.lanes.range, stage.turned and lies_along(t.kernel, stage)
    return Pack(
        stage,
        () if stage.turned else skipped_by_all(t.kernel, stage),
        vectorized is stage.loop and vectorized is not t.kernel.nest.vectorized,
        along,
    )


def skipped_by_all(kernel: KernelContext, stage: Stage) -> tuple[UOp, ...]:
    """The conditions under which the value is packed: those that it is loaded under, without which no reduction reads
    it. (One that is no product, or that others run beside, reads all that was packed, masked out or not.)"""
    over = frozenset(stage.ranges)
    read = [u.src[0] for u in kernel.sig.reduces if not over.isdisjoint(u.src[1:])]
    own = factor_masks(stage.value)
    return tuple(m for m in masks(kernel, read, over) if m in own) if read else ()


def packing_lanes(kernel: KernelContext, stage: Stage, around: Lanes) -> Lanes:
    """Vectors along the loop, also where another one is vectorised, if the operand is contiguous along it or in
    squares."""
    u, nest, lanes = stage.value, kernel.nest, Lanes(around.range, around.count)
    if stage.turned and lies_along(kernel, stage):
        return replace(lanes, singly=stage.loop)  # (some rows of the tile after the others)
    tile = nest.tile.get(stage.loop, 1)
    if lanes.range not in stage.pitches and fixed_size(stage.loop) is not None and tile > 1:
        itemsize = u.dtype.itemsize if stage.grouped is None else LANE_BYTES
        lanes = Lanes(stage.loop, min(1 << (tile - 1).bit_length(), PACK_BYTES // itemsize))
    if lanes.range not in stage.pitches:
        return lanes
    r = lanes.range
    assert r is not None
    load = [v.src[0] for v in u.toposort() if v.op is Ops.LOAD][-1]
    a = kernel.tiling.analysis(lanes).affine(load.src[1], {})
    square = None
    if a is not None and a.stride != 1:
        square = next((k for k in stage.ranges if step_along(kernel.tiling.analysis(lanes), load.src[1], k) == 1), None)
        lanes = replace(lanes, square=square)
    if lanes.range is not nest.vectorized and square is None and (a is None or a.stride != 1):
        return Lanes(around.range, around.count)
    if square is not None and len(load.src) == 2 and kernel.tiling.tile_of(r, lanes) % lanes.count == 0:
        alone = replace(lanes, singly=r)
        single = kernel.tiling.analysis(alone).affine(load.src[1], {})
        if a is not None and single is not None and single.offsets(lanes.count) == a.offsets(lanes.count):
            return alone
    return lanes


def lies_along(kernel: KernelContext, stage: Stage) -> bool:
    """Whether what is packed lies along its one range."""
    load = [v.src[0] for v in stage.value.toposort() if v.op is Ops.LOAD][-1]
    return step_along(kernel.tiling.analysis(Lanes()), load.src[1], stage.ranges[0]) == 1


def _vectors(t: Tiler, stage: Stage, around: Around) -> Nodes:
    """The tile, in squares one vector after the other: transposing a square is much code. So are many rows."""
    r, n = around.lanes.range, around.lanes.count
    if stage.turned and lies_along(t.kernel, stage):
        r = stage.loop
        n = next(n for n in (ROWS_WRITTEN_OUT, ROWS_WRITTEN_OUT // 2, 2, 1) if around.tiles[r] % n == 0)
    elif around.lanes.singly is None:
        return (_one(t, stage, around),)
    if r is None or around.tiles[r] == n or around.tiles[r] % n:
        return (_one(t, stage, around),)
    counter = t.counters.new()
    one = TileLoop(r, index.add(index.origin(r), counter), n, (_one(t, stage, around),), vector=counter)
    return (For(counter, index.const(0), index.const(around.tiles[r]), n, (one,)),)
