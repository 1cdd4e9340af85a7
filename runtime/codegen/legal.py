"""Which lists of `Opt`s a kernel can take: checked before any code is made, with the reason where it cannot."""

from __future__ import annotations

import math

from manygrad.runtime.codegen.affine import TileAnalysis
from manygrad.runtime.codegen.describe import Signature, conjuncts, size_max
from manygrad.runtime.codegen.dots import is_dot, is_total
from manygrad.runtime.codegen.keep import kept_bytes, kept_values
from manygrad.runtime.codegen.lowered import SCRATCH_BYTES
from manygrad.runtime.codegen.online import online_pair
from manygrad.runtime.codegen.opt import Opt, Plan, make_plan
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

MAX_LANES = 64


def legal(sig: Signature, opts: tuple[Opt, ...]) -> str | None:
    """None, or why the kernel cannot take `opts`. The kinds and their conditions: `opt.py`."""
    try:
        plan = make_plan(sig, opts)
    except ValueError as error:
        return str(error)
    for check in (
        _amounts,
        _order,
        _lanes,
        _dots,
        _scattering,
        _staging,
        _blocks,
        _keeping,
        _online,
        _prefetching,
        _aligning,
        _streaming,
    ):
        if (reason := check(sig, opts, plan)) is not None:
            return reason
    return None


