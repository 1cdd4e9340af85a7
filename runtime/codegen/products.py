"""Decisions about products: matrix products, convolutions, their gradients.

Which operand rests in the cache while the other one passes by, what is packed, how large the tiles of rows and vectors
are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from manygrad.runtime.codegen.describe import part_held, size_max, volume
from manygrad.runtime.codegen.dots import is_dot, is_product, is_total
from manygrad.runtime.codegen.emit.transposed import LEAST
from manygrad.runtime.codegen.masks import Masks, conditions
from manygrad.runtime.codegen.opts import Block, CacheRead, Opt, Prefetch, ReduceBlock, RFactor, Tile
from manygrad.runtime.codegen.opts.opt import chosen
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

STAGE_BYTES = 16 << 20
FIRST_CACHE_BYTES = 32 << 10
LARGE_BYTES = 8 << 20  # what is read of an array that has left the cores' caches
LONG_BYTES = 2 << 10  # rows that are read one after the other: several at once lie in the same sets of the first cache
MOST_POSITIONS = 72  # of a tile, along rows: code is made for each


class Products(Masks):
    def packs_better(self, u: UOp) -> bool:
        """A product both of whose operands are contiguous along the reduction (a @ b.T): whether one can be packed
        across it, for many rows. Then no partial sums need be folded, and the operands are read in one stream."""
        loads = self.under[u]
        apart = [r for r in self.sig.loops if r in ranges_of(u) and sum(r in ranges_of(v) for v in loads) < len(loads)]
        columns = [r for r in apart if all(self.stride(s.src[0], r) == 1 for s in self.sig.stores)]
        return len(apart) > 1 and any(self.stageable(v, u, r) for r in columns for v in loads if r in ranges_of(v))

    def packs_across(self, u: UOp) -> bool:
        """A product both of whose operands, and a loop, are contiguous along the reduction (the gradient of a
        convolution's weights): whether one of them has a loop of its own (the filters) that fills vectors, along which
        it is packed for all others."""
        loads = self.under[u]
        own = {v: [r for r in self.sig.loops if [w for w in loads if r in ranges_of(w)] == [v]] for v in loads}
        alone = [(v, rs[0]) for v, rs in own.items() if len(rs) == 1 and self.stride(v.src[0], rs[0]) != 1]
        return all(own.values()) and any(size_max(r) >= self.lanes and self.stageable(v, u, r) for v, r in alone)

    def thin(self, main: UOp, lane: UOp) -> bool:
        """Whether a product has so few terms, of columns that the first cache holds, that what is stored bounds it: it
        runs as an elementwise kernel does."""
        across = [u for u in self.under[main] if lane in ranges_of(u)]
        plain = all(len(u.src[0].src) == 2 and self.stride(u.src[0], lane) in (0, 1) for u in self.under[main])
        stored = all(self.stride(s.src[0], lane) == 1 for s in self.sig.stores)
        few = (
            volume(frozenset(main.src[1:])) <= self.lanes
            and sum(touched(u) * u.dtype.itemsize for u in across) <= FIRST_CACHE_BYTES
        )
        return lane in ranges_of(main) and len(self.sig.reduces) == 1 and plain and stored and few

    def product_cost(self, main: UOp, r: UOp) -> float | None:
        """Relative cost of a product with lanes along `r`: what is not contiguous along it must be worth packing."""
        strides = {u: self.stride(u.src[0], r) for u in self.under[main] if r in ranges_of(u)}
        if not any(s != 0 for s in strides.values()):
            return None
        product = main.arg is Ops.ADD and is_product(main.src[0]) and len(self.under[main]) >= 2
        cost = 1.0
        for u, s in strides.items():
            if s in (0, 1):
                continue
            reuse = volume(ranges_of(main) - ranges_of(u))
            if reuse < 2 or not product or not self.stageable(u, main, r):
                return None
            cost += (6 if any(self.stride(u.src[0], k) == 1 for k in main.src[1:]) else 48) / reuse
        for u in self.under[main]:  # rows that come in small pieces from beyond the cache again for each 4 vectors
            pieces = len(main.src) > 2 and all(
                self.stride(u.src[0], k) != 1 or size_max(k) < self.lanes for k in main.src[1:]
            )
            if r not in ranges_of(u) and pieces and touched(u) * u.dtype.itemsize > self.machine.cache_bytes:
                others = volume(ranges_of(main) - ranges_of(u) - {r}) * -(-size_max(r) // (4 * self.lanes))
                cost += touched(u) * (others - 1) * self.lanes / volume(ranges_of(main) | frozenset(main.src[1:]))
        scattered = max(self.store_cost(s, main, r) for s in self.sig.stores)
        vectors = -(-size_max(r) // self.lanes)
        return cost * vectors * self.lanes / size_max(r) + scattered / volume(frozenset(main.src[1:]))

    def store_cost(self, s: UOp, main: UOp, lane: UOp, tiles: dict[UOp, int] | None = None) -> int:
        """Relative cost of a stored vector: scattered, or turned in registers where positions of the tile (if it is not
        known yet: of the loops that may be its rows) lie side by side."""
        step = self.stride(s.src[0], lane)
        if step == 1:
            return 0
        most = {r: size_max(r) for r in self.free_of(main, lane)} if tiles is None else tiles
        side = 1  # positions
        for along, r in sorted(((self.stride(s.src[0], r) or 0, r) for r in most), key=lambda x: x[0]):
            if along == side:
                side *= most[r]
        return (
            12
            if side >= self.lanes
            else 20
            if side >= 8
            else 40
            if side >= LEAST or (step and abs(step) < self.lanes)
            else 80
        )

    def free_of(self, main: UOp, lane: UOp) -> list[UOp]:
        """The loops on which no vector that is loaded depends."""
        wide = [u for u in self.under[main] if lane in ranges_of(u)]
        own = [r for r in self.sig.loops if r in ranges_of(main) and r is not lane and size_max(r) > 1]
        return [r for r in own if not any(r in ranges_of(u) for u in wide)]

    def tile_outer_product(self, main: UOp, lane: UOp, budget: int) -> list[UOp]:
        """Rows x vectors of accumulators: few loads an FMA, little waste at the ends; gives the loops of the rows.

        The rows are loops on which no vector that is loaded depends: each vector is used once a row. Where the first of
        them is short, a tile has all of it and some iterations of another one.
        """
        vectors = -(-size_max(lane) // self.lanes)
        free = self.free_of(main, lane)
        free.sort(key=lambda r: (min(size_max(r), 4), self.sig.loops.index(r)), reverse=True)
        aligned = 8 if free and self.rows_rest(main, free[0]) else 1  # rows that are packed are packed in vectors
        best: tuple[dict[UOp, int], int] = ({}, 1)
        best_cost = math.inf
        for g in (1, 2, 3, 4, 6):
            if g > max(1, vectors) or g > budget or (g & (g - 1) and lane.src[0].op is not Ops.CONST):
                continue  # (a size known at run time is rather a multiple of a power of two)
            each = volume(frozenset(main.src[2:])) * g * self.lanes * 4  # bytes of a panel's smallest block
            if (
                self.overflows(main, g * self.lanes)
                and g > 1
                and (-(-vectors // g) < self.machine.cores or each > self.machine.cache_bytes)
            ):
                continue  # (each core has a panel, and a cache holds a block of it)
            for rows, parts in self.row_tiles(main, free, min(budget // g, 16)):
                inside, done = self.part_done(main, lane, rows, g)
                work = [
                    (n * m, k * v, _unit(m * inside, v))
                    for m, n in parts
                    for v, k in ((g, vectors // g), (vectors % g, 1))
                ]
                cost = sum(m * v * unit for m, v, unit in work) / (sum(m * n for m, n in parts) * vectors)
                cost *= done * (1.12 if parts[0][0] % aligned else 1.0)
                if not free:  # memory bounds it: wide tiles, of which every core has as many as another
                    tiles, cores = -(-vectors // g), self.machine.cores
                    cost = -(-tiles // cores) * cores * g / vectors + 0.3 / g
                cost += max(self.store_cost(s, main, lane, rows) for s in self.sig.stores) / volume(
                    frozenset(main.src[1:])
                )
                if cost < best_cost - 1e-9:
                    best, best_cost = (rows, g), cost
        rows, g = best
        if g > 1:
            self.opts.append(Tile(lane.arg[0], g * self.lanes))
        self.opts += [Tile(r.arg[0], m) for r, m in rows.items() if m > 1]
        return list(rows) or free[:1]

    def row_tiles(
        self, main: UOp, free: list[UOp], most: int
    ) -> Iterator[tuple[dict[UOp, int], list[tuple[int, int]]]]:
        """(rows of each loop, (size, number) of the tiles that this makes of them)."""
        if not free:
            yield {}, [(1, 1)]
            return
        whole = size_max(free[0])
        for m in range(1, min(whole, most) + 1):
            yield {free[0]: m}, [(m, whole // m), (whole % m, 1)]
        found = conditions(main)
        orders = (
            [*itertools.permutations(free, 2), *itertools.permutations(free, 3)]
            if found
            else [tuple(free[:2])]
            if len(free) > 1
            else []
        )
        for *all_of, last in orders:
            whole, size = math.prod(size_max(r) for r in all_of), size_max(last)
            alive = math.prod(
                part_held(c) for c in found if ranges_of(c) <= frozenset(all_of)
            )  # others are 0 and no sums
            for m in range(2, min(size, int(most / (whole * alive) + 1e-6), MOST_POSITIONS // whole) + 1):
                yield {**{r: size_max(r) for r in all_of}, last: m}, [(whole * m, size // m), (whole * (size % m), 1)]

    def rows_rest(self, main: UOp, r: UOp) -> bool:
        """Whether rows are so scattered along the reduction that a block of them is packed: a page or more a step,
        beyond what the cache holds."""
        down = [u for u in self.under[main] if r in ranges_of(u)]
        step = self.stride(down[0].src[0], main.src[-1]) if len(down) == 1 else 1
        if step is None or step in (0, 1) or len(down[0].src[0].src) == 3:
            return False
        return volume(frozenset(main.src[1:])) * abs(step) * down[0].dtype.itemsize > self.machine.cache_bytes // 4

    def order_and_stage(self, main: UOp, lane: UOp, rows: list[UOp]) -> None:
        """Which operand of a product rests in the cache, packed, while the other one passes by.

        The columns (what is loaded in vectors) rest, a block of panels as large as half the core's cache, for all rows;
        of rows that are not contiguous along the reduction, a block is packed and rests instead, for all columns. What
        is read with a condition is packed in any case: then it is checked once.
        """
        across = [u for u in self.under[main] if lane in ranges_of(u) and not any(r in ranges_of(u) for r in rows)]
        down = [u for u in self.under[main] if lane not in ranges_of(u) and any(r in ranges_of(u) for r in rows)]
        must = [u for u in self.under[main] if self.stride(u.src[0], lane) not in (0, 1)]
        if must and self.product_cost(main, lane) is None:
            return
        if not rows or len(across) != 1 or len(down) != 1 or not self.stageable(across[0], main, lane):
            if must:
                outer = [r for r in self.order if r is not lane and any(r in ranges_of(u) for u in must)]
                self.reorder([*outer, lane, *(r for r in self.order if r is not lane and r not in outer)])
                self.opts += [CacheRead(lane.arg[0], u.src[0].src[0].arg) for u in must]
            return
        inner = [r for r in self.order if r in ranges_of(down[0]) and r not in ranges_of(across[0]) and r not in rows]
        inner += sorted(rows, key=self.order.index)
        own = ranges_of(main)
        outer = [r for r in self.order if r in own and r is not lane and r not in inner]
        after = [r for r in self.order if r not in own]
        if not must and self.fits_first_cache(main, across[0], lane):
            self.opts += self.next_rows(main, lane, rows, down[0])
            return
        if (
            not must and volume(frozenset(inner)) < 32
        ):  # too few rows for what packing costs; each thread reads columns of its own
            self.reorder([*outer, lane, *inner, *after])
            return
        within = [r for r in outer if r not in ranges_of(down[0]) and self.stored_closer(r, lane)]
        outer = [r for r in outer if r not in within]
        panel = (lane, *within)[-1]
        columns, row = (CacheRead(x.arg[0], u.src[0].src[0].arg) for x, u in ((panel, across[0]), (inner[-1], down[0])))
        packs_rows = self.stageable(down[0], main, inner[-1]) and down[0].src[0].src[0].arg != columns.argument
        settled = self.settled(main, lane, {r: self.tile_of(r) for r in rows}, -(-self.tile_of(lane) // self.lanes))
        apart = (
            is_dot(main.src[0]) and self.stride(down[0].src[0], main.src[-1]) != 1
        )  # quads of them would be joined again and again
        guarded = (
            (len(down[0].src[0].src) == 3 and not settled)
            or (down[0].dtype.is_half and not is_dot(main.src[0]))
            or apart
        )
        self.skipping = settled
        if packs_rows and len(rows) == 1 and not within and self.rows_rest(main, rows[0]):
            wide = size_max(lane) > 2 * size_max(inner[-1])  # then the rows, which are fewer, are packed by every piece
            held, inside = (lane, inner) if wide else (inner[-1], [lane])
            parts = self.reduce_block(main, held, inside) if not after else []
            self.reorder([*outer, *([lane, *inner] if wide and parts else [*inner, lane]), *after])
            self.opts += [row, columns, *(parts or self.rows(main, inner[-1]))]
        else:
            self.reorder([*outer, lane, *within, *inner, *after])
            self.opts += [columns, *([row] if packs_rows and guarded else self.next_rows(main, lane, rows, down[0]))]
            self.opts += self.panels(main, lane) if not within else []

    def fits_first_cache(self, main: UOp, load: UOp, lane: UOp) -> bool:
        """Whether all columns that a row meets are few, and read as they lie."""
        nbytes = volume(frozenset((*main.src[1:], lane))) * load.dtype.itemsize
        return nbytes <= FIRST_CACHE_BYTES and len(load.src[0].src) == 2 and not load.dtype.is_half

    def next_rows(self, main: UOp, lane: UOp, rows: list[UOp], down: UOp) -> list[Opt]:
        """The next tile's rows are asked for while this one's are read: each row is on other pages, where the processor
        does not look ahead by itself. For tiles whose FMAs leave the load ports the time."""
        k, vectors, m = main.src[-1], self.tile_of(lane) // self.lanes, math.prod(self.tile_of(r) for r in rows)
        streams = (
            len(main.src) == 2
            and len(down.src[0].src) == 2
            and self.stride(down.src[0], k) == 1
            and size_max(k) >= 4 * self.lanes
        )
        return [Prefetch(k.arg[0], down.src[0].src[0].arg)] if streams and vectors + 2 * m <= vectors * m else []

    def stored_closer(self, r: UOp, lane: UOp) -> bool:
        """Whether results of neighbouring iterations of `r` lie between those of the lane: they are written soon after
        each other."""
        steps = [(self.stride(s.src[0], r), self.stride(s.src[0], lane)) for s in self.sig.stores]
        return all(a is not None and b is not None and 0 < abs(a) < abs(b) for a, b in steps)

    def block(self, main: UOp, r: UOp, nbytes: int, wanted: int) -> list[Opt]:
        """About as many tiles of `r` as fit `nbytes`, at most those wanted, all blocks about the same."""
        count = -(-size_max(r) // self.tile_of(r))
        most = min(nbytes // (volume(frozenset(main.src[1:])) * self.tile_of(r) * 4), wanted)
        tiles = -(-count // -(-count // most)) if most else 0
        fixed = all(x.src[0].op is Ops.CONST for x in self.order) and ranges_of(main) >= frozenset(self.order)
        if tiles < 2 or not fixed or sum(not is_total(u) for u in self.sig.reduces) > 1:
            return []
        return [Block(r.arg[0], tiles)]

    def rows(self, main: UOp, r: UOp) -> list[Opt]:
        """As many tiles of rows as twice the cache holds, a block for every core, unless that makes them small."""
        count = -(-size_max(r) // self.tile_of(r))
        wanted = max(-(-count // max(2, self.machine.cores)), min(16, -(-count // 2)))
        return self.block(main, r, 2 * self.machine.cache_bytes, wanted)

    def panels(self, main: UOp, lane: UOp) -> list[Opt]:
        """As many panels of columns as half the cache holds, a block for every core (none where the rows lie in it
        anyhow, and what is stored would not, one by one); of a panel that is larger, as much of the reduction at a
        time."""
        half, k = self.machine.cache_bytes // 2, main.src[1]
        if any(
            is_total(u) and lane in ranges_of(u) for u in self.sig.reduces
        ):  # which a block would add up for each tile of rows
            return []
        if not self.overflows(main, self.tile_of(lane)):
            rows = min(touched(u) for u in self.under[main] if lane not in ranges_of(u)) * 4
            scattered = any(self.stride(s.src[0], lane) != 1 for s in self.sig.stores)
            return (
                []
                if scattered and rows <= self.machine.cache_bytes // 4
                else self.block(main, lane, half, -(-size_max(lane) // (self.tile_of(lane) * self.machine.cores)))
            )
        each = volume(frozenset(main.src[2:])) * self.tile_of(lane) * 4
        per = max(1, half // each)
        return [Block(lane.arg[0], 1), ReduceBlock(k.arg[0], -(-size_max(k) // -(-size_max(k) // per)))]

    def overflows(self, main: UOp, columns: int) -> bool:
        """Whether a panel of so many columns is larger than half the cache, and may be packed in blocks of the
        reduction's outermost range."""
        ranges = [*self.sig.loops, *main.src[1:]]
        if len(main.src) == 2 or len(self.sig.reduces) > 1 or any(r.src[0].op is not Ops.CONST for r in ranges):
            return False
        length = math.prod(part_held(c) for c in conditions(main) if ranges_of(c) <= frozenset(main.src[1:]))
        large = length * volume(frozenset(main.src[1:])) * columns * 4 > self.machine.cache_bytes // 2
        return large and ranges_of(main) >= frozenset(self.sig.loops)

    def reduce_block(self, main: UOp, r: UOp, inside: list[UOp]) -> list[Opt]:
        """Half of `r` (or 512) at a time, and of the reduction as much as an eighth of the cache holds of it, so that a
        panel of the other operand stays in the first cache: for long reductions whose sums the cache holds, too, where
        so few pieces are enough for all cores."""
        count, k, length = -(-size_max(r) // self.tile_of(r)), main.src[1], volume(frozenset(main.src[1:]))
        pieces = max(2, self.machine.cores, -(-count // -(-512 // self.tile_of(r))))
        tiles = -(-count // pieces)
        size, sums = tiles * self.tile_of(r), tiles * self.tile_of(r) * volume(frozenset(inside)) * 4
        fixed = all(x.src[0].op is Ops.CONST for x in (*self.order, *main.src[1:])) and len(self.sig.reduces) == 1
        if (
            not fixed
            or size < 96
            or sums > self.machine.cache_bytes
            or size * length * 4 < self.machine.cache_bytes // 4
        ):
            return []
        most = min(128, self.machine.cache_bytes // 32 // size) * size_max(k) // length
        per = -(-size_max(k) // -(-size_max(k) // most)) if most >= 16 else 0
        return [Block(r.arg[0], tiles), ReduceBlock(k.arg[0], per)] if 0 < per < size_max(k) else []

    def stageable(self, load: UOp, main: UOp, loop: UOp) -> bool:
        """Fits a thread's scratch memory, depends on fixed sizes only, and is the only read of that argument in any
        reduction."""
        depends, reduced = ranges_of(load), ranges_of(load) & frozenset(main.src[1:])
        if self.overflows(main, self.lanes):
            reduced -= {main.src[1]}
        if loop not in depends or any(r.src[0].op is not Ops.CONST for r in reduced):
            return False
        if any(chosen(self.opts, RFactor, r.arg[0]) is not None for r in depends):
            return False
        elements = volume(reduced) * 4 * self.lanes
        slot = load.src[0].src[0].arg
        reads = {v for u, loads in self.under.items() if not is_total(u) for v in loads if v.src[0].src[0].arg == slot}
        return elements * 8 <= STAGE_BYTES and len(reads) == 1

    def tile_dot_product(self, main: UOp, budget: int) -> None:
        """Vectors along the reduction: the accumulators of several outputs side by side."""
        own = [r for r in self.sig.loops if r in ranges_of(main) and size_max(r) > 1]
        loads = self.under[main]
        apart = lambda m, n: any(m in ranges_of(u) and n not in ranges_of(u) for u in loads)  # noqa: E731
        pairs = [(m, n) for m in own for n in own if m is not n and apart(m, n) and apart(n, m)]
        if pairs:
            tm, tn = (8, 3) if budget >= 24 else (4, 4) if budget >= 16 else (3, 3)
            m, n = max(
                pairs,
                key=lambda p: (
                    min(size_max(p[0]), tm) * min(size_max(p[1]), tn),
                    sum(map(self.sig.loops.index, p)),
                    -self.sig.loops.index(p[0]),
                ),
            )
            self.opts += [Tile(m.arg[0], _even(size_max(m), tm)), Tile(n.arg[0], _even(size_max(n), tn))]
        elif own:
            alone = (
                len(self.sig.reduces) == 1
                and largest(loads) >= LARGE_BYTES
                and size_max(main.src[-1]) * 4 >= LONG_BYTES
            )
            t = 1 if alone else _even(size_max(own[-1]), max(1, min(4, budget // 4)))
            if t > 1:
                self.opts.append(Tile(own[-1].arg[0], t))


def touched(load: UOp) -> int:
    """Elements that a load reads in all, at most."""
    low, high = bounds(load.src[0].src[1])
    return min(volume(ranges_of(load)), high - low + 1)


def largest(loads: list[UOp]) -> int:
    """Bytes of what one of `loads` reads in all, at most; 0 where there is none."""
    return max((touched(u) * u.dtype.itemsize for u in loads), default=0)


def _unit(m: float, g: int) -> float:
    """Relative cost of an FMA in a tile of m rows and g vectors: its share of the loads, of the vectors' stream from
    the second cache, and the FMA's latency where the accumulators are too few to hide it."""
    if not m or not g:
        return 0.0
    return (1.0 + max(0.0, (m + g) / (m * g) - 0.4) + 0.3 * max(0.0, 6 / m - 1)) * max(1.0, 8 / (m * g))


def _even(size: int, most: int) -> int:
    """A tile of at most `most` that cuts `size` with the least rest."""
    return max(range(1, min(size, most) + 1), key=lambda t: (size / (-(-size // t) * most), t))
