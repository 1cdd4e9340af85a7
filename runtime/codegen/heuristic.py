"""Picks the optimisations of a kernel from its shapes and strides.

How a reduction is accumulated is decided by the pattern of its accesses alone, never by the size of a loop: along a
loop if one runs contiguously through the operands, else in lanes along the reduction if that does. (Sums of
exponentials also by the length of their rows.) So a batch of any size, cut over any number of threads or devices, gives
the same bits.
"""

from __future__ import annotations

import math

from manygrad.runtime.codegen.describe import signature, size_max, volume
from manygrad.runtime.codegen.dots import is_dot, is_product
from manygrad.runtime.codegen.emit.transposed import LEAST
from manygrad.runtime.codegen.masks import conditions
from manygrad.runtime.codegen.online import online_pairs
from manygrad.runtime.codegen.opts import (
    Block,
    CacheRead,
    Online,
    Opt,
    Parallel,
    ReduceBlock,
    Reorder,
    RFactor,
    Tensorize,
    Tile,
    Unroll,
    Vectorize,
    loop_nest,
)
from manygrad.runtime.codegen.opts.in_order import injective
from manygrad.runtime.codegen.opts.opt import chosen, without
from manygrad.runtime.codegen.products import FIRST_CACHE_BYTES, LARGE_BYTES, LONG_BYTES, Products, largest
from manygrad.runtime.codegen.rows import memory_opts, turned
from manygrad.runtime.codegen.target import Machine
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

ONLINE_VECTORS = (
    4  # of a row between which its running maximum is raised: their exponentials and constants fit the registers
)
ROWS_AT_ONCE = 8  # of a sum down the rows: streams that the processor follows