def _amounts(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    seen: set[tuple[str, int, int]] = set()
    for o in opts:
        key: tuple[str, int, int] = (o.kind, o.axis, 0)
        if o.kind in ("keep", "online", "prefetch", "stream"):
            key = (o.kind, o.axis, o.amount)
        elif o.kind in ("stage", "vectorise", "block"):
            key = (o.kind, -1, o.amount if o.kind == "stage" else 0)
        if o.kind != "before" and key in seen:
            return f"{o}: there is another {o.kind} already"
        seen.add(key)
        if o.kind in ("vectorise", "lanes") and not (2 <= o.amount <= MAX_LANES and o.amount & (o.amount - 1) == 0):
            return f"{o}: lanes are a power of two, 2 to {MAX_LANES}"
        if o.kind == "skip" and any(
            u.arg is not Ops.ADD for u in sig.reduces if o.axis in [x.arg[0] for x in u.src[1:]]
        ):
            return f"{o}: what is masked out counts in a reduction that is no sum"
        if o.kind in ("tile", "unroll", "block", "reduce_block") and o.amount < 1:
            return f"{o}: at least 1"
    return None


def _order(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    for i, r in enumerate(plan.loops):
        needs = ranges_of(r.src[0])
        if not needs <= frozenset(plan.loops[:i]):
            return f"the size of loop {r.arg[0]} depends on a loop inside of it"
        if needs and i < plan.parallel:
            return f"the size of loop {r.arg[0]} is not known before the call, so it is not cut over the threads"
    return None


def _lanes(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    for r in plan.reduce_lanes:
        over = [u for u in sig.reduces if r in u.src[1:]]
        if any(x is not r and x in plan.reduce_lanes for u in over for x in u.src[1:]):
            return f"lanes along range {r.arg[0]}: another range of that REDUCE has lanes already"
        if any(r in ranges_of(v) for v in sig.reduces):
            return f"lanes along range {r.arg[0]}: a REDUCE inside of it depends on it"
        if plan.lane is not None and all(plan.lane in ranges_of(u) for u in over):
            return f"lanes along range {r.arg[0]}: that REDUCE has lanes along loop {plan.lane.arg[0]} already"
    return None


def _dots(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    for r, n in plan.dots.items():
        over = [u for u in sig.reduces if r in u.src[1:]]
        if not all(u.arg is Ops.ADD and is_dot(u.src[0]) for u in over):
            return f"dot({r.arg[0]}, {n}): the REDUCEs over it are no sums of products of bytes or bfloat16, or of such as the machine does not multiply"
        if any(n != u.src[0].arg.terms for u in over):
            return f"dot({r.arg[0]}, {n}): an instruction adds up {over[0].src[0].arg.terms} products"
        if r.src[0].op is not Ops.CONST:
            return f"dot({r.arg[0]}, {n}): the size of the range is not fixed"
        if any(r in ranges_of(v) for v in sig.reduces) or any(
            x in plan.dots for u in over for x in u.src[1:] if x is not r
        ):
            return f"dot({r.arg[0]}, {n}): a REDUCE inside of it depends on it, or another range of it has quads"
        if any(x in plan.skipped for u in over for x in u.src[1:]) or any(r in pair for pair in plan.kept):
            return f"dot({r.arg[0]}, {n}): not where single iterations are skipped or kept"
    return None


def _scattering(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    if all(s.arg is None for s in sig.stores):
        return None
    if plan.parallel > 1 or plan.block:
        return "a kernel that stores in order is cut along one loop at most"
    ordered = [r for r in plan.loops if not all(injective(s.src[0], r) for s in sig.stores)]
    for r in ordered:
        if r is plan.lane or r in plan.loops[: plan.parallel]:
            return f"iterations of loop {r.arg[0]} may store to one address, so they run in order"
        if plan.tile.get(r, 1) > 1 and r is not ordered[-1]:
            return f"iterations of loop {r.arg[0]} may store to one address, so one is done before the next: it has no tiles"
    if ordered != [r for r in sig.loops if r in ordered]:
        return f"loops {[r.arg[0] for r in ordered]} may store to one address, so they stay in their order"
    return None


def _staging(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    nbytes = 0
    written = {s.src[0].src[0].arg for s in sig.stores}
    blocked = next(iter(plan.block), None)
    for loop, slot in plan.staged:
        values = staged_values(sig, slot)
        outside = frozenset(plan.loops[: plan.loops.index(loop) + 1])
        if not values:
            return f"no REDUCE reads argument {slot}"
        if slot in written:
            return f"argument {slot} is written by the kernel, so a packed copy of it may be out of date"
        for u, ranges in values:
            if any(r.src[0].op is not Ops.CONST for r in ranges):
                return f"argument {slot} cannot be staged: the size of a reduction over it is not fixed"
            if loop not in ranges_of(u) or not ranges_of(u) <= outside | frozenset(ranges):
                return f"argument {slot} cannot be staged at loop {loop.arg[0]}: it changes with a loop inside it, or not with this one"
            tiled = tiled_loops(plan, loop, u)
            if loop is blocked and len(tiled) > 1:
                return f"argument {slot} cannot be staged at the blocked loop {loop.arg[0]}: it changes within the tiles of other loops, too"
            if blocked is not None and loop is not blocked and blocked in ranges_of(u):
                return f"argument {slot} cannot be staged at loop {loop.arg[0]}: it changes with the blocked loop {blocked.arg[0]}"
            if any(r in plan.reduce_lanes for r in ranges):
                return f"argument {slot} cannot be staged: a reduction over it has lanes of its own"
            mask = u.src[0].src[2:]
            if (
                mask
                and plan.lane not in ranges_of(u)
                and any(plan.tile.get(r, 1) % 4 == 0 for r in ranges_of(mask[0]) & frozenset(ranges))
            ):
                return f"argument {slot} cannot be staged: it is masked along a reduction of which fours are written out, and packed without looking at each"
            elements = stage_rows(plan, loop, stage_sizes(plan, loop, ranges)) * plan.block.get(loop, 1)
            elements *= math.prod(plan.tile.get(r, 1) for r in tiled)
            nbytes += -(-elements * u.dtype.itemsize // 64) * 64
    if nbytes > SCRATCH_BYTES // 2:
        return f"{nbytes} bytes of local memory, of {SCRATCH_BYTES // 2}"
    return None


def _blocks(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    if plan.reduce_block is None:
        return None
    (blocked, tiles), (k, _) = next(iter(plan.block.items())), plan.reduce_block
    group = [u for u in sig.reduces if blocked in ranges_of(u)]
    if not group or any(u.src[1:] != group[0].src[1:] or u.dtype is not group[0].dtype for u in group):
        return f"reduce_block({k.arg[0]}): the REDUCEs over the blocked loop {blocked.arg[0]} must share their ranges and type"
    if len({plan.lane in ranges_of(u) for u in group}) > 1:
        return f"reduce_block({k.arg[0]}): some of the REDUCEs run along the vectorised loop and some do not"
    if group[0].src[1] is not k:
        return f"reduce_block({k.arg[0]}): the outermost range of the reduction is {group[0].src[1].arg[0]}"
    if len(sig.reduces) > len(group):
        return f"reduce_block({k.arg[0]}): there are REDUCEs that do not depend on the blocked loop {blocked.arg[0]}"
    if any(r in plan.reduce_lanes for r in group[0].src[1:]):
        return f"reduce_block({k.arg[0]}): the reduction has lanes of its own"
    inside = plan.packed_in_blocks
    if any(
        not frozenset(inside) <= ranges_of(u) or any(x.src[0].op is not Ops.CONST for x in inside[1:]) for u in group
    ):
        return f"reduce_block({k.arg[0]}): a loop inside of the blocked one is not of fixed size, or the reduction does not depend on it"
    area = math.prod(plan.tile.get(r, 1) for r in plan.loops) * math.prod(
        -(-x.src[0].arg // plan.tile.get(x, 1)) for x in inside[1:]
    )
    nbytes = tiles * area * len(group) * group[0].dtype.itemsize
    return None if nbytes <= SCRATCH_BYTES // 2 else f"{nbytes} bytes of sums, of {SCRATCH_BYTES // 2}"


def _keeping(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    nbytes = 0
    for r, again in plan.kept:
        if plan.block:
            return f"keep({r.arg[0]}, {again.arg[0]}): not with a block"
        if again in {a for a, _ in plan.kept} or [x for _, x in plan.kept].count(again) > 1:
            return f"keep({r.arg[0]}, {again.arg[0]}): range {again.arg[0]} is part of another keep"
        kept = set(kept_values(sig, r, again).values())
        if not kept:
            return f"nothing worth keeping is computed along range {r.arg[0]} and again along range {again.arg[0]}"
        if any(plan.lane in ranges_of(u) for u in kept):
            return f"keep({r.arg[0]}, {again.arg[0]}): what is kept runs along the vectorised loop"
        nbytes += sum(kept_bytes(u, r, plan) for u in kept)
    return None if nbytes <= SCRATCH_BYTES // 4 else f"{nbytes} bytes kept, of {SCRATCH_BYTES // 4}"


def _online(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    for r, x in plan.online:
        if (pair := online_pair(sig, r, x)) is None:
            return f"online({r.arg[0]}, {x.arg[0]}): not a sum of exponentials below the maximum over the other range"
        if (
            r not in plan.reduce_lanes
            or plan.lane in ranges_of(pair.total)
            or any(r in pair or x in pair for pair in plan.kept)
        ):
            return f"online({r.arg[0]}, {x.arg[0]}): without lanes along the range, or kept"
    return None


def _prefetching(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    for r, slot in plan.prefetched:
        reads = [u for u in sig.nodes if u.op is Ops.LOAD and u.src[0].src[0].arg == slot]
        if any(s == slot for _, s in plan.staged):
            return f"argument {slot} is packed"
        if not any(plan.next_tile(u, r) for u in reads):
            return f"argument {slot} is not read along range {r.arg[0]} and a loop around it"
    return None


def _aligning(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    r = plan.aligned
    if r is None:
        return None
    if (
        r is not plan.lane
        or len(sig.stores) != 1
        or sig.reduces
        or sig.stores[0].arg is not None
        or len(sig.stores[0].src[0].src) == 3
    ):
        return f"align({r.arg[0]}, 1): not the vectorised loop of a kernel with one STORE, no condition on it and no REDUCE"
    if r.src[0].op is not Ops.CONST or r.src[0].arg < plan.tile[r] + plan.lanes or not alignable(plan, sig.stores[0]):
        return f"align({r.arg[0]}, 1): the loop is short, or where a vector is stored is not known but for a multiple of its length"
    if plan.block:
        return f"align({r.arg[0]}, 1): not with a block"
    return None


def _streaming(sig: Signature, opts: tuple[Opt, ...], plan: Plan) -> str | None:
    read = {u.src[0].src[0].arg for u in sig.nodes if u.op is Ops.LOAD}
    for slot in plan.streamed:
        stores = [s for s in sig.stores if s.src[0].src[0].arg == slot]
        if not stores or slot in read or any(s.arg is not None for s in stores):
            return f"stream(-1, {slot}): the argument is not one that is only stored to"
        if plan.lane is None:
            return f"stream(-1, {slot}): no loop is vectorised"
    return None


def staged_values(sig: Signature, slot: int) -> list[tuple[UOp, tuple[UOp, ...]]]:
    """What REDUCEs read of argument `slot` (a conversion, or a factor of bytes, rather than its LOAD), each with its reduce ranges, outer first."""
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


def stage_sizes(plan: Plan, loop: UOp, ranges: tuple[UOp, ...]) -> list[int]:
    """How many iterations of `ranges` are packed at a time at `loop`, quads of them whole."""
    sizes = {r: r.src[0].arg for r in ranges}
    if plan.reduce_block is not None and plan.reduce_block[0] in sizes and loop in plan.packed_in_blocks:
        sizes[plan.reduce_block[0]] = min(plan.reduce_block[1], sizes[plan.reduce_block[0]])
    return [-(-n // plan.dots.get(r, 1)) * plan.dots.get(r, 1) for r, n in sizes.items()]


def stage_rows(plan: Plan, loop: UOp, sizes: list[int]) -> int:
    """The same as one number; for the tiles of a block with a little space, so that they do not all meet in one set of a cache."""
    return math.prod(sizes) + (max(1, 16 // plan.tile.get(loop, 1)) if plan.block.get(loop, 1) > 1 else 0)


def tiled_loops(plan: Plan, loop: UOp, value: UOp) -> tuple[UOp, ...]:
    """The tiled loops on which `value` depends, down to `loop`, where it is staged; the vectorised one last."""
    outside = plan.loops[: plan.loops.index(loop)]
    tiled = [*(r for r in outside if plan.tile.get(r, 1) > 1 and r in ranges_of(value)), loop]
    return tuple(sorted(tiled, key=lambda r: r is plan.lane))


def alignable(plan: Plan, store: UOp) -> bool:
    """Whether the place of each vector stored is known but for a multiple of its length."""
    aligned = {r: t for r, t in plan.tile.items() if r.src[0].op is Ops.CONST}
    analysis = TileAnalysis(aligned, plan.lane, plan.lanes)
    a = analysis.affine(store.src[0].src[1], {})
    return a is not None and a.stride == 1 and analysis.alignment(a.terms) % plan.lanes == 0


def injective(index: UOp, r: UOp) -> bool:
    """Different iterations of `r` never meet at one address: it moves by more than all smaller terms span, the others are multiples
    of what `r` spans (whatever they are, and if they change with `r`)."""
    analysis = TileAnalysis({}, None, 1)
    a = analysis.affine(index.src[1], {})
    step = next((c for x, c in a.terms if x.expr is r), 0) if a is not None else 0
    if a is None or step <= 0:
        return False
    inside = _limits(analysis, index)
    span = 0
    for x, c in a.terms:
        if x.expr is not r and c % (step * size_max(r)):
            low, high = inside.get(x.expr, bounds(x.expr))
            span += abs(c) * (high - low)
    return span < step


def _limits(analysis: TileAnalysis, index: UOp) -> dict[UOp, tuple[int, int]]:
    """expression -> (least, greatest) that the condition of an INDEX leaves of it, for conditions on one expression (a position that is data)."""
    found: dict[UOp, tuple[int, int]] = {}
    for test in conjuncts(index.src[2]) if len(index.src) == 3 else []:
        if test.op is not Ops.CMPLT or not all(s.dtype.is_int for s in test.src):
            continue
        a, b = (analysis.affine(s, {}) for s in test.src)
        if a is None or b is None or len(terms := (*a.terms, *((x, -c) for x, c in b.terms))) != 1:
            continue
        (atom, c), rest = terms[0], a.constant - b.constant  # c * atom + rest < 0
        low, high = found.get(atom.expr, bounds(atom.expr))
        found[atom.expr] = (low, min(high, (-rest - 1) // c)) if c > 0 else (max(low, rest // -c + 1), high)
    return found
