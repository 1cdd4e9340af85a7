"""Loads from the kernel's arguments, in the vectors that its lanes ask for."""

from __future__ import annotations

from manygrad.runtime.codegen.analysis.affine import Affine, Position
from manygrad.runtime.codegen.cost import PACK_AHEAD_BYTES
from manygrad.runtime.codegen.emit.emission import Emission
from manygrad.runtime.codegen.emit.values import find, lanes_left, ragged_mask, remember, sum_of_terms, value
from manygrad.runtime.codegen.loops.lanes import step_along
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.target import LINE_BYTES
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

PART_BYTES = 16  # within parts of a vector of this size, and of whole parts, shuffles are cheap


def argument(e: Emission, param: UOp) -> Inst:
    return e.emit(Low.PARAM, param.dtype, (), param.arg)


def place_of(e: Emission, u: UOp) -> tuple[Inst, Inst, int]:
    """(pointer, offset, constant) of what a LOAD reads side by side."""
    a = e.scope.analysis.affine(u.src[0].src[1], {})
    assert a is not None and (a.stride == 1 or e.scope.lanes == 1), u
    return argument(e, u.src[0].src[0]), sum_of_terms(e, a), a.constant


def load(e: Emission, u: UOp, position: Position) -> Inst:
    index = u.src[0]
    valid = e.conjunction(value(e, index.src[2], position)) if len(index.src) == 3 else None
    if valid is not None and valid.op is Low.CONST:
        return e.const(0, u.dtype)
    a = e.scope.analysis.affine(index.src[1], position)
    pointer = argument(e, index.src[0])
    if a is not None and (a.uniform or e.scope.lanes == 1):
        prefetch(e, u, pointer, a)
        found = scalar_load(e, u.dtype, pointer, a, valid)
        if valid is not None and valid.lanes > 1:
            return e.alu(Ops.WHERE, u.dtype, valid, found, e.const(0, u.dtype))
        return found
    mask = ragged_mask(e, position)
    if a is not None and a.stride == 1:
        prefetch(e, u, pointer, a)
        guard = e.conjunction(valid, mask)
        guards = () if guard is None else (guard,)
        return e.emit(Low.LOAD, u.dtype, (pointer, sum_of_terms(e, a), *guards), a.constant, e.scope.lanes)
    if a is not None and (window := window_load(e, u, pointer, a, valid, mask)) is not None:
        return window
    if a is not None and len(index.src) == 2 and (between := load_between(e, u, position)) is not None:
        return between
    if a is not None and len(index.src) == 2:
        column = transposed_load(e, u, pointer, a, position, mask)
        if column is not None:
            return column
    offset = e.splat(value(e, index.src[1], position), e.scope.lanes)
    guard = e.conjunction(valid, mask)
    guards = () if guard is None else (e.splat(guard, e.scope.lanes),)
    return e.emit(Low.LOAD, u.dtype, (pointer, offset, *guards), 0, e.scope.lanes)


def prefetch(e: Emission, u: UOp, pointer: Inst, a: Affine) -> None:
    """Asks for what the load reads in the next tile of another loop, where it is in a Prefetch of it, and for what lies
    ahead of it (`PrefetchAhead`): once for all loads of a line."""
    prefetch_ahead(e, u, pointer, a)
    for p in e.scope.prefetches:
        ahead = sum(c for x, c in a.terms if x.expr is p.ahead) * p.distance if u in p.loads else 0
        if ahead:
            _ask_for_line(e, u, pointer, a, a.constant + ahead)


