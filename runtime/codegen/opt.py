"""Optimisation decisions: named and inspectable, so that a heuristic or a search can pick them.

A kernel is a nest of loops around its reductions. A list of `Opt`s says how the nest is run; without any it is run as
written, one iteration after the other. `legal.py` says which lists a kernel can take.

| kind | axis | amount | it means | legal where |
|---|---|---|---|---|
| `vectorise` | a loop | lanes | neighbouring iterations in one vector | one loop; a power of two, 2 to 64 |
| `lanes` | a reduce range | lanes | split-reduce: partial sums in one vector, folded at the end | one range of a REDUCE, no loop of which is vectorised, and on which no other REDUCE depends |
| `tile` | a loop | elements | split into tiles that are held in registers at once | any loop; a multiple of its lanes |
| `unroll` | a reduce range | iterations | written out, in order | any reduce range; a multiple of its lanes |
| `dot` | a reduce range | 4 of bytes, 2 of bfloat16 | that many neighbouring iterations of a sum of products in one lane: one instruction multiplies and adds them; `quads.py` | all REDUCEs over it are such sums, in a form that the machine has (`dots.py`); a fixed size, no `skip`; its tile a multiple |
| `skip` | a reduce range | 1 | iterations of the REDUCEs over it in which a factor of the product is masked out are skipped, for a whole tile or a position in it; `places.py` makes versions for the edges | a sum |
| `before` | a loop | another loop's id | reorder: moved directly outside of that one | not outside of a loop its size depends on |
| `stage` | a loop | argument | what the reductions read of the argument in one of the loop's tiles (of a blocked loop: in a block) is packed into local memory | what is read depends on that loop, on no loop inside it, and on fixed sizes; it is not written by the kernel, fits `SCRATCH_BYTES` |
| `block` | a loop | tiles | one piece of the parallel loop runs so many of its tiles, inside of all other loops | all loops in the parallel loop, but for `reduce_block` |
| `reduce_block` | the outermost reduce range | iterations | all tiles of the block, and all of the loops inside of it, do these before the next ones, of which only so much is packed at a time; sums rest in local memory | with `block`, all loops up to the blocked one in the parallel loop, for one group of REDUCEs without `lanes`; a multiple of its unroll |
| `keep` | a reduce range | another range's id | what the REDUCEs over it compute of an element is kept in local memory, and read where the same is computed along the other one | `keep.py`: REDUCEs over that range alone, both of one fixed size; one of work worth it |
| `online` | a reduce range | another one's id | the sum over `r` of exponentials below the maximum over the other range is made in one pass with that | `online.py`: such a pair, `lanes` along `r`, which is not kept |
| `prefetch` | any range `r` | argument | while it runs, what it reads of the argument is asked for one tile ahead of the innermost loop around `r` that moves it | there is such a loop; the argument is not packed |
| `align` | a loop | 1 | its vectors begin where what they store is aligned, in each row elsewhere; `align.py` | it is the vectorised one, of a fixed size; the only STORE, in a kernel without REDUCEs or blocks, contiguous and known but for a multiple of the lanes |
| `stream` | -1 | argument | whole vectors stored to the argument go past the caches; `lines.py`: of rows that begin within a cache line, too | it is stored to, not read |
| `parallelise` | -1 | loops | so many of the outermost loops are cut over the threads | sizes known before the call |

A kernel that adds to what it stores to, or of whose values for one address the last one stays (`STORE` with an arg), runs in order what
may meet at one address: only a loop whose iterations provably do not is vectorised, cut, or moved past others.

What is masked out is skipped as if it were 0 times a number: an infinity or a NaN on the other side does not show.

The order in which a reduction is added up, and with it the bits, follows from `lanes`, `online` and from some of `unroll`
(`neighbours.sums`); the rest changes only when and where things are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manygrad.runtime.codegen.describe import Signature
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

KINDS = (
    "before",
    "vectorise",
    "lanes",
    "tile",
    "unroll",
    "dot",
    "skip",
    "stage",
    "block",
    "reduce_block",
    "keep",
    "online",
    "prefetch",
    "align",
    "stream",
    "parallelise",
)


@dataclass(frozen=True)
class Opt:
    """One decision about the range with id `axis`."""

    kind: str
    axis: int
    amount: int

    def __repr__(self) -> str:
        return f"{self.kind}({self.axis}, {self.amount})"


@dataclass
class Plan:
    """The decisions as the lowering reads them."""

    loops: tuple[UOp, ...]
    lane: UOp | None = None  # the loop that is vectorised
    lanes: int = 1
    reduce_lanes: dict[UOp, int] = field(default_factory=dict)
    tile: dict[UOp, int] = field(default_factory=dict)  # range -> elements
    parallel: int = 0
    block: dict[UOp, int] = field(default_factory=dict)  # loop -> tiles a block; one entry at most
    reduce_block: tuple[UOp, int] | None = None
    dots: dict[UOp, int] = field(default_factory=dict)  # reduce range -> iterations in a lane
    skipped: set[UOp] = field(default_factory=set)  # reduce ranges
    staged: list[tuple[UOp, int]] = field(default_factory=list)  # (loop, argument)
    kept: list[tuple[UOp, UOp]] = field(default_factory=list)  # (reduce range, where the same is computed again)
    online: list[tuple[UOp, UOp]] = field(default_factory=list)  # (reduce range of the sum, of the maximum)
    prefetched: list[tuple[UOp, int]] = field(default_factory=list)  # (range, argument)
    aligned: UOp | None = None  # the loop of vectors that begin where what they store is aligned
    streamed: list[int] = field(default_factory=list)  # arguments

    def next_tile(self, load: UOp, r: UOp) -> UOp | None:
        """The loop of which `load`, read along `r`, is asked for one tile ahead: the innermost one around `r` that moves it."""
        depends, around = ranges_of(load), self.loops[: self.loops.index(r)] if r in self.loops else self.loops
        return next((x for x in reversed(around) if x in depends), None) if r in depends else None

    @property
    def packed_in_blocks(self) -> tuple[UOp, ...]:
        """Loops at which only a block of a blocked reduction is packed: the blocked one and those inside of it."""
        return self.loops[self.loops.index(next(iter(self.block))) :] if self.reduce_block is not None else ()

    @property
    def counts(self) -> tuple[tuple[UOp, int], ...]:
        """(size, step) of the loops that make up the parallel loop."""
        return tuple((r.src[0], self.tile.get(r, 1) * self.block.get(r, 1)) for r in self.loops[: self.parallel])


def make_plan(sig: Signature, opts: tuple[Opt, ...]) -> Plan:
    """Reads a list of `Opt`. Raises ValueError for one that does not fit the kernel."""
    ranges = {u.arg[0]: u for u in sig.nodes if u.op is Ops.RANGE}
    plan = Plan(sig.loops)
    for opt in opts:
        if opt.kind not in KINDS:
            raise ValueError(f"unknown kind of Opt: {opt}; the kinds are {', '.join(KINDS)}")
        if opt.kind == "parallelise":
            if not 0 <= opt.amount <= len(sig.loops):
                raise ValueError(f"{opt}: the kernel has {len(sig.loops)} loops")
            plan.parallel = opt.amount
            continue
        if opt.kind == "stream":
            plan.streamed.append(opt.amount)
            continue
        r = ranges.get(opt.axis)
        if r is None:
            raise ValueError(f"{opt}: the kernel has no range {opt.axis}; it has {sorted(ranges)}")
        if opt.kind != "prefetch" and (r.arg[1] == "loop") == (
            opt.kind in ("lanes", "unroll", "dot", "skip", "reduce_block", "keep", "online")
        ):
            raise ValueError(f"{opt} does not apply to a {r.arg[1]} range")
        match opt.kind:
            case "vectorise":
                plan.lane, plan.lanes = r, opt.amount
                plan.tile[r] = max(opt.amount, plan.tile.get(r, 1))
            case "lanes":
                plan.reduce_lanes[r] = opt.amount
                plan.tile[r] = max(opt.amount, plan.tile.get(r, 1))
            case "tile" | "unroll":
                plan.tile[r] = opt.amount
            case "dot":
                plan.dots[r] = opt.amount
            case "skip":
                plan.skipped.add(r)
            case "before":
                others = [x for x in plan.loops if x is not r]
                where = next((i for i, x in enumerate(others) if x.arg[0] == opt.amount), None)
                if where is None:
                    raise ValueError(f"{opt}: there is no other loop {opt.amount}")
                plan.loops = (*others[:where], r, *others[where:])
            case "block":
                plan.block = {r: opt.amount}
            case "reduce_block":
                plan.reduce_block = (r, opt.amount)
            case "stage":
                plan.staged.append((r, opt.amount))
            case "align":
                plan.aligned = r
            case "prefetch":
                plan.prefetched.append((r, opt.amount))
            case "keep" | "online":
                if opt.amount not in ranges:
                    raise ValueError(f"{opt}: the kernel has no range {opt.amount}; it has {sorted(ranges)}")
                (plan.kept if opt.kind == "keep" else plan.online).append((r, ranges[opt.amount]))
    for r, n in plan.dots.items():
        plan.tile[r] = max(plan.tile.get(r, 1), n * plan.reduce_lanes.get(r, 1))
    for r, lanes in [*plan.reduce_lanes.items(), *([(plan.lane, plan.lanes)] if plan.lane is not None else [])]:
        if plan.tile[r] % lanes:
            raise ValueError(f"the tile of range {r.arg[0]} ({plan.tile[r]}) is no multiple of its {lanes} lanes")
    for r, n in plan.dots.items():
        if plan.tile[r] % (each := n * plan.reduce_lanes.get(r, 1)):
            raise ValueError(
                f"the tile of range {r.arg[0]} ({plan.tile[r]}) is no multiple of the {each} iterations in its lanes"
            )
    wanted = (
        1 + plan.loops.index(next(iter(plan.block)))
        if plan.block and plan.reduce_block is not None
        else len(plan.loops)
    )
    if plan.block and plan.parallel != wanted:
        raise ValueError(
            f"a block needs {'all loops up to its own' if plan.reduce_block is not None else 'all loops'} in the parallel loop"
        )
    if plan.reduce_block is not None:
        k, per = plan.reduce_block
        if not plan.block or k.src[0].op is not Ops.CONST or per % plan.tile.get(k, 1):
            raise ValueError(
                f"reduce_block({k.arg[0]}, {per}) needs a block, a fixed size, and a multiple of the tile {plan.tile.get(k, 1)}"
            )
    return plan


def canonical(sig: Signature, opts: tuple[Opt, ...]) -> tuple[Opt, ...]:
    """The shortest list of the same meaning, its kinds in the order of `KINDS`: equal plans give equal lists."""
    plan = make_plan(sig, opts)
    found: list[Opt] = []
    order = list(sig.loops)
    for i, r in enumerate(plan.loops):
        if order[i] is not r:
            found.append(Opt("before", r.arg[0], order[i].arg[0]))
            order.remove(r)
            order.insert(i, r)
    lanes = dict(plan.reduce_lanes)
    if plan.lane is not None and plan.lanes > 1:
        found.append(Opt("vectorise", plan.lane.arg[0], plan.lanes))
        lanes[plan.lane] = plan.lanes
    found += [Opt("lanes", r.arg[0], n) for r, n in plan.reduce_lanes.items()]
    lanes.update((r, n * lanes.get(r, 1)) for r, n in plan.dots.items())
    for kind in ("tile", "unroll"):
        found += sorted(
            (
                Opt(kind, r.arg[0], n)
                for r, n in plan.tile.items()
                if (r.arg[1] == "loop") == (kind == "tile") and n != lanes.get(r, 1)
            ),
            key=lambda o: o.axis,
        )
    found += sorted((Opt("dot", r.arg[0], n) for r, n in plan.dots.items()), key=lambda o: o.axis)
    found += sorted((Opt("skip", r.arg[0], 1) for r in plan.skipped), key=lambda o: o.axis)
    found += sorted((Opt("stage", r.arg[0], slot) for r, slot in plan.staged), key=lambda o: (o.amount, o.axis))
    found += [Opt("block", r.arg[0], n) for r, n in plan.block.items()]
    if plan.reduce_block is not None:
        found.append(Opt("reduce_block", plan.reduce_block[0].arg[0], plan.reduce_block[1]))
    found += sorted((Opt("keep", r.arg[0], again.arg[0]) for r, again in plan.kept), key=lambda o: (o.axis, o.amount))
    found += sorted((Opt("online", r.arg[0], x.arg[0]) for r, x in plan.online), key=lambda o: o.axis)
    found += sorted((Opt("prefetch", r.arg[0], slot) for r, slot in plan.prefetched), key=lambda o: (o.axis, o.amount))
    if plan.aligned is not None:
        found.append(Opt("align", plan.aligned.arg[0], 1))
    found += [Opt("stream", -1, slot) for slot in sorted(plan.streamed)]
    if plan.parallel:
        found.append(Opt("parallelise", -1, plan.parallel))
    return tuple(found)
