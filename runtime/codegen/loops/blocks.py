"""The parallel loop, a part of which is one call of the kernel; blocks of a loop; blocked reductions.

A blocked reduction: for each block of its outermost range, all tiles of the part (the blocked loop's and those of the
loops inside of it) do their share, their operands packed for this block alone; the sums rest in local memory in
between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.groups import grid
from manygrad.runtime.codegen.loops.index import BEGIN, FINISH, HELD, Index
from manygrad.runtime.codegen.loops.lanes import fixed_size
from manygrad.runtime.codegen.loops.pack import pack
from manygrad.runtime.codegen.loops.reduce import reduction
from manygrad.runtime.codegen.loops.tiles import Around, Body, Tiler
from manygrad.runtime.codegen.loops.tree import BlockLoop, For, Kind, Node, Nodes, Rest
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp


def parallel(t: Tiler, around: Around, body: Body) -> Nodes:
    """The outermost loops, as one loop over this call's part of their joint tiles."""
    nest = t.kernel.nest
    loops = nest.loops[: nest.parallel]
    blocked = next(iter(nest.block), None)
    if len(loops) == 1 and blocked is None and not nest.group:
        first, *others = t.between(loops[0], BEGIN, FINISH, around, body)
        return (replace(first, kind=Kind.PARALLEL) if isinstance(first, For) else first, *others)
    counter = t.counters.new()
    number = _digits(t, counter, loops)
    if nest.group:
        return grid(t, counter, {r: number[r] for r in loops}, around, body)
    inner = replace(around, changed={**around.changed, **_changed(t, counter, loops, number)})
    single = [r for r in loops if r is not blocked]
    if blocked is None:
        inside = _one_tile_each(t, single, number, inner, body)
    else:  # what is packed for the block is packed before the loops that it does not depend on
        packed = {r for u, s in t.local.stages.items() if s.loop is blocked for r in ranges_of(u)}
        before, after = ([r for r in single if (r in packed) == outside] for outside in (True, False))
        blocks = _Blocks(t, blocked, number[blocked])
        inside = _one_tile_each(
            t,
            before,
            number,
            inner,
            lambda a: blocks.of(a, lambda b: _one_tile_each(t, after, number, b, lambda c: blocks.tiles(c, body))),
        )
    return (For(counter, BEGIN, FINISH, 1, inside, Kind.PARALLEL),)


def _one_tile_each(t: Tiler, loops: list[UOp], number: dict[UOp, Index], around: Around, body: Body) -> Nodes:
    if not loops:
        return body(around)
    return t.one(loops[0], number[loops[0]], around, lambda a: _one_tile_each(t, loops[1:], number, a, body))


def _digits(t: Tiler, joint: Index, loops: tuple[UOp, ...]) -> dict[UOp, Index]:
    """The number of each loop's tile (or block of tiles) in a joint index."""
    found, rest = {}, joint
    for r in reversed(loops):
        if r is loops[0]:
            found[r] = rest
            break
        count = t.tiles_of(r, t.kernel.nest.part_of(r))
        found[r] = index.mod(rest, count)
        rest = index.div(rest, count)
    return found


def _changed(t: Tiler, joint: Index, loops: tuple[UOp, ...], number: dict[UOp, Index]) -> dict[UOp, Index]:
    """Whether each loop but the last has just moved on."""
    found = {}
    for i, r in enumerate(loops[:-1]):
        inner = number[loops[i + 1]]
        for later in loops[i + 2 :]:
            inner = index.either(inner, number[later])
        at_begin = index.equal(joint, BEGIN)
        if (other := _not_held(t, loops[i + 1 :])) is not None:
            at_begin = index.both(at_begin, other)
        found[r] = index.either(at_begin, index.equal(inner, index.const(0)))
    return found


def _not_held(t: Tiler, later: tuple[UOp, ...]) -> Index | None:
    """Whether this thread's last part of the loop ended in another iteration of the loops before `later`; None: it is
    not known."""
    if not t.local.stages:
        return None
    count = index.const(1)
    for r in later:
        count = index.mul(count, t.tiles_of(r, t.kernel.nest.block.get(r, 1)))
    last = index.sub(HELD, index.const(1))
    return index.unequal(index.div(last, count, False), index.div(BEGIN, count, False))


