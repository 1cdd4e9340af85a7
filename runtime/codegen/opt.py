"""Optimisation decisions: named and inspectable, so that a heuristic or a search can pick them.

| kind | axis | amount |
|---|---|---|
| `vectorise` | a loop range | lanes: neighbouring iterations in one vector |
| `lanes` | a reduce range | lanes: partial accumulators in one vector, folded at the end (split-reduce) |
| `tile` | a loop range | elements kept in registers at once (a multiple of its lanes) |
| `unroll` | a reduce range | iterations written out, in order |
| `before` | a loop range | id of another loop range: moved directly outside of it |
| `stage` | a loop range | argument number: for each of the loop's tiles, what the reduction reads of that argument is packed into local memory |
| `block` | a loop range | tiles that one piece of the parallel loop runs through, inside of all other loops |
| `reduce_block` | a reduce range, the outermost | iterations that all tiles of the block do before the next ones; sums rest in local memory |
| `parallelise` | -1 | how many of the outermost loops are cut over the threads |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from manygrad.runtime.codegen.describe import Signature
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp


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
    staged: list[tuple[UOp, int]] = field(default_factory=list)  # (loop, argument)

    @property
    def counts(self) -> tuple[tuple[UOp, int], ...]:
        """(size, step) of the loops that make up the parallel loop."""
        return tuple((r.src[0], self.tile.get(r, 1) * self.block.get(r, 1)) for r in self.loops[: self.parallel])


def make_plan(sig: Signature, opts: tuple[Opt, ...]) -> Plan:
    """Reads a list of `Opt`. Raises ValueError for one that does not fit the kernel."""
    ranges = {u.arg[0]: u for u in sig.nodes if u.op is Ops.RANGE}
    plan = Plan(sig.loops)
    for opt in opts:
        if opt.kind == "parallelise":
            if not 0 <= opt.amount <= len(sig.loops):
                raise ValueError(f"{opt}: the kernel has {len(sig.loops)} loops")
            plan.parallel = opt.amount
            continue
        r = ranges.get(opt.axis)
        if r is None:
            raise ValueError(f"{opt}: the kernel has no range {opt.axis}; it has {sorted(ranges)}")
        if (r.arg[1] == "loop") == (opt.kind in ("lanes", "unroll", "reduce_block")):
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
            case _:
                raise ValueError(f"unknown kind of Opt: {opt}")
    for r, lanes in [*plan.reduce_lanes.items(), *([(plan.lane, plan.lanes)] if plan.lane is not None else [])]:
        if plan.tile[r] % lanes:
            raise ValueError(f"the tile of range {r.arg[0]} ({plan.tile[r]}) is no multiple of its {lanes} lanes")
    if plan.block and plan.parallel != len(plan.loops):
        raise ValueError("a block needs all loops in the parallel loop")
    if plan.reduce_block is not None:
        k, per = plan.reduce_block
        if not plan.block or k.src[0].op is not Ops.CONST or per % plan.tile.get(k, 1):
            raise ValueError(
                f"reduce_block({k.arg[0]}, {per}) needs a block, a fixed size, and a multiple of the tile {plan.tile.get(k, 1)}"
            )
    return plan
