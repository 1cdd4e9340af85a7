"""The lists of `Opt`s that differ from a given one by a single decision: the steps of the search.

before:  vectorise(1, 16), tile(0, 6), parallelise(-1, 2)
after:   vectorise(1, 16), tile(0, 8), parallelise(-1, 2);  vectorise(0, 16), tile(0, 16), parallelise(-1, 2);  ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from manygrad.runtime.codegen.describe import Signature, size_max
from manygrad.runtime.codegen.dots import is_dot
from manygrad.runtime.codegen.legal import legal
from manygrad.runtime.codegen.online import online_pairs
from manygrad.runtime.codegen.opt import Opt, canonical, make_plan
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

SHAPING = ("vectorise", "tile", "lanes", "unroll", "dot")
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # tiles of a loop that is not vectorised
VECTORS = (1, 2, 3, 4, 6)  # vectors of a tile of the one that is
UNROLLS = (1, 2, 4, 8, 16)
BLOCKS = (4, 8, 16, 32, 64)
REDUCE_BLOCKS = (64, 128, 256, 512, 1024)

Opts = tuple[Opt, ...]


def neighbours(sig: Signature, opts: Opts, lanes: int, split: bool = False) -> list[Opts]:
    """The legal lists one decision away from `opts`, in canonical form, without repeats and without `opts` itself.

    `lanes`: of a vector register. `split`: also those that add up a reduction in another order (see `opt.py`).
    """
    here = canonical(sig, opts)
    found: dict[Opts, None] = {}
    for changed in _changes(sig, here, lanes, split):
        if legal(sig, changed) is None:
            found[canonical(sig, changed)] = None
    found.pop(here, None)
    return [x for x in found if split or sums(sig, x) == sums(sig, here)]


def sums(sig: Signature, opts: Opts) -> tuple[frozenset[tuple[int, int, int]], ...]:
    """In which order each REDUCE is added up, as (range, lanes, iterations) of what matters: equal sums, equal bits.

    That is its range with `lanes` (and whether it is `online`, or has a `dot` of floats), unless it runs along the vectorised loop; and the
    unrolling of a range around one that is not written out whole: two iterations of the outer range alternate then.
    """
    plan = make_plan(sig, opts)
    found = []
    for u in sig.reduces:
        own = [r for r in u.src[1:] if r in plan.reduce_lanes]
        split = own[0] if own and (plan.lane is None or plan.lane not in ranges_of(u)) else None
        order = set()
        whole = True  # all ranges inside of this one are written out
        for r in reversed(u.src[1:]):
            tile = plan.tile.get(r, 1) if r is split or r not in own else 1
            if r is split or (tile > 1 and not whole):
                order.add((r.arg[0], plan.reduce_lanes[r] if r is split else 1, tile))
            if any(one is r for one, _ in plan.online):
                order.add((r.arg[0], -1, tile))
            if r in plan.dots and u.dtype.is_float:
                order.add((r.arg[0], -plan.dots[r], 1))
            whole = whole and r.src[0].op is Ops.CONST and tile >= r.src[0].arg
        found.append(frozenset(order))
    return tuple(found)


def _changes(sig: Signature, opts: Opts, lanes: int, split: bool) -> Iterator[Opts]:
    reduced = list(dict.fromkeys(r for u in sig.reduces for r in u.src[1:]))
    yield from _vectors(sig, opts, lanes)
    yield from _tiles(sig, opts)
    for r in reduced:
        at = _amount(opts, "lanes", r) * _amount(opts, "dot", r)
        for n in (*UNROLLS, size_max(r)) if size_max(r) <= 64 else UNROLLS:
            yield _with(opts, ("unroll",), r, Opt("unroll", r.arg[0], n * at))
        yield _with(opts, ("dot", "unroll"), r)
        for n in {u.src[0].arg.terms for u in sig.reduces if r in u.src[1:] and is_dot(u.src[0])}:
            yield _with(opts, ("dot", "unroll", "skip"), r, Opt("dot", r.arg[0], n))
        yield _with(opts, ("skip",), r)
        yield _with(opts, ("skip",), r, Opt("skip", r.arg[0], 1))
        if split:
            yield _with(opts, SHAPING, r)
            for n in (lanes // 2, lanes, 2 * lanes):
                yield _with(opts, SHAPING, r, Opt("lanes", r.arg[0], n))
                scalar = next(_vectors(sig, opts, lanes))  # in place of those of a loop, and of what needs them
                yield _with(_without(scalar, ("stage", "block", "reduce_block")), SHAPING, r, Opt("lanes", r.arg[0], n))
    yield from _orders(sig, opts)
    yield from _stages(sig, opts)
    yield from _blocks(sig, opts, reduced)
    yield from _memory(sig, opts, reduced)
    for n in range(len(sig.loops) + 1):
        yield (*_without(opts, ("parallelise",)), *([Opt("parallelise", -1, n)] if n else []))


def _vectors(sig: Signature, opts: Opts, lanes: int) -> Iterator[Opts]:
    """No vectors; vectors along another loop, which take the place of its tile; longer and shorter ones."""
    old = next((o for o in opts if o.kind == "vectorise"), None)
    rest = opts if old is None else tuple(o for o in opts if not (o.kind in SHAPING and o.axis == old.axis))
    yield rest
    for r in sig.loops:
        if size_max(r) > 1:
            scalar = _without(rest, SHAPING, r)
            for n in dict.fromkeys((lanes, lanes // 2, 2 * lanes)):
                yield (*scalar, Opt("vectorise", r.arg[0], n))


def _tiles(sig: Signature, opts: Opts) -> Iterator[Opts]:
    for r in sig.loops:
        at = _amount(opts, "vectorise", r)
        for n in VECTORS if at > 1 else ROWS:
            if (n - 1) * at < size_max(r):
                yield _with(opts, ("tile",), r, Opt("tile", r.arg[0], n * at))


def _orders(sig: Signature, opts: Opts) -> Iterator[Opts]:
    """One loop moved directly outside of another."""
    order = make_plan(sig, opts).loops
    for i, r in enumerate(order):
        for x in (*order[:i], *order[i + 2 :]):
            yield _in_order(opts, Opt("before", r.arg[0], x.arg[0]))
    if len(order) > 1:  # (the innermost place is reached by moving the last loop away from it)
        yield _in_order(opts, Opt("before", order[-1].arg[0], order[0].arg[0]))


def _in_order(opts: Opts, move: Opt) -> Opts:
    """`move` after the moves made already."""
    return (*(o for o in opts if o.kind == "before"), move, *(o for o in opts if o.kind != "before"))


def _stages(sig: Signature, opts: Opts) -> Iterator[Opts]:
    slots = sorted({v.src[0].src[0].arg for u in sig.reduces for v in u.src[0].toposort() if v.op is Ops.LOAD})
    for slot in slots:
        others = tuple(o for o in opts if not (o.kind == "stage" and o.amount == slot))
        yield others
        for r in sig.loops:
            yield (*others, Opt("stage", r.arg[0], slot))


def _blocks(sig: Signature, opts: Opts, reduced: Iterable[UOp]) -> Iterator[Opts]:
    """A block cuts all loops over the threads; with one of a reduction, those up to its own."""
    plan = make_plan(sig, opts)
    none = _without(opts, ("block", "reduce_block"))
    yield none
    everything = Opt("parallelise", -1, len(sig.loops))
    for r in sig.loops:
        for n in BLOCKS:
            base = (*_without(opts, ("block", "parallelise")), Opt("block", r.arg[0], n), everything)
            yield base
            if not any(o.kind == "reduce_block" for o in opts):
                for k in reduced:
                    n = _amount(opts, "unroll", k)
                    some = (*base[:-1], Opt("parallelise", -1, 1 + plan.loops.index(r)))
                    yield (*some, Opt("reduce_block", k.arg[0], max(1, 256 // n) * n))
    if plan.block:
        bare = _without(opts, ("reduce_block", "parallelise"))
        yield (*bare, everything)
        some = (*bare, Opt("parallelise", -1, 1 + plan.loops.index(next(iter(plan.block)))))
        yield from (
            (*some, Opt("reduce_block", k.arg[0], n)) for k in reduced for n in REDUCE_BLOCKS if n < size_max(k)
        )


def _memory(sig: Signature, opts: Opts, reduced: list[UOp]) -> Iterator[Opts]:
    """One more or one less of what is kept, asked for ahead, aligned, or stored past the caches."""
    ranges = [*reduced, *sig.loops]
    read = sorted({u.src[0].src[0].arg for u in sig.nodes if u.op is Ops.LOAD})
    possible = [
        Opt("keep", r.arg[0], x.arg[0]) for r in reduced for x in ranges if x is not r and size_max(x) == size_max(r)
    ]
    possible += [Opt("online", p.total.src[1].arg[0], p.maximum.src[1].arg[0]) for p in online_pairs(sig)]
    possible += [Opt("prefetch", r.arg[0], slot) for r in ranges for slot in read]
    possible += [Opt("align", r.arg[0], 1) for r in sig.loops]
    possible += [Opt("stream", -1, s.src[0].src[0].arg) for s in sig.stores]
    for opt in possible:
        yield tuple(o for o in opts if o != opt) if opt in opts else (*opts, opt)


def _amount(opts: Opts, kind: str, r: UOp) -> int:
    return next((o.amount for o in opts if o.kind == kind and o.axis == r.arg[0]), 1)


def _without(opts: Opts, kinds: tuple[str, ...], r: UOp | None = None) -> Opts:
    return tuple(o for o in opts if not (o.kind in kinds and (r is None or o.axis == r.arg[0])))


def _with(opts: Opts, kinds: tuple[str, ...], r: UOp, *new: Opt) -> Opts:
    """`opts` with the decisions of these kinds on `r` replaced."""
    return (*_without(opts, kinds, r), *new)
