"""Lowering of `matrix`: a tile's sums in the registers of a matrix unit, stored to local memory when they are whole.

before:  reduce ADD(a b) over k in matrices: for k by 32: accumulate
after:   MATRIX_ZERO 0..3; LOOP k: MATRIX_LOAD a, MATRIX_LOAD b, MATRIX_DOT ..; END; MATRIX_STORE 0..3

The registers have the shapes of a whole tile throughout, but for tiles with fewer rows, which set theirs and put those
of a whole one back. Columns beyond a vector's last one are computed, from whatever is packed there, and not stored.

Of float32, in parts, a part of an infinite number is infinite, those after it are no numbers, and an infinite number
times a part that is 0 is none, either. So where a sum of the tile is not finite, which is seldom, the tile is added up
again: the products of smaller parts first, of whose sums those that are not finite become 0, then, on top, those of the
largest parts, which are what float32's own products of such numbers are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.local import matrix_sum_at, packed_at, picked_up
from manygrad.runtime.codegen.emit.memory import argument
from manygrad.runtime.codegen.emit.values import sum_of_terms, value
from manygrad.runtime.codegen.kernel.dots import row_step
from manygrad.runtime.codegen.kernel.float32_parts import parts_of, products_of_parts
from manygrad.runtime.codegen.loops.tree import ReduceLoop, Rest
from manygrad.runtime.codegen.lowered import Inst, Low, Square
from manygrad.runtime.codegen.target import LANE_BYTES, SQUARES, Dot
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

SUMS_AT_ONCE = 4  # that are looked at side by side: as many FMAs as the processor has on the way
Products = tuple[tuple[int, int], ...]  # which parts of rows by which of columns
Shapes = tuple[tuple[int, int], ...]  # of each register (rows, bytes of a row)


class _Squares(NamedTuple):
    """The squares of the open tile: registers of sums, then of rows, then of columns."""

    u: UOp
    rows: UOp | None
    height: int  # rows of the tile
    wide: int  # squares
    terms: int  # iterations of the reduction at a time

    @property
    def high(self) -> int:
        return -(-self.height // self.dot.rows)

    @property
    def dot(self) -> Dot:
        dot: Dot = self.u.src[0].arg
        return dot

    def sums(self, i: int, j: int) -> int:
        return i * self.wide + j

    def left(self, i: int) -> int:
        return SQUARES**2 + i

    def right(self, j: int) -> int:
        return SQUARES**2 + SQUARES + j

    def height_of(self, i: int) -> int:
        """Rows of its i-th squares."""
        return min(self.dot.rows, self.height - i * self.dot.rows)

    def position(self, e: Emission, i: int, j: int) -> dict[UOp, int]:
        """Position of the first sum of a square."""
        assert e.scope.vectorized is not None
        row = {} if self.rows is None else {self.rows: i * self.dot.rows}
        return {**row, e.scope.vectorized: j * e.scope.lanes}

    @property
    def shapes(self) -> Shapes:
        dot, terms, found = self.dot, self.terms, [(0, 0)] * (SQUARES**2 + 2 * SQUARES)
        for i in range(self.high):
            found[self.left(i)] = self.height_of(i), terms * LANE_BYTES // dot.terms
            for j in range(self.wide):
                found[self.sums(i, j)] = self.height_of(i), dot.vector_bytes
                found[self.right(j)] = terms // dot.terms, dot.vector_bytes
        return tuple(found)

    @property
    def squares(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.high) for j in range(self.wide)]


def reduce_matrices(e: Emission, node: ReduceLoop, body: Callable[[], None]) -> None:
    """The sums of the open tile, around the loops of `body`; then local memory has them."""
    (u,), vectorized = node.group, e.scope.vectorized
    sums = e.local.matrices[u]
    rows, terms = sums.rows, sums.terms
    assert vectorized is not None
    whole = _Squares(u, rows, sums.height, sums.wide, terms)
    height, wide = e.scope.tile[rows] if rows is not None else 1, -(-e.scope.tile[vectorized] // e.scope.lanes)
    tile = whole._replace(height=height, wide=wide)
    mine, usual = tile.shapes, whole.shapes
    mine = usual if _covers(usual, mine) else mine
    e.emit(Low.MATRIX_SHAPES, dtypes.void, (), usual)  # once, where the kernel begins
    if mine != usual:
        e.emit(Low.MATRIX_SHAPES, dtypes.void, (), mine, here=True)
    products = _products(e, u)
    if node.rest is None:
        _zero(e, tile)
    else:
        begun = instruction(e, node.rest.begun)
        e.branch(begun, lambda: _move(e, tile, Low.MATRIX_LOAD, node.rest), lambda: _zero(e, tile))
    _sum(e, tile, products, body)
    last = node.rest is None or node.rest.is_last
    if last or len(products) > 1:
        _move(e, tile, Low.MATRIX_STORE)
    if len(products) > 1:
        e.open(Low.IF, (_any_not_finite(e, tile),))
        _sum_again(e, tile, products, body, node.rest)
        e.close()
    if not last:
        _move(e, tile, Low.MATRIX_STORE, node.rest)
    if mine != usual:
        e.emit(Low.MATRIX_SHAPES, dtypes.void, (), usual, here=True)


def _covers(usual: Shapes, mine: Shapes) -> bool:
    """Whether a tile needs no shapes of its own: it has fewer registers, of the same shapes."""
    return all(m in (u, (0, 0)) for u, m in zip(usual, mine))


def _products(e: Emission, u: UOp) -> Products:
    """The products that the sums `u` are of: one of what the factors are, or those of their parts."""
    if not u.src[0].arg.in_parts:
        return ((0, 0),)
    return products_of_parts(parts_of(_rows(e, u)), parts_of(_columns(e, u)))


def _columns(e: Emission, u: UOp) -> UOp:
    return next(s for s in u.src[0].src if e.scope.vectorized in ranges_of(s))


def _rows(e: Emission, u: UOp) -> UOp:
    return next(s for s in u.src[0].src if e.scope.vectorized not in ranges_of(s))


def _sum(e: Emission, tile: _Squares, products: Products, body: Callable[[], None]) -> None:
    """Adds these products of parts, along the whole reduction."""
    e.adding.append(lambda: _add(e, tile, products))
    body()
    e.adding.pop()


def _sum_again(e: Emission, tile: _Squares, products: Products, body: Callable[[], None], rest: Rest | None) -> None:
    """The sums of a tile of which some are not finite, in the registers and in local memory."""
    _zero(e, tile)
    _sum(e, tile, products[:-1], body)
    _move(e, tile, Low.MATRIX_STORE)
    _drop_not_finite(e, tile, rest)
    _move(e, tile, Low.MATRIX_LOAD)
    _sum(e, tile, products[-1:], body)
    _move(e, tile, Low.MATRIX_STORE)


def _zero(e: Emission, tile: _Squares) -> None:
    for i, j in tile.squares:
        e.emit(Low.MATRIX_ZERO, dtypes.void, (), tile.sums(i, j), here=True)


def _move(e: Emission, tile: _Squares, to: Low, rest: Rest | None = None) -> None:
    """The sums from the registers to local memory, or back; to where they `rest`, or from there."""
    for i, j in tile.squares:
        pointer, offset, constant = _sum_at(e, tile, i, j, rest)
        arg = Square(tile.sums(i, j), constant, e.scope.lanes, tile.height_of(i), e.scope.lanes)
        e.emit(to, dtypes.void, (pointer, offset), arg, here=True)


def _sum_at(e: Emission, tile: _Squares, i: int, j: int, rest: Rest | None) -> tuple[Inst, Inst, int]:
    pointer, constant = matrix_sum_at(e, tile.u, tile.position(e, i, j))
    if rest is None:
        return pointer, e.const(0), constant
    return e.emit(Low.SCRATCH, tile.u.dtype, (), rest.offset_bytes), instruction(e, rest.at), constant


def _vectors(e: Emission, tile: _Squares, rest: Rest | None = None) -> list[tuple[Inst, Inst, int]]:
    """(pointer, offset, constant) of the vectors of sums in memory."""
    squares = [(_sum_at(e, tile, i, j, rest), tile.height_of(i)) for i, j in tile.squares]
    return [(p, o, c + row * e.scope.lanes) for (p, o, c), height in squares for row in range(height)]


def _any_not_finite(e: Emission, tile: _Squares) -> Inst:
    """0 times such a sum is no number, and so is all that it is added to."""
    zero, totals = e.const(0.0, dtypes.float32, e.scope.lanes), dict[int, Inst]()
    for i, (pointer, offset, constant) in enumerate(_vectors(e, tile)):
        x = e.emit(Low.LOAD, dtypes.float32, (pointer, offset), constant, e.scope.lanes, here=True)
        before = totals.get(i % SUMS_AT_ONCE, zero)
        totals[i % SUMS_AT_ONCE] = e.emit(Low.FMA, dtypes.float32, (x, zero, before), None, e.scope.lanes, here=True)
    total = zero
    for x in totals.values():
        total = e.alu(Ops.ADD, dtypes.float32, total, x)
    return e.emit(Low.ANY, dtypes.bool, (e.alu(Ops.CMPNE, dtypes.bool, total, total),))


def _drop_not_finite(e: Emission, tile: _Squares, rest: Rest | None) -> None:
    """And adds what has been summed before."""
    zero, f32 = e.const(0.0, dtypes.float32, e.scope.lanes), dtypes.float32
    before = None if rest is None else [picked_up(e, rest, at[2], zero) for at in _vectors(e, tile, rest)]
    for i, (pointer, offset, constant) in enumerate(_vectors(e, tile)):
        x = e.emit(Low.LOAD, f32, (pointer, offset), constant, e.scope.lanes, here=True)
        finite = e.alu(Ops.CMPEQ, dtypes.bool, e.alu(Ops.MUL, f32, x, zero), zero)
        found = e.alu(Ops.WHERE, f32, finite, x, zero)
        if before is not None:
            found = e.alu(Ops.ADD, f32, before[i], found)
        e.emit(Low.STORE, dtypes.void, (pointer, offset, found), constant, e.scope.lanes, here=True)


def _add(e: Emission, tile: _Squares, products: Products) -> None:
    """The products along the open tile of the reduction: a square of either factor is loaded once for each part that
    it is multiplied by."""
    rows, columns = _rows(e, tile.u), _columns(e, tile.u)
    types = [dtypes.bfloat16 if tile.dot.in_parts else s.dtype for s in (rows, columns)]
    held: tuple[int | None, int | None] = (None, None)
    for part in products:
        for i in range(tile.high):
            if part[0] != held[0]:
                _load_rows(e, tile, rows, i, part[0])
            for j in range(tile.wide):
                if i == 0 and part[1] != held[1]:
                    _load_columns(e, tile, columns, j, part[1])
                registers = tile.sums(i, j), tile.left(i), tile.right(j)
                e.emit(Low.MATRIX_DOT, dtypes.void, (), (*registers, *types), here=True)
        held = part


def _load_rows(e: Emission, tile: _Squares, load: UOp, i: int, part: int) -> None:
    if (stage := e.local.stages.get(load)) is not None:
        pointer, offset, constant, _ = packed_at(e, stage, tile.position(e, i, 0))
        constant += part * stage.part
        step = e.const(stage.pitches[stage.loop])
    else:
        a = e.scope.analysis.affine(load.src[0].src[1], tile.position(e, i, 0))
        assert a is not None
        pointer, offset, constant = argument(e, load.src[0].src[0]), sum_of_terms(e, a), a.constant
        by = UOp.const(dtypes.index, 0) if tile.rows is None else row_step(load, tile.rows)
        assert by is not None
        step = value(e, by, {})
    known = step.op is Low.CONST
    square = Square(tile.left(i), constant, step.arg if known else 0, tile.height_of(i), tile.terms)
    e.emit(Low.MATRIX_LOAD, dtypes.void, (pointer, offset, *(() if known else (step,))), square, here=True)


def _load_columns(e: Emission, tile: _Squares, load: UOp, j: int, part: int) -> None:
    """A row of lanes for each group of the reduction."""
    stage, (k,) = e.local.stages[load], tile.u.src[1:]
    pointer, offset, constant, _ = packed_at(e, stage, tile.position(e, 0, j))
    step = packed_at(e, stage, {**tile.position(e, 0, j), k: stage.group})[2] - constant
    groups, width = tile.terms // stage.group, e.scope.lanes * stage.group
    square = Square(tile.right(j), constant + part * stage.part, step, groups, width)
    e.emit(Low.MATRIX_LOAD, dtypes.void, (pointer, offset), square, here=True)
