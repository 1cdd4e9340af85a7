"""The kinds of Opt, in the order in which a list is applied, and what is asked of a whole list: its nest, its legality,
its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from manygrad.runtime.codegen.analysis.describe import Signature, is_fixed
from manygrad.runtime.codegen.opts.align import Align
from manygrad.runtime.codegen.opts.bind import Bind
from manygrad.runtime.codegen.opts.bind_reduce import BindReduce
from manygrad.runtime.codegen.opts.block import Block
from manygrad.runtime.codegen.opts.cache_read import CacheRead
from manygrad.runtime.codegen.opts.cache_shared import CacheShared
from manygrad.runtime.codegen.opts.compute_at import ComputeAt
from manygrad.runtime.codegen.opts.copy_ahead import CopyAhead
from manygrad.runtime.codegen.opts.float32_parts import Float32Parts
from manygrad.runtime.codegen.opts.in_order import out_of_order
from manygrad.runtime.codegen.opts.matrix import Matrix
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.runtime.codegen.opts.nontemporal_store import NontemporalStore
from manygrad.runtime.codegen.opts.online import Online
from manygrad.runtime.codegen.opts.opt import Neighbourhood, Opt, Opts
from manygrad.runtime.codegen.opts.parallel import Parallel
from manygrad.runtime.codegen.opts.prefetch import Prefetch
from manygrad.runtime.codegen.opts.read_ahead import ReadAhead
from manygrad.runtime.codegen.opts.reduce_block import ReduceBlock
from manygrad.runtime.codegen.opts.reorder import Reorder
from manygrad.runtime.codegen.opts.rfactor import RFactor
from manygrad.runtime.codegen.opts.skip import Skip
from manygrad.runtime.codegen.opts.tensorize import Tensorize
from manygrad.runtime.codegen.opts.tile import Tile
from manygrad.runtime.codegen.opts.unroll import Unroll
from manygrad.runtime.codegen.opts.vectorize import Vectorize
from manygrad.runtime.codegen.opts.warp_matrix import WarpMatrix
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

KINDS: tuple[type[Opt], ...] = (
    Reorder, Vectorize, RFactor, Tile, Unroll, Tensorize, Matrix, Float32Parts, Skip, CacheRead, Block, ReduceBlock,
    ComputeAt, Online, Prefetch, ReadAhead,
    Align, NontemporalStore, Parallel, Bind, BindReduce, CacheShared, WarpMatrix, CopyAhead,
)  # fmt: skip
_ORDER = {kind: i for i, kind in enumerate(KINDS)}
_BY_NAME = {kind.kind: kind for kind in KINDS}


def named(kind: str, *values: int) -> Opt:
    """The Opt of that kind and those values. Raises ValueError for an unknown kind or another number of values."""
    if kind not in _BY_NAME:
        raise ValueError(f"unknown kind of Opt: {kind}; the kinds are {', '.join(_BY_NAME)}")
    try:
        return _BY_NAME[kind](*values)
    except TypeError as error:
        raise ValueError(f"{kind}{values}: {error}") from None


def loop_nest(sig: Signature, opts: Sequence[Opt]) -> LoopNest:
    """The kernel's loops with the decisions applied. Raises ValueError for one that does not fit the kernel."""
    return _loop_nest(sig, tuple(opts))


@lru_cache(maxsize=16)
def _loop_nest(sig: Signature, opts: Opts) -> LoopNest:
    """(Memoised: a list is chosen, checked and lowered one after the other.)"""
    nest = LoopNest(sig.loops)
    for opt in in_order(opts):
        nest = apply(opt, sig, nest)
    return nest


def in_order(opts: Sequence[Opt]) -> list[Opt]:
    """A list as it is applied."""
    return sorted(opts, key=lambda o: _ORDER[type(o)])


def apply(opt: Opt, sig: Signature, nest: LoopNest) -> LoopNest:
    return opt.apply(nest, _ranges(sig))


