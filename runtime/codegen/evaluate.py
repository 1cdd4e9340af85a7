"""Values of expressions at a position of the current tile: arithmetic, indices and loads.

A value is a scalar where all lanes agree and a vector elsewhere. Each is remembered under what of the position it
depends on, in the block where it stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manygrad.runtime.codegen.affine import Affine, Atom, Position, TileAnalysis
from manygrad.runtime.codegen.describe import Signature, conjuncts, factor_masks, signature
from manygrad.runtime.codegen.dots import is_dot
from manygrad.runtime.codegen.emit import INDEX, Emitter
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.opts.nest import LoopNest
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.intervals import bounds
from manygrad.tensor.uop.ops import GroupOp, Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

CUSTOM = {"round": Low.ROUND, "scale": Low.SCALE, "within": Low.WITHIN, "lookup": Low.LOOKUP}
PART_BYTES = 16  # within parts of a vector of this size, and of whole parts, shuffles are cheap


class Evaluator(Emitter):
    def __init__(self, ast: UOp, nest: LoopNest) -> None:
        super().__init__()
        self.sig: Signature = signature(ast)
        self.nest = nest
        self.origin: dict[UOp, Inst] = {}  # range -> index of the tile's first iteration
        self.tile: dict[UOp, int] = {}  # range -> iterations in the tile that is being emitted
        self.ragged: dict[
            UOp, Inst | None
        ] = {}  # range whose last vector is partial -> its size, if only known at run time
        self.reach = 0  # iterations beyond such a range's tile that there are
        self.lane: UOp | None = None
        self.lanes = 1
        self.along: UOp | Inst | None = None  # what binds the lane: its range, or a loop over the vectors of its tile
        self._analyses: dict[tuple[UOp | None, int, UOp | None, UOp | None, int], TileAnalysis] = {}
        slots = {slot for _, slot in nest.staged}  # packing tiles reduce ranges, too
        self.also_tiled = {
            r for u in self.sig.nodes if u.op is Ops.LOAD and u.src[0].src[0].arg in slots for r in ranges_of(u)
        }
        self.square: UOp | None = None  # the reduce range that packing tiles by the number of lanes
        self.use_lane(nest.lane, nest.lanes)

    # *** which lane, which masks ***

    def use_lane(self, lane: UOp | None, lanes: int, singly: UOp | None = None, begins: int = 0) -> None:
        """`singly`: a range with a loop over single vectors, which may begin at any multiple of `begins`, or of their
        lanes."""
        self.lane, self.lanes, self.along = lane, lanes if lane is not None else 1, lane
        key = (lane, self.lanes, self.square, singly, begins)
        if key not in self._analyses:
            aligned = {}
            whole = {
                r
                for r, t in self.nest.tile.items()
                if r.src[0].op is Ops.CONST and r.src[0].arg <= t and r is not self.square
            }
            for r, t in self.nest.tile.items():
                fixed = r.src[0].op is Ops.CONST
                aligned[r] = t if fixed and r is not singly else (begins or self.lanes) if r is lane else 1
                if r in self.nest.reduce_lanes and r is not lane:  # a REDUCE with other lanes runs it singly
                    aligned[r] = 1
                    whole.discard(r)
            if singly is not None:
                whole.discard(singly)
            for r in self.also_tiled:
                aligned.setdefault(r, 1)
            self._analyses[key] = TileAnalysis(aligned, lane, self.lanes, frozenset(whole))
        self.analysis = self._analyses[key]

    def ragged_mask(self, position: Position) -> Inst | None:
        """The lanes at `position` that are within the lane's range; None: all."""
        if self.lane is None or self.lane not in self.ragged:
            return None
        at, size = position.get(self.lane, 0), self.ragged[self.lane]
        if size is None:
            active = self.tile[self.lane] + self.reach - at
            return None if active >= self.lanes else self.emit(Low.FIRST, dtypes.bool, (), active, self.lanes)
        left = self.emit(Ops.SUB, INDEX, (size, self.origin[self.lane]))
        left = left if at == 0 else self.add(left, self.const(-at))
        return self.alu(Ops.CMPLT, dtypes.bool, self.iota(), left)

    def iota(self) -> Inst:
        return self.emit(Low.IOTA, INDEX, (), None, self.lanes)

    def step_of(self, r: UOp) -> int:
        """How many iterations of `r` one vector, or one of the quads in it, takes in."""
        return (self.lanes if r is self.lane else 1) * self.nest.dots.get(r, 1)

    def positions(self, ranges: frozenset[UOp]) -> Iterator[dict[UOp, int]]:
        """The tile positions along `ranges`, in order, the lane's innermost; along that, one a vector."""
        tiled = [r for r in (*self.nest.loops, *self.tile) if r in ranges and self.tile.get(r, 1) > 1]
        tiled = sorted(dict.fromkeys(tiled), key=lambda r: r is self.lane)
        steps = [range(0, self.tile[r], self.step_of(r)) for r in tiled]
        for at in itertools.product(*steps):
            yield dict(zip(tiled, at))

    # *** values ***

    def key(self, u: UOp, position: Position) -> tuple[Atom, UOp | Inst | None]:
        """What a value is remembered under: vectors along one range are not those along another."""
        return self.analysis.at(u, position), self.along if self.lane in ranges_of(u) else None

    def find(self, u: UOp, position: Position) -> Inst | None:
        key = self.key(u, position)
        for block in reversed(self.blocks):
            found = block.values.get(key)
            if found is not None:
                return found
        return None

    def remember(self, u: UOp, position: Position, inst: Inst) -> Inst:
        self.blocks[inst.depth].values[self.key(u, position)] = inst
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
        if (staged := self.staged(u, position)) is not None:
            return staged
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
        if is_dot(u):
            return self.alu(Ops.MUL, u.dtype, *(self.alu(Ops.CAST, u.dtype, s) for s in src))
        if u.op is Ops.CUSTOM:
            name, arg = u.arg if isinstance(u.arg, tuple) else (u.arg, None)
            return self.alu(CUSTOM[name], u.dtype, *src, arg=arg)
        if u.op is Ops.FMA:
            return self.alu(Low.FMA, u.dtype, *src)
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
        if a.uniform or self.lanes == 1:
            return total
        return self.alu(Ops.ADD, INDEX, self.splat(total, self.lanes), self.ramp(a))

    def ramp(self, a: Affine) -> Inst:
        """What each lane adds."""
        if a.table or a.stride != 1:
            return self.emit(Low.TABLE, INDEX, (), a.offsets(self.lanes), self.lanes)
        return self.iota()

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
        offsets = tuple(x - y for x, y in zip(a.offsets(self.lanes), b.offsets(self.lanes)))
        return self.alu(u.op, dtypes.bool, self.emit(Low.TABLE, INDEX, (), offsets, self.lanes), bound)

    def step(self, index: UOp, r: UOp) -> int | None:
        """How far apart the first two iterations of a tile of `r` read."""
        first, second = (self.analysis.affine(index, {r: i}) for i in (0, 1))
        if first is None or second is None or second._replace(constant=first.constant) != first:
            return None
        return second.constant - first.constant

    def staged(self, u: UOp, position: Position) -> Inst | None:
        """The value from local memory, where it was packed there."""
        return None

    # *** what is skipped ***

    def masks(self, values: list[UOp], ranges: frozenset[UOp]) -> list[UOp]:
        """Under which conditions the factors of products are read, if one of `ranges` is skipped and they are the same
        for all `values`: without any of them nothing is added."""
        if not self.nest.skipped & ranges:
            return []
        shared = [set(factor_masks(v)) for v in values]
        return [m for m in factor_masks(values[0]) if all(m in s for s in shared)]

    @contextmanager
    def unless_masked(self, masks: list[UOp], at: dict[UOp, int]) -> Iterator[bool]:
        """A block that runs where those conditions hold on which the whole tile agrees; gives False where none would
        run."""
        needed: dict[UOp, Inst | None] = {}
        for c in dict.fromkeys(
            c for m in masks for c in conjuncts(m) if c.op in GroupOp.COMPARE and c.src[0].dtype is INDEX
        ):
            found = {self.decided(c, {**p, **at}) for p in self.positions(ranges_of(c) - at.keys())}
            one = found.pop() if len(found) == 1 else None
            if one is False:
                yield False
                return
            if one is not None:
                needed[c] = None if one is True else self.value(c, at)
        condition = self.conjunction(*needed.values())
        if condition is None:
            yield True
            return
        self.open(Inst(Low.IF, dtypes.void, 1, (condition,), None, len(self.blocks)))
        around, self.reads_from = self.reads_from, len(self.blocks) - 1
        known = self.blocks[-1].values  # what is known now is not asked again
        for c in needed:
            known.update(
                (self.key(c, {**p, **at}), self.const(True, dtypes.bool))
                for p in self.positions(ranges_of(c) - at.keys())
            )
        for m in masks:
            for p in self.positions(ranges_of(m) - at.keys()):
                left = self.conjunction(*(self.value(c, {**p, **at}) for c in conjuncts(m)))
                known[self.key(m, {**p, **at})] = left or self.const(True, dtypes.bool)
        yield True
        self.reads_from = around
        self.close()

    def decided(self, c: UOp, position: Position) -> Affine | bool | None:
        """As `compare` of the analysis; what is known in an open block counts."""
        known = self.find(c, position)
        return bool(known.arg) if known is not None and known.op is Low.CONST else self.analysis.compare(c, position)

    def apart(self, masks: list[UOp], at: dict[UOp, int]) -> list[dict[UOp, int]]:
        """The tile positions which the conditions tell apart, those first at which all of them are decided now."""
        compared = [c for m in masks for c in conjuncts(m) if c.op in GroupOp.COMPARE and c.src[0].dtype is INDEX]
        ranges = frozenset(r for c in compared for r in ranges_of(c) if r is not self.lane) - at.keys()
        asked = lambda p: any(isinstance(self.decided(c, {**p, **at}), Affine) for c in compared)  # noqa: E731
        return sorted(self.positions(ranges), key=asked)

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
        if a is not None and (a.uniform or self.lanes == 1):
            self.prefetch(u, pointer, a)
            found = self.scalar_load(u.dtype, pointer, a, valid)
            if valid is not None and valid.lanes > 1:
                return self.alu(Ops.WHERE, u.dtype, valid, found, self.const(0, u.dtype))
            return found
        mask = self.ragged_mask(position)
        if a is not None and a.stride == 1:
            self.prefetch(u, pointer, a)
            guard = self.conjunction(valid, mask)
            return self.emit(
                Low.LOAD, u.dtype, (pointer, self.base(a), *(() if guard is None else (guard,))), a.constant, self.lanes
            )
        if a is not None and (window := self.window_load(u, pointer, a, valid, mask)) is not None:
            return window
        if a is not None and len(index.src) == 2 and (between := self.load_between(u, position)) is not None:
            return between
        if a is not None and len(index.src) == 2 and (mask is None or mask.op is Low.FIRST):
            column = self.transposed_load(u, pointer, a, position, self.lanes if mask is None else mask.arg)
            if column is not None:
                return column
        offset = self.splat(self.value(index.src[1], position), self.lanes)
        guard = self.conjunction(valid, mask)
        guards = () if guard is None else (self.splat(guard, self.lanes),)
        return self.emit(Low.LOAD, u.dtype, (pointer, offset, *guards), 0, self.lanes)

    def prefetch(self, u: UOp, pointer: Inst, a: Affine) -> None:
        """Asks for what the load reads in the next tile of another loop, where the Opts say so."""
        for r, slot in self.nest.prefetched:
            if slot != pointer.arg or r not in self.origin or (loop := self.nest.next_tile(u, r)) is None:
                continue
            ahead = sum(c for x, c in a.terms if x.expr is loop) * self.nest.tile.get(loop, 1)
            if ahead:
                self.emit(Low.PREFETCH, dtypes.void, (pointer, self.base(a)), a.constant + ahead, here=True)

    def window_load(self, u: UOp, pointer: Inst, a: Affine, valid: Inst | None, mask: Inst | None) -> Inst | None:
        """Lanes that read within two vectors' reach of each other: those vectors are loaded and shuffled."""
        n = self.lanes
        if (mask is not None and mask.op is not Low.FIRST) or (valid is not None and valid.lanes > 1):
            return None
        active = a.offsets(n)[: mask.arg if mask is not None else n]
        least, span = min(active), max(active) - min(active) + 1
        if span > 2 * n:
            return None
        base = self.base(a)
        parts = []
        for start in range(0, span, n):
            some = None if span - start >= n else self.emit(Low.FIRST, dtypes.bool, (), span - start, n)
            guard = self.conjunction(valid, some)
            src = (pointer, base, *(() if guard is None else (guard,)))
            parts.append(self.emit(Low.LOAD, u.dtype, src, a.constant + least + start, n))
        order = tuple(o - least for o in active) + (0,) * (n - len(active))
        return self.emit(Low.SHUFFLE, u.dtype, (parts[0], parts[-1]), order, n)

    def load_between(self, u: UOp, position: Position) -> Inst | None:
        """The vector that begins inside of one of the tile's vectors, of that and the next one."""
        assert self.lane is not None
        at, n = position.get(self.lane, 0), self.lanes
        if not (shift := at % n):
            return None
        there = self.tile[self.lane] + self.reach > at - shift + n
        first = self.value(u, {**position, self.lane: at - shift})
        second = self.value(u, {**position, self.lane: at - shift + n}) if there else first
        return self.emit(Low.SHUFFLE, u.dtype, (first, second), tuple(range(shift, shift + n)), n)

    def transposed_load(self, u: UOp, pointer: Inst, a: Affine, position: Position, active: int) -> Inst | None:
        """A strided load where another range of the tile runs contiguously: a square is loaded along that and
        transposed.

        All the square's vectors are remembered; this is the one at `position`. Lanes from `active` on are not read.
        """
        n = self.lanes
        square = [
            r
            for r in self.tile
            if r is not self.lane
            and (self.nest.tile.get(r, 1) % n == 0 or r is self.square)
            and self.step(u.src[0].src[1], r) == 1
        ]
        if not square or n & (n - 1) or a.table:
            return None
        along = square[0]
        at = position.get(along, 0)
        first = at - at % n
        count = min(n, self.tile[along] - first)
        constant = a.constant - (at - first)
        if any(
            (form := self.analysis.affine(u.src[0].src[1], {**position, along: first + j})) is None
            or form != a._replace(constant=constant + j)
            for j in range(count)
        ):
            return None
        base = self.base(a)
        guard = () if count == n else (self.emit(Low.FIRST, dtypes.bool, (), count, n),)
        rows = [
            self.emit(Low.LOAD, u.dtype, (pointer, base, *guard), constant + a.stride * lane, n)
            for lane in range(active)
        ]
        rows += [self.const(0, u.dtype, n)] * (n - active)
        for j, column in enumerate(self.transpose(rows)[:count]):
            self.remember(u, {**position, along: first + j}, column)
        return self.find(u, position)

    def transpose(self, rows: list[Inst]) -> list[Inst]:
        """n vectors of n lanes, transposed in log2(n) rounds of shuffles that machines do without a table of places.

        First within parts of 16 bytes: pairs of vectors are interleaved, single elements, then twos, and so on. Then
        whole parts: those at even places of both vectors, and those at odd ones.
        """
        n = len(rows)
        part = min(n, PART_BYTES // rows[0].dtype.itemsize)
        step = 1
        while step < n:
            if step < part:
                halves = [
                    tuple(
                        start + high * part // 2 + i // (2 * step) * step + i % step + (n if i & step else 0)
                        for start in range(0, n, part)
                        for i in range(part)
                    )
                    for high in range(2)
                ]
            else:
                halves = [
                    tuple(start + i for start in range(odd * part, 2 * n, 2 * part) for i in range(part))
                    for odd in range(2)
                ]
            mixed = list(rows)
            for i in range(n):
                if not i & step:
                    for j, order in zip((i, i + step), halves):
                        mixed[j] = self.emit(Low.SHUFFLE, rows[i].dtype, (rows[i], rows[i + step]), order, n)
            rows = mixed
            step *= 2
        bits = part.bit_length() - 1
        return [rows[i // part * part + int(f"{i % part:0{bits}b}"[::-1], 2)] for i in range(n)] if bits else rows

    def scalar_load(self, dtype: DType, pointer: Inst, a: Affine, valid: Inst | None) -> Inst:
        if valid is not None and valid.lanes > 1:
            valid = self.emit(Low.ANY, dtypes.bool, (valid,))
        return self.emit(Low.LOAD, dtype, (pointer, self.base(a), *(() if valid is None else (valid,))), a.constant)


def _sign(u: UOp) -> bool | None:
    """For quotients and remainders of indices: whether the dividend is known not to be negative."""
    return bounds(u.src[0])[0] >= 0 if u.op in (Ops.IDIV, Ops.MOD) else None


def _unknown(u: UOp) -> Any:
    raise NotImplementedError(f"{u.op.name} has no meaning inside a kernel")
