"""A program being written: nested blocks of instructions, and the scope in which values are computed.

An instruction goes into the outermost open block in which its sources are known, and an equal one is emitted once: so
loop-invariant code moves out and common subexpressions are shared while the code is being made.

That an expression *has* the value of an instruction holds for less than that: for the tiles that are open, and under
the conditions that are known. A value is remembered in the innermost block of those that say so:

    for i0 in 0..32 by 32:   the mask of lanes 16..31 is known to be true: a constant, an instruction of block 0
    r0 = 19 from 32:         here the mask is not true, so what holds above must not be found

With SPEC each value that is found is compared with what is open then (`Basis`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from manygrad.runtime.codegen.analysis.affine import Position, TileAnalysis
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.loops.lanes import Lanes, fixed_size
from manygrad.runtime.codegen.loops.tree import PrefetchAhead, PrefetchLoads, Tree
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.environment import SPEC
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

INDEX = dtypes.index


class OpenBlock:
    """An open block: what was emitted in it."""

    def __init__(self, begin: Inst | None = None) -> None:
        self.begin = begin
        self.is_open = True
        self.insts: list[Inst] = []
        self.known: dict[Any, Inst] = {}  # (op, dtype, lanes, src, arg) -> the same instruction


@dataclass(frozen=True, eq=False)
class Basis:
    """What was open where a value was computed: the block of the innermost conditions that were known, and of the
    ranges that it depends on where their tiles began (None: a range that is one tile, which was not open yet)."""

    conditions: OpenBlock
    origins: tuple[tuple[UOp, Inst | None], ...]


class Remembered(NamedTuple):
    """The value of an expression for as long as `block` is open."""

    block: OpenBlock
    inst: Inst
    basis: Basis | None  # with SPEC


class Instructions:
    """Nested blocks that are being written."""

    def __init__(self) -> None:
        self.blocks: list[OpenBlock] = [OpenBlock()]
        # the number of the innermost block in which conditions are known: loads are not moved out of it, as only under
        # them is there something to read
        self.conditions_from = 0
        self.is_verified = bool(SPEC)  # (asked once: values are looked up all the time)

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
        if here:
            inst = Inst(op, dtype, lanes, src, arg, len(self.blocks) - 1)
            self.blocks[-1].insts.append(inst)
            return inst
        depth = 0 if op is not Low.LOAD else self.conditions_from
        for s in src:
            if s.depth > depth:
                depth = s.depth
        block = self.blocks[depth]
        kind = type(arg)
        key = (op, dtype, lanes, src, kind, arg.hex() if kind is float else arg)
        found = block.known.get(key)
        if found is None:
            found = block.known[key] = Inst(op, dtype, lanes, src, arg, depth)
            block.insts.append(found)
        return found

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

    # *** blocks ***

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """The innermost block has conditions that are known in it alone."""
        before, self.conditions_from = self.conditions_from, len(self.blocks) - 1
        yield
        self.conditions_from = before

    def open(self, op: Low | None = None, src: tuple[Inst, ...] = (), arg: Any = None) -> Inst | None:
        """A new innermost block: a LOOP, whose index is given, an IF, or (None) one that is no block of the program."""
        dtype = INDEX if op is Low.LOOP else dtypes.void
        begin = None if op is None else Inst(op, dtype, 1, src, arg, len(self.blocks))
        self.blocks.append(OpenBlock(begin))
        return begin

    def _pop(self) -> OpenBlock:
        block = self.blocks.pop()
        block.is_open = False
        return block

    def close(self) -> None:
        block = self._pop()
        into = self.blocks[-1].insts
        if block.begin is not None:
            into.append(block.begin)
        into.extend(block.insts)
        if block.begin is not None:
            into.append(Inst(Low.END, dtypes.void, 1, (), None, len(self.blocks) - 1))

    def branch(self, condition: Inst, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """One or the other; what either moves out stands before both."""
        begin = self.open(Low.IF, (condition,))
        then()
        first = self._pop().insts
        other = self.open(Low.ELSE)
        otherwise()
        second = self._pop().insts
        end = Inst(Low.END, dtypes.void, 1, (), None, len(self.blocks) - 1)
        assert begin is not None and other is not None
        self.blocks[-1].insts.extend([begin, *first, other, *second, end])


@dataclass(frozen=True, eq=False)
class OpenTiles:
    """The tiles that are open, and which of their ranges stands in the lanes."""

    vectors: Lanes
    analysis: TileAnalysis
    along: UOp | Inst | None  # what stands in the lanes: a range, or a loop over the vectors of its tile
    origin: Mapping[UOp, Inst] = field(default_factory=dict)  # range -> index of the tile's first iteration
    opened: Mapping[UOp, int] = field(default_factory=dict)  # range -> the number of the block that its tile stands in
    tile: Mapping[UOp, int] = field(default_factory=dict)  # range -> iterations in the tile
    # range whose last vector is partial -> its size, if only known at run time
    ragged: Mapping[UOp, Inst | None] = field(default_factory=dict)
    reach: int = 0  # iterations beyond such a range's tile that there are
    block: Mapping[UOp, Inst] = field(default_factory=dict)  # range -> index of its block's first iteration
    place: Inst | None = None  # which of the blocks in a group's memory that is
    # in a loop over single vectors: (the range, index of the tile's first iteration, the vector's place in the tile)
    vector: tuple[UOp, Inst, Inst] | None = None
    prefetches: tuple[PrefetchLoads, ...] = ()  # those around
    read_ahead: tuple[PrefetchAhead, ...] = ()

    @property
    def vectorized(self) -> UOp | None:
        return self.vectors.range

    @property
    def lanes(self) -> int:
        return self.vectors.count


Leaf = Callable[["Emission", UOp, Position], Inst | None]
Computed = Callable[["Emission", UOp, Position, Inst], None]


class Emission(Instructions):
    """`leaf`: the value of what needs more than the values of its sources; `computed` is told of each value."""

    def __init__(self, tree: Tree, leaf: Leaf, computed: Computed) -> None:
        super().__init__()
        self.sig, self.tiling, self.local, self.leaf, self.computed = tree.sig, tree.tiling, tree.local, leaf, computed
        lanes = tree.tiling.lanes
        self.scope = OpenTiles(lanes, tree.tiling.analysis(lanes), lanes.range)
        self.values: dict[Any, list[Remembered]] = {}  # (expression, position) -> values, the outer blocks' first
        self.counters: dict[Index, Inst] = {}
        self.fetched: dict[tuple[UOp, int], list[Inst]] = {}  # variables: (what a group shares, which part of it)
        self.packed: set[UOp] = set()  # what local memory holds of the open tiles
        self.waiting = set(self.sig.reduces)  # REDUCEs that are not computed yet in the open tiles
        self.running: set[UOp] = set()  # those whose loops are open
        self.adding: list[Callable[[], None]] = []  # adds the open tile to what the innermost of these reduces

    @contextmanager
    def within(self, scope: OpenTiles) -> Iterator[None]:
        before, self.scope = self.scope, scope
        yield
        self.scope = before

    def with_tile(self, r: UOp, origin: Inst) -> OpenTiles:
        """The scope with a tile of `r` that begins at `origin` and stands in the innermost block."""
        at = self.scope
        return replace(at, origin={**at.origin, r: origin}, opened={**at.opened, r: len(self.blocks) - 1})

    def with_lanes(self, lanes: Lanes) -> OpenTiles:
        return replace(self.scope, vectors=lanes, analysis=self.tiling.analysis(lanes), along=lanes.range)

    def positions(self, ranges: frozenset[UOp]) -> Iterator[dict[UOp, int]]:
        """The tile positions along `ranges`, in order, the vectorized range innermost; along that, one a vector."""
        return self.tiling.positions(ranges, self.scope.tile, self.scope.vectors)

    # *** values ***

    def find(self, u: UOp, key: Any) -> Inst | None:
        """The value of `u` that is remembered under `key`, if one is known here."""
        values = self.values.get(key)
        if values is None:
            return None
        while values:
            block, found, basis = values[-1]
            if block.is_open:
                if basis is not None:
                    self._verify(u, found, basis)
                return found
            values.pop()
        return None

    def remember(self, u: UOp, key: Any, inst: Inst) -> None:
        """In the block of its value, or where its ranges' tiles were opened, or where conditions are known that it may
        rest on, whichever is the innermost."""
        opened, depth = self.scope.opened, max(inst.depth, self.conditions_from)
        for r in ranges_of(u):
            if opened.get(r, 0) > depth:
                depth = opened[r]
        basis = None
        if self.is_verified:
            origins = tuple((r, self.scope.origin.get(r)) for r in ranges_of(u))
            basis = Basis(self.blocks[self.conditions_from], origins)
        self.values.setdefault(key, []).append(Remembered(self.blocks[depth], inst, basis))

    def _verify(self, u: UOp, found: Inst, basis: Basis) -> None:
        if basis.conditions not in self.blocks:
            raise AssertionError(
                f"emission: the value of {u.op.name} rests on conditions that do not hold here: {found}"
            )
        for r, origin in basis.origins:
            is_whole = origin is None and r in self.scope.tile and self.scope.tile[r] == fixed_size(r)
            if self.scope.origin.get(r) is not origin and not is_whole:
                raise AssertionError(f"emission: the value of {u.op.name} is of another tile of {r.arg}: {found}")