def prefetch_ahead(e: Emission, u: UOp, pointer: Inst, a: Affine) -> None:
    for p in e.scope.read_ahead:
        if pointer.arg == p.argument:
            _ask_for_line(e, u, pointer, a, a.constant + p.nbytes // u.dtype.itemsize)


def _ask_for_line(e: Emission, u: UOp, pointer: Inst, a: Affine, constant: int) -> None:
    line = LINE_BYTES // u.dtype.itemsize
    e.emit(Low.PREFETCH, dtypes.void, (pointer, sum_of_terms(e, a)), constant // line * line)


def window_load(e: Emission, u: UOp, pointer: Inst, a: Affine, valid: Inst | None, mask: Inst | None) -> Inst | None:
    """Lanes that read within two vectors' reach of each other: those vectors are loaded and shuffled."""
    n = e.scope.lanes
    if (mask is not None and mask.op is not Low.FIRST) or (valid is not None and valid.lanes > 1):
        return None
    active = a.offsets(n)[: mask.arg if mask is not None else n]
    least, span = min(active), max(active) - min(active) + 1
    if span > 2 * n:
        return None
    base = sum_of_terms(e, a)
    parts = []
    for start in range(0, span, n):
        some = None if span - start >= n else e.emit(Low.FIRST, dtypes.bool, (), span - start, n)
        guard = e.conjunction(valid, some)
        src = (pointer, base, *(() if guard is None else (guard,)))
        parts.append(e.emit(Low.LOAD, u.dtype, src, a.constant + least + start, n))
    order = tuple(o - least for o in active) + (0,) * (n - len(active))
    return e.emit(Low.SHUFFLE, u.dtype, (parts[0], parts[-1]), order, n)


def load_between(e: Emission, u: UOp, position: Position) -> Inst | None:
    """The vector that begins inside of one of the tile's vectors, of that and the next one."""
    assert e.scope.vectorized is not None
    at, n = position.get(e.scope.vectorized, 0), e.scope.lanes
    if not (shift := at % n):
        return None
    there = e.scope.tile[e.scope.vectorized] + e.scope.reach > at - shift + n
    first = value(e, u, {**position, e.scope.vectorized: at - shift})
    second = value(e, u, {**position, e.scope.vectorized: at - shift + n}) if there else first
    return e.emit(Low.SHUFFLE, u.dtype, (first, second), tuple(range(shift, shift + n)), n)


def rows_within(e: Emission, mask: Inst | None, position: Position) -> list[tuple[Inst, ...]]:
    """For each lane that may be within the range of lanes: under which condition it is, () where it always is."""
    if mask is None:
        return [()] * e.scope.lanes
    if mask.op is Low.FIRST:
        return [()] * mask.arg
    assert e.scope.vectorized is not None
    at, left = position.get(e.scope.vectorized, 0), lanes_left(e)
    return [(e.alu(Ops.CMPLT, dtypes.bool, e.const(at + lane), left),) for lane in range(e.scope.lanes)]


def transposed_load(
    e: Emission, u: UOp, pointer: Inst, a: Affine, position: Position, mask: Inst | None
) -> Inst | None:
    """A strided load where another range of the tile runs contiguously: a square is loaded along that and
    transposed.

    All the square's vectors are remembered; this is the one at `position`. A lane is read where `mask` has it.
    """
    n = e.scope.lanes
    square = [
        r
        for r in e.scope.tile
        if r is not e.scope.vectorized
        and (e.tiling.size_of(r) % n == 0 or r is e.scope.vectors.square)
        and step_along(e.scope.analysis, u.src[0].src[1], r) == 1
    ]
    if not square or n & (n - 1) or a.table:
        return None
    along = square[0]
    at = position.get(along, 0)
    first = at - at % n
    count = min(n, e.scope.tile[along] - first)
    constant = a.constant - (at - first)
    if any(
        (form := e.scope.analysis.affine(u.src[0].src[1], {**position, along: first + j})) is None
        or form != a._replace(constant=constant + j)
        for j in range(count)
    ):
        return None
    base = sum_of_terms(e, a)
    some = None if count == n else e.emit(Low.FIRST, dtypes.bool, (), count, n)
    within, rows = rows_within(e, mask, position), []
    for lane, inside in enumerate(within):
        start = constant + a.stride * lane
        prefetch_ahead(e, u, pointer, a._replace(constant=start))
        if along is e.scope.vectors.square:  # (what is packed: its rows lie on pages of their own)
            _ask_for_line(e, u, pointer, a, start + PACK_AHEAD_BYTES // u.dtype.itemsize)
        guard = e.conjunction(some, *inside)
        src = (pointer, base, *(() if guard is None else (e.splat(guard, n),)))
        rows.append(e.emit(Low.LOAD, u.dtype, src, start, n))
    rows += [e.const(0, u.dtype, n)] * (n - len(within))
    for j, column in enumerate(transpose(e, rows)[:count]):
        remember(e, u, {**position, along: first + j}, column)
    return find(e, u, position)


def transpose(e: Emission, rows: list[Inst]) -> list[Inst]:
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
                    mixed[j] = e.emit(Low.SHUFFLE, rows[i].dtype, (rows[i], rows[i + step]), order, n)
        rows = mixed
        step *= 2
    bits = part.bit_length() - 1
    return [rows[i // part * part + int(f"{i % part:0{bits}b}"[::-1], 2)] for i in range(n)] if bits else rows


def scalar_load(e: Emission, dtype: DType, pointer: Inst, a: Affine, valid: Inst | None) -> Inst:
    if valid is not None and valid.lanes > 1:
        valid = e.emit(Low.ANY, dtypes.bool, (valid,))
    return e.emit(Low.LOAD, dtype, (pointer, sum_of_terms(e, a), *(() if valid is None else (valid,))), a.constant)