@dataclass(frozen=True)
class _Blocks:
    """A block of tiles of the loop `r`, by its number."""

    t: Tiler
    r: UOp
    number: Index

    @property
    def begin(self) -> Index:
        """The first tile."""
        return index.mul(self.number, self.t.kernel.nest.block[self.r])

    @property
    def end(self) -> Index:
        end, tiles = index.add(self.begin, index.const(self.t.kernel.nest.block[self.r])), self.t.tiles_of(self.r)
        return index.choose(index.less(end, tiles), end, tiles)

    @property
    def first(self) -> Index:
        """The first iteration."""
        return index.mul(self.begin, self.t.kernel.nest.tile.get(self.r, 1))

    def between(self, around: Around, body: Body) -> Nodes:
        return self.t.between(self.r, self.begin, self.end, around, body)

    def of(self, around: Around, body: Body) -> Nodes:
        """The block around `body`; what it needs for all of a reduction is packed."""
        is_whole = self.t.kernel.nest.reduce_block is None
        first = pack(self.t, self.r, around, self.between) if is_whole else ()
        return (BlockLoop(self.r, self.first, (*first, *body(around))),)

    def tiles(self, around: Around, body: Body) -> Nodes:
        """Its tiles, inside of all other loops."""
        split = self.t.kernel.nest.reduce_block
        return self.between(around, body) if split is None else self._reduction(*split, around, body)

    def _reduction(self, k: UOp, per: int, around: Around, body: Body) -> Nodes:
        """The reduction over `k`, `per` iterations at a time, for all the tiles of the block and of the loops inside of
        it."""
        t, r = self.t, self.r
        group = tuple(u for u in around.waiting if r in ranges_of(u))
        assert (
            group
            and k is group[0].src[1]
            and all(u.src[1:] == group[0].src[1:] and u.dtype is group[0].dtype for u in group)
        )
        around = replace(around, waiting=tuple(u for u in around.waiting if u not in group))
        inside = t.kernel.nest.packed_in_blocks[1:]
        at, nbytes = self._resting(group, inside, t.kernel.tiling.lanes_of(group, around.lanes)[0].count)
        offset = t.local.sums(nbytes)

        def tiles(around: Around, what: Body, i: int = 0) -> Nodes:
            if i < len(inside):
                return t.loop(inside[i], around, lambda a: tiles(a, what, i + 1))
            return self.between(around, what)

        def block(origin: Index, size: int, is_last: bool) -> Node:
            inner = replace(around, blocks={**around.blocks, k: (origin, size)})
            rest = Rest(offset, at, index.less(index.const(0), origin), is_last)

            def share(around: Around) -> Nodes:
                return (reduction(t, group, around, rest), *(body(around) if is_last else ()))

            return BlockLoop(k, origin, (*pack(t, r, inner, self.between), *tiles(inner, share)))

        size = fixed_size(k)
        assert size is not None
        before = (size - 1) // per * per
        last = block(index.const(before), size - before, True)
        if not before:
            return (last,)
        counter = t.counters.new()
        return For(counter, index.const(0), index.const(before), per, (block(counter, per, False),)), last

    def _resting(self, group: tuple[UOp, ...], inside: tuple[UOp, ...], lanes: int) -> tuple[Index, int]:
        """Where the sums of the current tile rest, in elements; the bytes of those of all tiles."""
        nest = self.t.kernel.nest
        vectors = {x: nest.tile.get(x, 1) // (nest.lanes if x is nest.vectorized else 1) for x in nest.loops}
        # of one tile of each loop
        count = sum(lanes * math.prod(n for x, n in vectors.items() if x in ranges_of(u)) for u in group)
        tiles = (
            (self.r, nest.block[self.r]),
            *((x, -(-x.src[0].arg // nest.tile.get(x, 1))) for x in reversed(inside)),
        )
        steps = {}
        for x, n in tiles:
            steps[x] = count // nest.tile.get(x, 1)
            count *= n
        at = index.mul(index.sub(index.origin(self.r), self.first), steps[self.r])
        for x in inside:
            at = index.add(at, index.mul(index.origin(x), steps[x]))
        return at, count * group[0].dtype.itemsize