@lru_cache(maxsize=4)
def _ranges(sig: Signature) -> dict[int, UOp]:
    return {u.arg.id: u for u in sig.nodes if u.op is Ops.RANGE}


def legal(sig: Signature, opts: Sequence[Opt]) -> str | None:
    """None, or why the kernel cannot take `opts`."""
    seen = set()
    for o in opts:
        if o.unique is not None and o.unique in seen:
            return f"{o}: there is another {o.kind} already"
        seen.add(o.unique)
        if (reason := o.wrong()) is not None:
            return reason
    try:
        nest = loop_nest(sig, opts)
    except ValueError as error:
        return str(error)
    for kind in KINDS:
        if (reason := kind.illegal(sig, [o for o in opts if isinstance(o, kind)], nest)) is not None:
            return reason
    return out_of_order(sig, nest)


def canonical(sig: Signature, opts: Sequence[Opt]) -> Opts:
    """The shortest list of the same meaning, its kinds in the order of `KINDS`: equal nests give equal lists."""
    nest = loop_nest(sig, opts)
    others = [o for kind in KINDS if kind is not Reorder for o in kind.of(nest)]
    return (*Reorder.of(nest, sig.loops), *others)


def neighbours(
    sig: Signature, opts: Sequence[Opt], lanes: int, sums_may_change: bool = False, group_items: int = 1
) -> list[Opts]:
    """The legal lists one decision away from `opts`, in canonical form, without repeats and without `opts` itself.

    `lanes`: of a vector register; `group_items`: work items that a group may have. Lists that add up a reduction in
    another order are left out unless `sums_may_change`.
    """
    here = canonical(sig, opts)
    around = Neighbourhood(sig, here, loop_nest(sig, here), lanes, sums_may_change, group_items)
    found: dict[Opts, None] = {}
    for kind in KINDS:
        for changed in kind.neighbours(around):
            if legal(sig, changed) is None:
                found[canonical(sig, changed)] = None
    found.pop(here, None)
    return [x for x in found if sums_may_change or sums(sig, x) == sums(sig, here)]


def sums(sig: Signature, opts: Sequence[Opt]) -> tuple[frozenset[tuple[int, ...]], ...]:
    """In which order each REDUCE is added up, as (range, lanes, iterations) of what matters: equal sums, equal bits.

    That is its range with `rfactor` (and whether it is `online`, or has `tensorize` of floats, and in tiles of what
    size a matrix unit takes those), unless it runs along the vectorized loop; and the unrolling of a range around one
    that is not written out whole, and of those inside of it: their iterations alternate with two of the outer range
    then. Of a range with `bind_reduce` its work items are a fourth number.
    """
    nest = loop_nest(sig, opts)
    found = []
    for u in sig.reduces:
        own = [r for r in u.src[1:] if r in nest.reduce_lanes]
        split = own[0] if own and (nest.vectorized is None or nest.vectorized not in ranges_of(u)) else None
        order = set[tuple[int, ...]]()
        whole, inside = True, set[tuple[int, ...]]()  # whether all ranges inside of this one are written out; how far
        for r in reversed(u.src[1:]):
            tile = nest.tile_of(r) if r is split or r not in own else 1
            if r is split:
                order.add((r.arg.id, nest.reduce_lanes[r], tile))
            elif tile > 1:
                inside.add((r.arg.id, 1, tile))
                order |= set() if whole else inside
            if r is nest.warp_matrix:
                order.add((r.arg.id, -2, tile))
            if r in nest.reduce_bound:
                order.add((r.arg.id, 1, tile, nest.reduce_bound[r]))
            if any(one is r for one, _ in nest.online):
                order.add((r.arg.id, -1, tile))
            if r in nest.dots and u.dtype.is_float:
                order.add((r.arg.id, -nest.dots[r], tile if r is nest.matrix else 1))
            whole = whole and is_fixed(r) and tile >= r.src[0].arg
        found.append(frozenset(order))
    return tuple(found)