class Heuristic(Products):
    def run(self) -> tuple[Opt, ...]:
        if any(s.arg is not None for s in self.sig.stores):
            return self.in_order()
        split = self.split_reduces()
        lane = self.choose_lane(split)
        if lane is not None:
            self.opts.append(Vectorize(lane.arg[0], self.lanes))
        self.choose_dots(lane, split)
        if not self.choose_online(lane, split):
            self.choose_tiles(lane, split)
        self.tile_stores(lane)
        self.parallelise()
        return memory_opts(self.sig, tuple(self.opts), self.machine.burst_bytes)

    def split_reduces(self) -> dict[UOp, UOp]:
        """REDUCE -> the reduce range that is accumulated in lanes: one that runs contiguously through all it reads.

        A product of two operands that are both contiguous along the reduction is split even where a loop is contiguous,
        too, if the range fills a vector and no operand can be packed across it (the gradient of few filters' weights).
        """
        found: dict[UOp, UOp] = {}
        for u in self.sig.reduces:
            loads = self.under[u]
            inside = [v for v in self.sig.reduces if v is not u and v in u.src[0].toposort()]
            taken = {r for v in inside for r in v.src[1:]} | {
                r for v in self.sig.reduces if v is not u for r in ranges_of(v)
            }
            along = any(self.contiguous(loads, r) for r in self.sig.loops if r in ranges_of(u))
            for r in reversed(u.src[1:]):
                if (
                    r in taken
                    or not loads
                    or not self.contiguous(loads, r)
                    or size_max(r) < (self.lanes if along else 8)
                ):
                    continue
                product = len(loads) > 1 and all(self.stride(v.src[0], r) == 1 for v in loads)
                if (product or not along) and not (
                    product and (self.packs_across(u) if along else self.packs_better(u))
                ):
                    found[u] = r
                    break
        for r in dict.fromkeys(found.values()):
            self.opts.append(RFactor(r.arg[0], self.lanes))
        return found

    def choose_dots(self, lane: UOp | None, split: dict[UOp, UOp]) -> None:
        """Products of bytes are added up four at a time, of bfloat16 two: along the range that is split, or the
        innermost one."""
        for u in self.sig.reduces:
            product = len(self.under[u]) > 1 and (lane is None or lane in ranges_of(u))
            if is_dot(u.src[0]) and (u in split or product):
                self.opts.append(Tensorize(split.get(u, u.src[-1]).arg[0], u.src[0].arg.terms))

    def choose_online(self, lane: UOp | None, split: dict[UOp, UOp]) -> bool:
        """The sum of exponentials below a maximum, where nothing else needs these, goes over long rows once instead of
        twice."""
        for pair in online_pairs(self.sig) if lane is None else []:
            r = pair.total.src[1]
            if (
                pair.total in split
                and size_max(r) * 4 >= LONG_BYTES
                and frozenset(self.sig.loops) <= ranges_of(pair.total)
            ):
                self.opts += [
                    Online(r.arg[0], pair.maximum.src[1].arg[0]),
                    Unroll(r.arg[0], ONLINE_VECTORS * self.lanes),
                ]
                return True
        return False

    def choose_lane(self, split: dict[UOp, UOp]) -> UOp | None:
        """The loop along which vectors run: the one with the cheapest accesses."""
        taken = {r for u in split for r in ranges_of(u)}
        main = self.main_reduce()
        candidates = [r for r in reversed(self.sig.loops) if r not in taken and size_max(r) > 1]
        candidates = [r for r in candidates if all(self.stride(s.src[0], r) not in (0, None) for s in self.sig.stores)]
        if main is not None and main not in split:
            costs = {r: c for r in candidates if r in ranges_of(main) and (c := self.product_cost(main, r)) is not None}
            if costs:
                return min(costs, key=lambda r: costs[r])
        best, best_cost = None, 0.9 * self.access_cost(None)
        for r in candidates:
            cost = self.access_cost(r)
            if cost < best_cost:
                best, best_cost = r, cost
        return best

    def access_cost(self, r: UOp | None) -> float:
        """Relative cost of the memory accesses and the arithmetic with lanes along `r`."""
        total = 0.0
        for u in self.sig.nodes:
            if u.op not in (Ops.LOAD, Ops.STORE) and u.op not in GroupOp.ALU:
                continue
            index = u.src[0] if u.op in (Ops.LOAD, Ops.STORE) else None
            ranges = ranges_of(u)
            trips = math.prod(float(size_max(x)) for x in ranges)
            if r is None or r not in ranges:
                total += trips
                continue
            vectors = trips / size_max(r) * -(-size_max(r) // self.lanes)
            stride = self.stride(index, r) if index is not None else 1
            square = u.op is Ops.LOAD and not self.sig.reduces and any(self.fills(u.src[0], x) for x in ranges - {r})
            total += vectors * (
                1.0 if stride == 1 else 1.5 if stride == 0 else 3.0 if stride in (-1, 2) or square else 0.8 * self.lanes
            )
        return total

    def fills(self, index: UOp, r: UOp) -> bool:
        """Whether vectors along `r` are contiguous: across it, squares of them are turned."""
        return size_max(r) >= self.lanes and self.stride(index, r) == 1

    def choose_tiles(self, lane: UOp | None, split: dict[UOp, UOp]) -> None:
        main = self.main_reduce()
        if main is None or not ranges_of(main) & frozenset(self.sig.loops):
            self.tile_elementwise(lane)
            return
        sharing = [u for u in self.sig.reduces if u.src[1:] == main.src[1:]]
        budget = max(1, self.machine.accumulators // len(sharing))
        if any(v not in sharing and v in main.src[0].toposort() for v in self.sig.reduces):
            return  # nested
        if lane is not None and self.thin(main, lane):
            self.tile_elementwise(lane)
        elif lane is not None and lane in ranges_of(main):
            rows = self.tile_outer_product(main, lane, budget)
            self.order_and_stage(main, lane, rows)
            if not rows:
                self.rows_in_turn(main, lane, len(sharing))
        elif main in split:
            self.tile_dot_product(main, budget)
        if lane is not None and lane not in ranges_of(main):
            self.tile_elementwise(lane)
        self.unroll_reduce(main, split)
        self.skip(main)

    def rows_in_turn(self, main: UOp, lane: UOp, sharing: int) -> None:
        """Sums down the rows of what no cache holds: some rows of all columns at a time, in wide tiles, as they lie in
        memory, not all rows of a tile's columns. The sums rest in the first cache, each core's for columns of its
        own."""
        k, per = main.src[1], ROWS_AT_ONCE
        fixed = all(r.src[0].op is Ops.CONST for r in (*self.order, *main.src[1:])) and ranges_of(main) == frozenset(
            self.order
        )
        plain = all(len(u.src[0].src) == 2 and self.stride(u.src[0], lane) == 1 for u in self.under[main])
        if (
            not fixed
            or not plain
            or self.order[-1] is not lane
            or len(self.sig.reduces) > sharing
            or size_max(k) < 8 * per
        ):
            return
        if any(u.dtype is not main.dtype for u in self.sig.reduces) or largest(self.under[main]) < LARGE_BYTES:
            return
        vectors, cores = -(-size_max(lane) // self.lanes), self.machine.cores
        mine = vectors if volume(frozenset(self.order[:-1])) >= 8 * cores else -(-vectors // cores)
        wide = max(1, min(mine, self.machine.accumulators * 2 // (3 * sharing)))
        tiles = -(-min(mine, FIRST_CACHE_BYTES // (2 * self.machine.vector_bytes * sharing)) // wide)
        self.opts = list(without(self.opts, Tile, axis=lane.arg[0]))
        self.opts += [Tile(lane.arg[0], wide * self.lanes)]
        self.opts += [Block(lane.arg[0], tiles), ReduceBlock(k.arg[0], per)] if tiles > 1 else []

    def tile_elementwise(self, lane: UOp | None) -> None:
        """Several vectors at once, for the latency of loads; tall tiles where a load runs along another loop."""
        if lane is None:
            return
        work = sum(u.op in GroupOp.ALU or u.op is Ops.LOAD for u in self.sig.nodes)
        crossing = [r for r in self.sig.loops if r is not lane and size_max(r) > 1 and self.loaded_across(r, lane)]
        if crossing and not self.sig.reduces and (turn := turned(self.sig, lane, crossing[-1], self.lanes)) is not None:
            self.opts += turn
            self.order = list(loop_nest(self.sig, self.opts).loops)
            return
        if crossing and not self.sig.reduces:
            self.opts.append(Tile(crossing[-1].arg[0], min(self.lanes, size_max(crossing[-1]))))
            return
        g = 4 if work <= 12 else 2 if work <= 30 else 1
        while g > 1 and size_max(lane) < g * self.lanes:
            g //= 2
        if g > 1:
            self.opts.append(Tile(lane.arg[0], g * self.lanes))

    def loaded_across(self, r: UOp, lane: UOp) -> bool:
        """Whether a load is contiguous along `r` and strided along the lane."""
        return any(self.stride(u.src[0], r) == 1 and self.stride(u.src[0], lane) not in (0, 1) for u in self.loads)

    def tile_stores(self, lane: UOp | None) -> None:
        """Short loops along which results lie side by side, where they do not along the lane: those are turned in
        registers.

        (A product has chosen its tile with regard to that.)
        """
        if lane is None or len(self.sig.stores) > 1 or any(is_product(u.src[0]) for u in self.sig.reduces):
            return
        strides = {r: self.stride(self.sig.stores[0].src[0], r) for r in self.sig.loops}
        side, tiles = 1, []
        for r in sorted(self.sig.loops, key=lambda r: strides[r] or 0):
            if r is not lane and strides[r] == side and r.src[0].op is Ops.CONST and side * r.src[0].arg <= self.lanes:
                side *= r.src[0].arg
                tiles.append(Tile(r.arg[0], r.src[0].arg))
        if strides[lane] == 1 or side < LEAST:
            return
        self.opts = [*without(self.opts, Tile), *tiles]
        written = [o.axis for o in self.opts if isinstance(o, Unroll)]
        for r in (
            r for u in self.sig.reduces for r in reversed(u.src[1:]) if volume(frozenset(u.src[1:])) <= self.lanes
        ):
            if r.src[0].op is Ops.CONST and r.arg[0] not in written and chosen(self.opts, RFactor) is None:
                self.opts.append(Unroll(r.arg[0], r.src[0].arg))
                written.append(r.arg[0])

    def unroll_reduce(self, main: UOp, split: dict[UOp, UOp]) -> None:
        """Short inner reduce loops are written out; where a tile knows its conditions, few more than those they depend
        on."""
        area = math.prod(self.tile_of(r) for r in self.sig.loops if r in ranges_of(main))
        if chosen(self.opts, Vectorize) is not None:
            area //= self.lanes
        tiled = [c for c in conditions(main) if any(self.tile_of(r) > 1 for r in ranges_of(c))] if self.skipping else []
        phased = [c for c in conditions(main) if any(u.op is Ops.MOD for u in c.toposort())]
        for r in self.written_out(main, area):
            area *= r.src[0].arg
            if r in split.values() or (tiled and area > 144 and not any(r in ranges_of(c) for c in tiled + phased)):
                return
            self.opts.append(Unroll(r.arg[0], r.src[0].arg))

    def in_order(self) -> tuple[Opt, ...]:
        """Loops that may hit one address run in order on one thread; one that provably cannot is vectorised and cut.

        If what it stores does not lie side by side (positions of each element of a row): cut by rows. (Not by columns:
        stripes of them are read across memory, which takes longer than one thread needs.)
        """
        sig = self.sig
        apart = [
            r
            for r in sig.loops
            if all(injective(s.src[0], r) for s in sig.stores) and not any(r in ranges_of(x.src[0]) for x in sig.loops)
        ]
        along = [r for r in apart if all(self.stride(s.src[0], r) == 1 for s in sig.stores)]
        if along:
            r = along[-1]
            self.opts.append(Vectorize(r.arg[0], self.lanes))
            pieces = size_max(r) // self.lanes
            vectors = next((n for n in (8, 4, 2) if pieces >= 2 * n and size_max(r) % (n * self.lanes) == 0), 1)
            if vectors > 1:  # several lines of a row at once, and two threads have work
                self.opts.append(Tile(r.arg[0], vectors * self.lanes))
        elif apart and apart[0] is sig.loops[0]:
            r = apart[0]
        else:
            return ()
        if r is not sig.loops[0]:
            self.opts.append(Reorder(r.arg[0], sig.loops[0].arg[0]))
        self.opts.append(Parallel(1))
        return tuple(self.opts)

    def parallelise(self) -> None:
        """As few of the outermost loops as give enough pieces for any number of threads."""
        count, n = 1, 0
        block = chosen(self.opts, Block)
        inside = chosen(self.opts, ReduceBlock) is not None
        staged = chosen(self.opts, CacheRead) is not None
        innermost = (
            {r for u in self.sig.reduces for r in self.sig.loops if r not in ranges_of(u)}
            if self.sig.reduces
            else set()
        )
        for r in self.order:
            if block is not None:
                up_to = next(i + 1 for i, r in enumerate(self.order) if r.arg[0] == block.axis)
                n = up_to if inside else len(self.order)
                break
            if r in innermost and n and count > 1:  # a reduction would be made again for every piece of this loop
                break
            if count >= (1024 if staged else 64):
                break
            count *= -(-size_max(r) // self.tile_of(r))
            n += 1
        if n:
            self.opts.append(Parallel(n))


def choose(ast: UOp, machine: Machine) -> tuple[Opt, ...]:
    """The optimisations of `ast` for `machine`."""
    return Heuristic(ast, machine).run()


def plain(ast: UOp) -> tuple[Opt, ...]:
    """No optimisation: scalar loops (NOOPT=1)."""
    sig = signature(ast)
    return () if any(s.arg is not None for s in sig.stores) or not sig.loops else (Parallel(1),)
