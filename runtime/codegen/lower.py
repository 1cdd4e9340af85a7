"""Lowers a kernel AST under a plan to the linear form of `lowered.py`.

The expression graph is evaluated once per register-tile position. What does not depend on a position is shared through
a memo; what does not depend on an inner loop is emitted in the block of the outermost loop it does depend on. So of a
matrix product only the FMA is emitted per pair (row, column vector), a row's broadcast load once per row, and its
address outside the reduction.

before:  STORE(INDEX(c, m*N+n), REDUCE(MUL(LOAD(INDEX(a, m*K+k)), LOAD(INDEX(b, k*N+n))), k), m, n)
after:   LOOP m.. LOOP n.. ACC x 24; LOOP k.. LOAD b x 4, LOAD a x 6, FMA x 24; END; STORE x 24; END END

Order of a reduction: ascending in its ranges; with `lanes`, element k goes to partial sum k mod tile, and the partial
sums are folded pairwise at the end. It does not depend on the tiles of the loops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from manygrad.runtime.codegen.affine import Affine, Atom, Position, TileAnalysis, index_sum
from manygrad.runtime.codegen.describe import Signature, bounds, kernel_name, ranges_of, signature
from manygrad.runtime.codegen.lowered import Inst, Low, Program
from manygrad.runtime.codegen.opt import Plan
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.uop import UOp

INDEX = dtypes.index
IDENTITY = {Ops.ADD: lambda d: 0, Ops.MUL: lambda d: 1, Ops.MAX: lambda d: d.min}


class Block:
    """An open block: what was emitted in it, and what is known there."""

    def __init__(self, begin: Inst | None = None) -> None:
        self.begin = begin
        self.insts: list[Inst] = []
        self.known: dict[Any, Inst] = {}  # (op, dtype, lanes, src, arg) -> the same instruction
        self.values: dict[Any, Inst] = {}  # (expression, position) -> its value


@dataclass
class Stage:
    """A value packed into local memory at every tile of `loop`: element [i of `ranges`..., position in the tile]."""

    loop: UOp
    ranges: tuple[UOp, ...]
    row: UOp  # the joint index of `ranges`
    tile: int
    offset_bytes: int
    ready: bool = False


class Lowerer:
    def __init__(self, ast: UOp, plan: Plan) -> None:
        self.sig: Signature = signature(ast)
        self.plan = plan
        self.blocks: list[Block] = [Block()]
        self.origin: dict[UOp, Inst] = {}  # range -> index of the tile's first iteration
        self.tile: dict[UOp, int] = {}  # range -> iterations in the tile that is being emitted
        self.ragged: dict[
            UOp, Inst | None
        ] = {}  # range whose last vector is partial -> its size, if only known at run time
        self.open_reduces: list[UOp] = list(self.sig.reduces)
        self.running: set[UOp] = set()  # REDUCEs whose loops are open
        self.lane: UOp | None = None
        self.lanes = 1
        self._analyses: dict[UOp | None, TileAnalysis] = {}
        self.use_lane(plan.lane, plan.lanes)
        self.scratch_bytes = 0
        self.stages: dict[UOp, Stage] = {}
        self.changed: dict[UOp, Inst] = {}  # loop inside a joint parallel loop -> whether it has just moved on
        self.packing = False
        for r, slot in plan.staged:
            self.plan_stage(r, slot)

    # *** emission ***

    def emit(
        self,
        op: Ops | Low,
        dtype: DType,
        src: tuple[Inst, ...] = (),
        arg: Any = None,
        lanes: int = 1,
        here: bool = False,
    ) -> Inst:
        """The instruction, in the outermost block where its sources are known; `here`: a new one in this block."""
        depth = len(self.blocks) - 1 if here else max((s.depth for s in src), default=0)
        block = self.blocks[depth]
        key = (op, dtype, lanes, src, _key(arg))
        if not here and (found := block.known.get(key)) is not None:
            return found
        inst = Inst(op, dtype, lanes, src, arg, depth)
        block.insts.append(inst)
        if not here:
            block.known[key] = inst
        return inst

    def open(self, begin: Inst | None = None) -> None:
        self.blocks.append(Block(begin))

    def close(self) -> None:
        block = self.blocks.pop()
        into = self.blocks[-1].insts
        if block.begin is not None:
            into.append(block.begin)
        into.extend(block.insts)
        if block.begin is not None:
            into.append(Inst(Low.END, dtypes.void, 1, (), None, len(self.blocks) - 1))

    def const(self, value: Any, dtype: DType = INDEX, lanes: int = 1) -> Inst:
        return self.emit(Low.CONST, dtype, (), value, lanes)

    def add(self, a: Inst, b: Inst) -> Inst:
        if b.op is Low.CONST and b.arg == 0:
            return a
        if a.op is Low.CONST and a.arg == 0:
            return b
        return self.emit(Ops.ADD, INDEX, (a, b))

    def splat(self, x: Inst, lanes: int) -> Inst:
        if x.lanes == lanes:
            return x
        if x.op is Low.CONST:
            return self.emit(Low.CONST, x.dtype, (), x.arg, lanes)
        return self.emit(Low.SPLAT, x.dtype, (x,), None, lanes)

    def alu(self, op: Ops | Low, dtype: DType, *src: Inst, arg: Any = None) -> Inst:
        """`op` on values, scalars broadcast where there is a vector."""
        lanes = max(s.lanes for s in src)
        return self.emit(op, dtype, tuple(self.splat(s, lanes) for s in src), arg, lanes)

    # *** which lane, which masks ***

    def use_lane(self, lane: UOp | None, lanes: int) -> None:
        self.lane, self.lanes = lane, lanes if lane is not None else 1
        if lane not in self._analyses:
            aligned = {}
            for r, t in self.plan.tile.items():
                fixed = r.src[0].op is Ops.CONST
                aligned[r] = t if fixed else self.lanes if r is lane else 1
            self._analyses[lane] = TileAnalysis(aligned, lane, self.lanes)
        self.analysis = self._analyses[lane]

    def ragged_mask(self, position: Position) -> Inst | None:
        """The lanes at `position` that are within the lane's range; None: all."""
        if self.lane is None or self.lane not in self.ragged:
            return None
        at, size = position.get(self.lane, 0), self.ragged[self.lane]
        if size is None:
            active = self.tile[self.lane] - at
            return None if active >= self.lanes else self.emit(Low.FIRST, dtypes.bool, (), active, self.lanes)
        left = self.emit(Ops.SUB, INDEX, (size, self.origin[self.lane]))
        left = left if at == 0 else self.add(left, self.const(-at))
        return self.alu(Ops.CMPLT, dtypes.bool, self.iota(), left)

    def iota(self) -> Inst:
        return self.emit(Low.IOTA, INDEX, (), None, self.lanes)

    def positions(self, ranges: frozenset[UOp]) -> Iterator[dict[UOp, int]]:
        """The tile positions along `ranges`, in order; along the lane's range, one a vector."""
        tiled = [r for r in (*self.plan.loops, *self.tile) if r in ranges and self.tile.get(r, 1) > 1]
        tiled = list(dict.fromkeys(tiled))
        steps = [range(0, self.tile[r], self.lanes if r is self.lane else 1) for r in tiled]
        for at in itertools.product(*steps):
            yield dict(zip(tiled, at))

    # *** values ***

    def find(self, u: UOp, position: Position) -> Inst | None:
        key = self.analysis.at(u, position)
        for block in reversed(self.blocks):
            found = block.values.get(key)
            if found is not None:
                return found
        return None

    def remember(self, u: UOp, position: Position, inst: Inst) -> Inst:
        self.blocks[inst.depth].values[self.analysis.at(u, position)] = inst
        return inst

    def value(self, root: UOp, position: Position) -> Inst:
        """The value of `root` at a tile position: a scalar where all lanes agree, else a vector."""
        stack = [root]
        while stack:
            u = stack[-1]
            if self.find(u, position) is not None:
                stack.pop()
                continue
            inst = self.leaf(u, position)
            if inst is None:
                missing = [s for s in u.src if self.find(s, position) is None]
                if missing:
                    stack.extend(missing)
                    continue
                inst = self.combine(u, [self.find(s, position) for s in u.src])  # type: ignore[misc]
            self.remember(u, position, inst)
            stack.pop()
        found = self.find(root, position)
        assert found is not None
        return found

    def leaf(self, u: UOp, position: Position) -> Inst | None:
        """What needs more than the values of its sources; None for plain arithmetic."""
        if u in self.stages and self.stages[u].ready:
            return self.staged_load(u, self.stages[u], position)
        match u.op:
            case Ops.CONST:
                return self.const(u.arg, u.dtype)
            case Ops.DEFINE_VAR:
                return self.emit(Low.VAR, INDEX, (), self.sig.variables.index(u))
            case Ops.LOAD:
                return self.load(u, position)
            case Ops.REDUCE:
                raise AssertionError("a REDUCE is used outside the loops it depends on")
        if u.dtype is INDEX:
            a = self.analysis.affine(u, position)
            if a is not None and (u.op is Ops.RANGE or a != Affine(((self.analysis.at(u, position), 1),), 0, 0)):
                return self.affine_value(a)
        elif u.op in GroupOp.COMPARE and u.src[0].dtype is INDEX:
            return self.compare(u, position)
        return None

    def combine(self, u: UOp, src: list[Inst]) -> Inst:
        if u.op is Ops.CUSTOM:
            return self.alu({"fma": Low.FMA, "round": Low.ROUND}[u.arg], u.dtype, *src)
        if u.op not in GroupOp.ELEMENTWISE:
            _unknown(u)
        return self.alu(u.op, u.dtype, *src, arg=_sign(u) if u.dtype is INDEX else None)

    def scalar(self, u: UOp) -> Inst:
        """An index expression at the tile's origin, lane 0."""
        if u.op is Ops.RANGE:
            return self.origin[u]
        if (
            self.lane is None
            or self.lane not in ranges_of(u)
            or u.op not in (Ops.ADD, Ops.SUB, Ops.MUL, Ops.NEG, Ops.IDIV, Ops.MOD)
        ):
            inst = self.value(u, {})
            assert inst.lanes == 1
            return inst
        return self.emit(u.op, u.dtype, tuple(self.scalar(s) for s in u.src), _sign(u))

    def atom(self, atom: Atom) -> Inst:
        u = atom.expr
        if u.op is Ops.RANGE:
            return self.origin[u]
        if u in self.analysis.normal:
            return self.emit(u.op, INDEX, tuple(self.scalar(s) for s in u.src), _sign(u))
        inst = self.value(u, dict(atom.position))
        assert inst.lanes == 1, "an atom must not change with the lane"
        return inst if inst.dtype is INDEX else self.emit(Ops.CAST, INDEX, (inst,))

    def base(self, a: Affine) -> Inst:
        """The sum of the atoms, those of outer blocks first."""
        parts = [(self.atom(x), c) for x, c in a.terms]
        total = self.const(0)
        for inst, c in sorted(parts, key=lambda p: p[0].depth):
            total = self.add(total, inst if c == 1 else self.emit(Ops.MUL, INDEX, (inst, self.const(c))))
        return total

    def affine_value(self, a: Affine) -> Inst:
        total = self.add(self.base(a), self.const(a.constant))
        if not a.stride or self.lanes == 1:
            return total
        ramp = self.iota()
        if a.stride != 1:
            ramp = self.alu(Ops.MUL, INDEX, ramp, self.const(a.stride))
        return self.alu(Ops.ADD, INDEX, self.splat(total, self.lanes), ramp)

    def compare(self, u: UOp, position: Position) -> Inst | None:
        """A comparison of indices: scalar where the lanes agree, else a constant ramp against a broadcast bound."""
        same = self.analysis.compare(u, position)
        if isinstance(same, bool):
            return self.const(same, dtypes.bool)
        if same is not None:
            left = self.base(same)
            return self.emit(u.op, dtypes.bool, (left, self.const(-same.constant)))
        a, b = (self.analysis.affine(s, position) for s in u.src)
        if a is None or b is None or self.lanes == 1:
            return None
        left, right = self.base(a), self.base(b)
        bound = self.add(self.emit(Ops.SUB, INDEX, (right, left)), self.const(b.constant - a.constant))
        ramp = self.alu(Ops.MUL, INDEX, self.iota(), self.const(a.stride - b.stride))
        return self.alu(u.op, dtypes.bool, ramp, bound)

    # *** memory ***

    def pointer(self, param: UOp) -> Inst:
        return self.emit(Low.PARAM, param.dtype, (), param.arg)

    def conjunction(self, *conditions: Inst | None) -> Inst | None:
        """All of them; None: true."""
        total: Inst | None = None
        for c in conditions:
            if c is None or (c.op is Low.CONST and c.arg):
                continue
            if c.op is Low.CONST:
                return self.const(False, dtypes.bool)
            total = c if total is None else self.alu(Ops.AND, dtypes.bool, total, c)
        return total

    def load(self, u: UOp, position: Position) -> Inst:
        index = u.src[0]
        valid = self.conjunction(self.value(index.src[2], position)) if len(index.src) == 3 else None
        if valid is not None and valid.op is Low.CONST:
            return self.const(0, u.dtype)
        a = self.analysis.affine(index.src[1], position)
        pointer = self.pointer(index.src[0])
        if a is not None and (a.stride == 0 or self.lanes == 1):
            found = self.scalar_load(u.dtype, pointer, a, valid)
            if valid is not None and valid.lanes > 1:
                return self.alu(Ops.WHERE, u.dtype, valid, found, self.const(0, u.dtype))
            return found
        mask = self.ragged_mask(position)
        if a is not None and a.stride == 1:
            guard = self.conjunction(valid, mask)
            return self.emit(
                Low.LOAD, u.dtype, (pointer, self.base(a), *(() if guard is None else (guard,))), a.constant, self.lanes
            )
        if a is not None and a.stride == -1 and mask is None and (valid is None or valid.lanes == 1):
            src = (pointer, self.base(a), *(() if valid is None else (valid,)))
            return self.emit(
                Low.REVERSE,
                u.dtype,
                (self.emit(Low.LOAD, u.dtype, src, a.constant - self.lanes + 1, self.lanes),),
                None,
                self.lanes,
            )
        offset = self.splat(self.value(index.src[1], position), self.lanes)
        guard = self.conjunction(valid, mask)
        guards = () if guard is None else (self.splat(guard, self.lanes),)
        return self.emit(Low.LOAD, u.dtype, (pointer, offset, *guards), 0, self.lanes)

    def scalar_load(self, dtype: DType, pointer: Inst, a: Affine, valid: Inst | None) -> Inst:
        if valid is not None and valid.lanes > 1:
            valid = self.emit(Low.ANY, dtypes.bool, (valid,))
        return self.emit(Low.LOAD, dtype, (pointer, self.base(a), *(() if valid is None else (valid,))), a.constant)

    # *** staging ***

    def plan_stage(self, loop: UOp, slot: int) -> None:
        """Prepares to pack what REDUCEs read of argument `slot`, converted if it is read through a conversion."""
        users = {s: u for u in self.sig.nodes for s in u.src if u.op is Ops.CAST and u.dtype.is_float and s.op is Ops.LOAD}
        order = self.plan.loops
        outside = frozenset(order[: order.index(loop) + 1])
        for load in (u for u in self.sig.nodes if u.op is Ops.LOAD and u.src[0].src[0].arg == slot):
            u = users.get(load, load)
            ranges = tuple(r for v in self.sig.reduces for r in v.src[1:] if r in ranges_of(u))
            ranges = tuple(dict.fromkeys(ranges))
            if loop not in ranges_of(u) or not ranges_of(u) <= outside | frozenset(ranges) or any(r.src[0].op is not Ops.CONST for r in ranges):
                raise ValueError(f"argument {slot} cannot be staged at loop {loop.arg[0]}: it changes with a loop inside it")
            sizes = [r.src[0].arg for r in ranges]
            tile = self.plan.tile.get(loop, 1)
            row = index_sum(tuple((r, math.prod(sizes[i + 1 :]) * tile) for i, r in enumerate(ranges)), 0)
            self.stages[u] = Stage(loop, ranges, row, tile, self.scratch_bytes)
            self.scratch_bytes += -(-math.prod(sizes) * tile * u.dtype.itemsize // 64) * 64

    def staged_at(self, u: UOp, stage: Stage, position: Position) -> tuple[Inst, Inst, int, int]:
        """(pointer, offset, constant, lanes) of an element of a stage."""
        a = self.analysis.affine(stage.row, position)
        assert a is not None and a.stride == 0
        pointer = self.emit(Low.SCRATCH, u.dtype, (), stage.offset_bytes)
        return pointer, self.base(a), a.constant + position.get(stage.loop, 0), self.lanes if stage.loop is self.lane else 1

    def staged_load(self, u: UOp, stage: Stage, position: Position) -> Inst:
        pointer, offset, constant, lanes = self.staged_at(u, stage, position)
        # never hoisted out of the tile: its contents change with it
        if offset.depth < self.origin[stage.loop].depth:
            offset = self.emit(Ops.ADD, INDEX, (offset, self.const(0)), here=True)
        return self.emit(Low.LOAD, u.dtype, (pointer, offset), constant, lanes)

    def pack(self, loop: UOp) -> None:
        """Fills the stages of `loop` for the tile that is open now, unless they hold it already."""
        stages = {u: s for u, s in self.stages.items() if s.loop is loop}
        if not stages:
            return
        changed = self.changed.get(loop)
        if changed is not None:
            self.open(Inst(Low.IF, dtypes.void, 1, (changed,), None, len(self.blocks)))
        self.packing = True
        for u, stage in stages.items():
            stage.ready = False
            self.pack_ranges(u, stage, 0)
        self.packing = False
        if changed is not None:
            self.close()
        for stage in stages.values():
            stage.ready = True

    def pack_ranges(self, u: UOp, stage: Stage, i: int) -> None:
        if i < len(stage.ranges):
            self.loop(stage.ranges[i], lambda: self.pack_ranges(u, stage, i + 1))
            return
        for position in self.positions(frozenset((stage.loop, *stage.ranges))):
            pointer, offset, constant, lanes = self.staged_at(u, stage, position)
            value = self.splat(self.value(u, position), lanes)
            self.emit(Low.STORE, dtypes.void, (pointer, offset, value), constant, lanes, here=True)

    # *** stores ***

    def stores(self) -> None:
        """All STOREs at all positions of the tile; at one position, every value is computed before the first is stored."""
        for position in self.positions(frozenset(self.plan.loops)):
            ready = [self.prepare_store(u, position) for u in self.sig.stores]
            for write in ready:
                write()

    def prepare_store(self, u: UOp, position: Position) -> Callable[[], None]:
        index = u.src[0]
        value = self.value(u.src[1], position)
        valid = self.conjunction(self.value(index.src[2], position)) if len(index.src) == 3 else None
        if valid is not None and valid.op is Low.CONST:
            return lambda: None
        a = self.analysis.affine(index.src[1], position)
        pointer = self.pointer(index.src[0])
        if self.lane is None:
            lanes, guard = 1, valid
        else:
            lanes, guard = self.lanes, self.conjunction(valid, self.ragged_mask(position))
        if a is not None and (lanes == 1 or a.stride == 1):
            offset, constant = self.base(a), a.constant
        else:
            offset, constant = self.splat(self.value(index.src[1], position), lanes), 0
        if guard is not None and offset.lanes > 1:
            guard = self.splat(guard, lanes)
        guards = () if guard is None else (guard,)
        value = self.splat(value, lanes)

        def write() -> None:
            new = value
            if u.arg == "add":
                old = self.emit(Low.LOAD, value.dtype, (pointer, offset, *guards), constant, lanes, here=True)
                terms = [old, value]
                if value.dtype.is_half:
                    terms = [self.emit(Ops.CAST, dtypes.float32, (x,), None, lanes, here=True) for x in terms]
                new = self.emit(Ops.ADD, terms[0].dtype, tuple(terms), None, lanes, here=True)
                if value.dtype.is_half:
                    new = self.emit(Ops.CAST, value.dtype, (new,), None, lanes, here=True)
            self.emit(Low.STORE, dtypes.void, (pointer, offset, new, *guards), constant, lanes, here=True)

        return write

    # *** reductions ***

    def reduces_ready(self) -> None:
        """Emits the REDUCEs whose value needs no loop that is not open yet, those over the same ranges in one loop."""
        while True:
            ready = [u for u in self.open_reduces if ranges_of(u) <= self.origin.keys() and self.inner_done(u)]
            if not ready:
                return
            first = ready[0]
            group = [
                u
                for u in ready
                if u.src[1:] == first.src[1:] and (self.lane in ranges_of(u)) == (self.lane in ranges_of(first))
            ]
            self.open_reduces = [u for u in self.open_reduces if u not in group]
            self.running.update(group)
            self.reduce(group)
            self.running.difference_update(group)

    def inner_done(self, u: UOp) -> bool:
        """Whether all REDUCEs that `u` reads and that do not depend on its own ranges have been emitted."""
        own = frozenset(u.src[1:])
        below = u._cache.get("reduces_below")
        if below is None:
            below = u._cache["reduces_below"] = [v for v in u.src[0].toposort() if v.op is Ops.REDUCE]
        return not any(
            (v in self.open_reduces or v in self.running) and not (ranges_of(v) & own) and self.within(v, u)
            for v in below
        )

    def within(self, v: UOp, u: UOp) -> bool:
        """Whether `v` can be emitted before `u`'s loops: always so unless it needs a range that only an inner REDUCE opens."""
        return ranges_of(v) <= (self.origin.keys() | frozenset(u.src[1:]))

    def reduce(self, group: list[UOp]) -> None:
        ranges = group[0].src[1:]
        outer_lane = (self.lane, self.lanes)
        split = None
        if self.lane is None or self.lane not in ranges_of(group[0]):
            split = next((r for r in ranges if r in self.plan.reduce_lanes), None)
            self.use_lane(split, self.plan.reduce_lanes.get(split, 1) if split is not None else 1)
        accumulators: list[tuple[UOp, dict[UOp, int], list[Inst]]] = []
        parts = range(0, self.plan.tile[split], self.lanes) if split is not None else range(1)
        for u in group:
            identity = u.dtype.const(IDENTITY[u.arg](u.dtype))
            for position in self.positions(ranges_of(u)):
                lanes = self.lanes if self.lane is not None else 1
                accs = [
                    self.emit(Low.ACC, u.dtype, (self.const(identity, u.dtype, lanes),), None, lanes, here=True)
                    for _ in parts
                ]
                accumulators.append((u, position, accs))

        def body(i: int) -> None:
            if i < len(ranges):
                self.loop(ranges[i], lambda: body(i + 1))
                return
            for at in self.positions(frozenset(ranges)):
                for u, position, accs in accumulators:
                    part = at.get(split, 0) // self.lanes if split is not None else 0
                    self.accumulate(u, {**position, **at}, accs[part])

        body(0)
        for u, position, accs in accumulators:
            values = [self.emit(Low.GET, u.dtype, (acc,), None, acc.lanes, here=True) for acc in accs]
            while len(values) > 1:
                half = (len(values) + 1) // 2
                values = [self.alu(u.arg, u.dtype, a, b) for a, b in zip(values, values[half:])] + values[
                    len(values) - half : half
                ]
            found = values[0]
            if split is not None:
                while found.lanes > 1:
                    n = found.lanes // 2
                    lower, upper = (self.emit(Low.HALVES, u.dtype, (found,), i, n) for i in (0, 1))
                    found = self.emit(u.arg, u.dtype, (lower, upper), None, n)
            self.blocks[-1].values[self.analysis.at(u, position)] = found
        self.use_lane(*outer_lane)

    def accumulate(self, u: UOp, position: dict[UOp, int], acc: Inst) -> None:
        old = self.emit(Low.GET, u.dtype, (acc,), None, acc.lanes, here=True)
        v = u.src[0]
        if u.arg is Ops.ADD and v.op is Ops.MUL and u.dtype.is_float:
            a, b = (self.splat(self.value(s, position), acc.lanes) for s in v.src)
            new = self.emit(Low.FMA, u.dtype, (a, b, old), None, acc.lanes, here=True)
        else:
            new = self.emit(
                u.arg, u.dtype, (self.splat(self.value(v, position), acc.lanes), old), None, acc.lanes, here=True
            )
        if self.lane in u.src[1:] and (mask := self.ragged_mask(position)) is not None:
            new = self.emit(Ops.WHERE, u.dtype, (mask, new, old), None, acc.lanes, here=True)
        self.emit(Low.SET, dtypes.void, (acc, new), here=True)

    # *** loops ***

    def size(self, r: UOp) -> Inst:
        return self.value(r.src[0], {})

    def within_tile(
        self, r: UOp, origin: Inst, tile: int, body: Callable[[], None], ragged: bool = False, size: Inst | None = None
    ) -> None:
        """`body` with `r` bound to a tile at `origin`, in the innermost block."""
        self.origin[r], self.tile[r] = origin, tile
        if ragged:
            self.ragged[r] = size
        waiting = list(self.open_reduces)
        if not self.packing:
            self.pack(r)
            self.reduces_ready()
        body()
        self.open_reduces = waiting
        self.ragged.pop(r, None)
        del self.origin[r], self.tile[r]

    def lanes_of(self, r: UOp) -> int:
        return self.plan.lanes if r is self.plan.lane else self.plan.reduce_lanes.get(r, 1) if r is self.lane else 1

    def loop(self, r: UOp, body: Callable[[], None]) -> None:
        """All of `r`: whole tiles, then what is left."""
        tile, lanes = self.plan.tile.get(r, 1), self.lanes_of(r)
        if lanes == 1 and r in self.plan.reduce_lanes:
            tile = 1
        if r.src[0].op is not Ops.CONST:
            size = self.size(r)
            whole = (
                self.emit(Ops.SUB, INDEX, (size, self.emit(Ops.MOD, INDEX, (size, self.const(tile)), True)))
                if tile > 1
                else size
            )
            self.counted(r, self.const(0), whole, tile, tile, body)
            if tile > 1:
                self.counted(r, whole, size, lanes, lanes, body, ragged=lanes > 1, size=size)
            return
        size_n = r.src[0].arg
        whole_n = size_n // tile * tile
        if whole_n:
            self.counted(r, self.const(0), self.const(whole_n), tile, tile, body, once=whole_n == tile)
        if size_n > whole_n:
            self.rest(r, size_n, whole_n, lanes, body)

    def rest(self, r: UOp, size: int, whole: int, lanes: int, body: Callable[[], None]) -> None:
        self.open()
        self.within_tile(
            r, self.emit(Low.HERE, INDEX, (), whole, here=True), size - whole, body, ragged=(size - whole) % lanes != 0
        )
        self.close()

    def counted(
        self,
        r: UOp,
        begin: Inst,
        end: Inst,
        step: int,
        tile: int,
        body: Callable[[], None],
        once: bool = False,
        **ragged: Any,
    ) -> None:
        if once:
            self.open()
            self.within_tile(r, self.emit(Low.HERE, INDEX, (), 0, here=True), tile, body, **ragged)
        else:
            index = Inst(Low.LOOP, INDEX, 1, (begin, end), step, len(self.blocks))
            self.open(index)
            self.within_tile(r, index, tile, body, **ragged)
        self.close()

    def parallel_loops(self, body: Callable[[], None]) -> None:
        """The outermost loops, as one loop over this call's part of their joint tiles."""
        plan, loops = self.plan, self.plan.loops[: self.plan.parallel]
        begin, end = (self.emit(op, INDEX) for op in (Low.BEGIN, Low.FINISH))
        if len(loops) == 1:
            self.parallel_loop(loops[0], begin, end, body)
            return
        index = Inst(Low.LOOP, INDEX, 1, (begin, end), 1, len(self.blocks))
        self.open(index)
        rest, digits = index, []
        for r in reversed(loops):
            tile = plan.tile.get(r, 1)
            size = self.size(r)
            count = (
                size
                if tile == 1
                else self.emit(Ops.IDIV, INDEX, (self.add(size, self.const(tile - 1)), self.const(tile)), True)
            )
            if r is loops[0]:
                digits.append(rest)
            else:
                digits.append(self.emit(Ops.MOD, INDEX, (rest, count), True))
                rest = self.emit(Ops.IDIV, INDEX, (rest, count), True)
        digits.reverse()
        for i, r in enumerate(loops[:-1]):
            new = self.emit(Ops.CMPEQ, dtypes.bool, (index, begin))
            inner = digits[i + 1]
            for digit in digits[i + 2 :]:
                inner = self.emit(Ops.OR, INDEX, (inner, digit))
            first = self.emit(Ops.CMPEQ, dtypes.bool, (inner, self.const(0)))
            self.changed[r] = self.emit(Ops.OR, dtypes.bool, (new, first))

        def bind(i: int) -> None:
            if i == len(loops):
                body()
                return
            r = loops[i]
            tile, lanes = plan.tile.get(r, 1), self.lanes_of(r)
            origin = self.emit(Ops.MUL, INDEX, (digits[i], self.const(tile))) if tile > 1 else digits[i]
            mine = lambda: self.emit(Ops.ADD, INDEX, (origin, self.const(0)), here=True)  # noqa: E731  not shared with the other branch
            static = r.src[0].op is Ops.CONST
            if tile == 1 or (static and r.src[0].arg % tile == 0):
                self.open()
                self.within_tile(r, origin, tile, lambda: bind(i + 1))
                self.close()
                return
            size = self.size(r)
            whole = self.emit(Ops.SUB, INDEX, (size, self.emit(Ops.MOD, INDEX, (size, self.const(tile)), True)))
            inside = self.emit(
                Ops.CMPLT, dtypes.bool, (origin, self.const(r.src[0].arg // tile * tile) if static else whole)
            )
            condition = Inst(Low.IF, dtypes.void, 1, (inside,), None, len(self.blocks))
            self.open(condition)
            self.within_tile(r, mine(), tile, lambda: bind(i + 1))
            then = (
                self.blocks.pop().insts
            )  # put in place with the other branch: what that one hoists stands before both
            self.open(Inst(Low.ELSE, dtypes.void, 1, (), None, len(self.blocks)))
            if static:
                n, w = r.src[0].arg, r.src[0].arg // tile * tile
                self.rest(r, n, w, lanes, lambda: bind(i + 1))
            else:
                self.counted(r, mine(), size, lanes, lanes, lambda: bind(i + 1), ragged=lanes > 1, size=size)
            other = self.blocks.pop()
            assert other.begin is not None
            end = Inst(Low.END, dtypes.void, 1, (), None, len(self.blocks) - 1)
            self.blocks[-1].insts.extend([condition, *then, other.begin, *other.insts, end])

        bind(0)
        self.close()

    def parallel_loop(self, r: UOp, begin: Inst, end: Inst, body: Callable[[], None]) -> None:
        """One parallel loop: from begin to end in tiles, the last of which may be partial."""
        tile, lanes = self.plan.tile.get(r, 1), self.lanes_of(r)
        first = self.emit(Ops.MUL, INDEX, (begin, self.const(tile))) if tile > 1 else begin
        last = self.emit(Ops.MUL, INDEX, (end, self.const(tile))) if tile > 1 else end
        static = r.src[0].op is Ops.CONST
        if tile == 1 or (static and r.src[0].arg % tile == 0):
            self.counted(r, first, last, tile, tile, body)
            return
        size = self.size(r)
        whole = (
            self.const(r.src[0].arg // tile * tile)
            if static
            else self.emit(Ops.SUB, INDEX, (size, self.emit(Ops.MOD, INDEX, (size, self.const(tile)), True)))
        )
        beyond = self.emit(Ops.CMPLT, dtypes.bool, (whole, last))
        stop = self.emit(Ops.WHERE, INDEX, (beyond, whole, last))
        if not static or r.src[0].arg >= tile:
            self.counted(r, first, stop, tile, tile, body)
        self.open(Inst(Low.IF, dtypes.void, 1, (beyond,), None, len(self.blocks)))
        if static:
            self.rest(r, r.src[0].arg, r.src[0].arg // tile * tile, lanes, body)
        else:
            self.counted(r, whole, size, lanes, lanes, body, ragged=lanes > 1, size=size)
        self.close()

    def run(self, name: str) -> Program:
        plan = self.plan

        def nest(i: int) -> None:
            if i == len(plan.loops):
                self.stores()
            else:
                self.loop(plan.loops[i], lambda: nest(i + 1))

        self.reduces_ready()
        if plan.parallel:
            self.parallel_loops(lambda: nest(plan.parallel))
        else:
            nest(0)
        counts = tuple((r.src[0], plan.tile.get(r, 1)) for r in plan.loops[: plan.parallel])
        return Program(name, tuple(self.blocks[0].insts), self.sig.variables, self.sig.slots, counts, self.scratch_bytes)


def _key(arg: Any) -> Any:
    return (type(arg), arg.hex()) if type(arg) is float else (type(arg), arg)


def _sign(u: UOp) -> bool | None:
    """For quotients and remainders of indices: whether the dividend is known not to be negative."""
    return bounds(u.src[0])[0] >= 0 if u.op in (Ops.IDIV, Ops.MOD) else None


def _unknown(u: UOp) -> Any:
    raise NotImplementedError(f"{u.op.name} has no meaning inside a kernel")


def lower(ast: UOp, plan: Plan, name: str | None = None) -> Program:
    """The program of `ast` under `plan`."""
    return Lowerer(ast, plan).run(name or kernel_name(ast))
