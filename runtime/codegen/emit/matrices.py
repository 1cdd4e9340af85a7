"""Lowering of `matrix`: a tile's sums in the registers of a matrix unit, stored to local memory when they are whole.

before:  reduce ADD(a b) over k in matrices: for k by 32: accumulate
after:   MATRIX_ZERO 0..3; LOOP k: MATRIX_LOAD a, MATRIX_LOAD b, MATRIX_DOT ..; END; MATRIX_STORE 0..3

The registers have the shapes of a whole tile throughout, but for tiles with fewer rows, which set theirs and put those
of a whole one back. Columns beyond a vector's last one are computed, from whatever is packed there, and not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manygrad.runtime.codegen.dots import Dot, row_step
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.local import matrix_sum_at, packed_at
from manygrad.runtime.codegen.emit.memory import argument
from manygrad.runtime.codegen.emit.values import sum_of_terms, value
from manygrad.runtime.codegen.loops.tree import Reduce
from manygrad.runtime.codegen.lowered import Low, Square
from manygrad.runtime.codegen.opts.matrix import SQUARES, matrix_rows
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ranges import ranges_of
from manygrad.tensor.uop.uop import UOp

Shapes = tuple[tuple[int, int], ...]  # of each register (rows, bytes of a row)


class _Squares(NamedTuple):
    """The squares of the open tile: registers of sums, then of rows, then of columns."""

    u: UOp
    rows: UOp | None
    height: int  # rows of the tile
    wide: int  # squares

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
        """Of the first sum of a square."""
        assert e.scope.lane is not None
        row = {} if self.rows is None else {self.rows: i * self.dot.rows}
        return {**row, e.scope.lane: j * e.scope.lanes}

    def shapes(self, terms: int) -> Shapes:
        """For so many iterations of the reduction at a time."""
        dot, found = self.dot, [(0, 0)] * (SQUARES**2 + 2 * SQUARES)
        for i in range(self.high):
            found[self.left(i)] = self.height_of(i), terms * dot.left.itemsize
            for j in range(self.wide):
                found[self.sums(i, j)] = self.height_of(i), dot.vector_bytes
                found[self.right(j)] = terms // dot.terms, dot.vector_bytes
        return tuple(found)


def reduce_matrices(e: Emission, node: Reduce, body: Callable[[], None]) -> None:
    """The sums of the open tile, around the loops of `body`; then local memory has them."""
    (u,), (k,) = node.group, node.group[0].src[1:]
    lane, rows = e.scope.lane, matrix_rows(e.nest, u)
    assert lane is not None
    terms, wide = e.nest.tile_of(k), -(-e.scope.tile[lane] // e.scope.lanes)
    tile = _Squares(u, rows, e.scope.tile[rows] if rows is not None else 1, wide)
    whole = tile._replace(
        height=e.nest.tile_of(rows) if rows is not None else 1, wide=-(-e.nest.tile_of(lane) // e.scope.lanes)
    )
    mine, usual = tile.shapes(terms), whole.shapes(terms)
    mine = usual if _covers(usual, mine) else mine
    e.emit(Low.MATRIX_SHAPES, dtypes.void, (), usual)  # once, where the kernel begins
    if mine != usual:
        e.emit(Low.MATRIX_SHAPES, dtypes.void, (), mine, here=True)
    squares = [(i, j) for i in range(tile.high) for j in range(tile.wide)]
    for i, j in squares:
        e.emit(Low.MATRIX_ZERO, dtypes.void, (), tile.sums(i, j), here=True)
    e.adding.append(lambda: _add(e, tile))
    body()
    e.adding.pop()
    for i, j in squares:
        pointer, constant = matrix_sum_at(e, u, tile.position(e, i, j))
        arg = Square(tile.sums(i, j), constant, e.scope.lanes, tile.height_of(i), e.scope.lanes)
        e.emit(Low.MATRIX_STORE, dtypes.void, (pointer, e.const(0)), arg, here=True)
    if mine != usual:
        e.emit(Low.MATRIX_SHAPES, dtypes.void, (), usual, here=True)


def _covers(usual: Shapes, mine: Shapes) -> bool:
    """Whether a tile needs no shapes of its own: it has fewer registers, of the same shapes."""
    return all(m in (u, (0, 0)) for u, m in zip(usual, mine))


def _add(e: Emission, tile: _Squares) -> None:
    """The products along the open tile of the reduction: each square of either factor is loaded once."""
    u = tile.u
    columns = next(s for s in u.src[0].src if e.scope.lane in ranges_of(s))
    rows = next(s for s in u.src[0].src if s is not columns)
    for i in range(tile.high):
        _load_rows(e, tile, rows, i)
        for j in range(tile.wide):
            if i == 0:
                _load_columns(e, tile, columns, j)
            registers = tile.sums(i, j), tile.left(i), tile.right(j)
            e.emit(Low.MATRIX_DOT, dtypes.void, (), (*registers, rows.dtype, columns.dtype), here=True)


def _load_rows(e: Emission, tile: _Squares, load: UOp, i: int) -> None:
    if (stage := e.local.stages.get(load)) is not None:
        pointer, offset, constant, _ = packed_at(e, stage, tile.position(e, i, 0))
        step = e.const(stage.pitches[stage.loop])
    else:
        a = e.scope.analysis.affine(load.src[0].src[1], tile.position(e, i, 0))
        assert a is not None
        pointer, offset, constant = argument(e, load.src[0].src[0]), sum_of_terms(e, a), a.constant
        by = UOp.const(dtypes.index, 0) if tile.rows is None else row_step(load, tile.rows)
        assert by is not None
        step = value(e, by, {})
    known = step.op is Low.CONST
    square = Square(tile.left(i), constant, step.arg if known else 0, tile.height_of(i), e.nest.tile_of(tile.u.src[1]))
    e.emit(Low.MATRIX_LOAD, dtypes.void, (pointer, offset, *(() if known else (step,))), square, here=True)


def _load_columns(e: Emission, tile: _Squares, load: UOp, j: int) -> None:
    """A row of lanes for each group of the reduction."""
    stage, (k,) = e.local.stages[load], tile.u.src[1:]
    pointer, offset, constant, _ = packed_at(e, stage, tile.position(e, 0, j))
    step = packed_at(e, stage, {**tile.position(e, 0, j), k: e.nest.dots[k]})[2] - constant
    groups, width = e.nest.tile_of(k) // e.nest.dots[k], e.scope.lanes * e.nest.dots[k]
    square = Square(tile.right(j), constant, step, groups, width)
    e.emit(Low.MATRIX_LOAD, dtypes.void, (pointer, offset), square, here=True)
