"""A warp's matrix product: its factors in shared memory, the instructions, the sums in registers.

Element (row, iteration) of a stage lies in the row's 64 bytes, in one of four chunks of 16 bytes:

    [row, or its neighbour][chunk, moved on in a circle][place in the chunk]

Of an instruction's 16 rows thread g * 4 + t of the warp has g and g + 8, of its 8 columns it reads g and has the sums
of 2t and 2t + 1, and of its 16 iterations (8 of float32) it reads four (two). Which rows, columns and iterations these
are of the product is free, if all threads agree: pairs of rows of g's tile, pairs of columns of t's tile, and a chunk
of t's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manygrad.runtime.codegen.emit.emission import INDEX, Emission
from manygrad.runtime.codegen.emit.indices import instruction
from manygrad.runtime.codegen.emit.shared import block_offset, memory_of
from manygrad.runtime.codegen.emit.values import remember, value
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.loops.local import FragmentStage
from manygrad.runtime.codegen.loops.tree import Fetch, FetchPart, ReduceLoop, SharePart, every
from manygrad.runtime.codegen.lowered import Inst, Low
from manygrad.runtime.codegen.target import CHUNK_BYTES, FRAGMENT_BYTES, WARP_BESIDE
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.uop import UOp

CHUNKS = FRAGMENT_BYTES // CHUNK_BYTES
CIRCLE = 16  # rows after which chunks are moved on by one
WORDS = CHUNK_BYTES // 4
BANK_CHUNKS = 8  # that all banks of shared memory hold side by side

# *** the stage ***


def declare(e: Emission, n: Fetch) -> None:
    """The variables of what is fetched, where all that reads them sees them: not in a branch of some threads."""
    stage, zero = n.stage, e.const(0, n.stage.value.dtype)
    if stage.along is not None:  # (as words, which stay in registers)
        zero = e.const(0, dtypes.int32, WORDS)
    for part in (x for x in every(n.body) if isinstance(x, FetchPart)):
        if (key := (stage.value, part.number)) not in e.fetched:
            count = 2 if stage.along is stage.side.source else 1
            variables = [e.emit(Low.ACC, zero.dtype, (zero,), None, zero.lanes, here=True) for _ in range(count)]
            e.fetched[key] = variables


def fetch_part(e: Emission, n: FetchPart) -> None:
    """The open tiles: a chunk of a row, pairs of iterations of several rows, or one element."""
    stage = n.stage
    found = [_read(e, stage, i) for i in range(2 if stage.along is stage.side.source else 1)]
    if stage.along is not None:
        found = [e.splat(x, stage.chunk) for x in found]
        found = [e.emit(Ops.BITCAST, dtypes.int32, (x,), None, WORDS) for x in found]
    if n.inside.number is None:
        inside = instruction(e, n.inside)
        found = [e.alu(Ops.WHERE, x.dtype, inside, x, e.const(0, x.dtype)) for x in found]
    for variable, x in zip(e.fetched[stage.value, n.number], found):
        e.emit(Low.SET, dtypes.void, (variable, x), here=True)


def share_part(e: Emission, n: SharePart) -> None:
    stage = n.stage
    row = _since(e, stage.side.source, instruction(e, stage.side.begin))
    term = _since(e, stage.k_source, e.scope.block[stage.k])
    found = [e.emit(Low.GET, x.dtype, (x,), None, x.lanes, here=True) for x in e.fetched[stage.value, n.number]]
    if stage.along is not None:
        found = [e.emit(Ops.BITCAST, stage.value.dtype, (x,), None, stage.chunk) for x in found]
    if stage.along is not stage.side.source:
        _store(e, stage, row, term, found[0])
        return
    for i in range(stage.chunk):
        both = e.emit(Low.SHUFFLE, found[0].dtype, tuple(found), (i, stage.chunk + i), 2)
        _store(e, stage, e.add(row, e.const(i)), term, both)


def chunk_offset(e: Emission, stage: FragmentStage, to: tuple[Index, ...]) -> Inst:
    """Where a chunk lies as it is."""
    term, row = (instruction(e, x) for x in to)
    if not stage.is_by_terms:
        return _place_of(e, stage, row, term)
    chunks = stage.side.size // stage.chunk
    place = e.add(_times(e, term, chunks), _quotient(e, row, stage.chunk))
    moved = _moved(e, stage, place, _quotient(e, term, stage.chunk))
    return e.add(block_offset(e, stage), _times(e, moved, stage.chunk))


def _moved(e: Emission, stage: FragmentStage, place: Inst, own: Inst) -> Inst:
    """Where the chunk of rows with the number `place` lies, of the terms of the `own`th of the four threads that read
    at once: in banks of its own. Threads below these read `apart` chunks further on, which are in other banks already.
    """
    apart = max(1, stage.read // stage.chunk)
    by = e.add(own, _times(e, _quotient(e, own, apart), apart))
    return e.emit(Ops.XOR, INDEX, (place, by))


def _read(e: Emission, stage: FragmentStage, i: int) -> Inst:
    """A vector of one iteration, the `i`-th from that of the open tile on."""
    origin = e.scope.origin[stage.k_source]
    e.open()
    with e.within(e.with_tile(stage.k_source, e.add(origin, e.const(i)))):
        found = value(e, stage.source, {})
    e.close()
    return found


def _since(e: Emission, r: UOp, begin: Inst) -> Inst:
    return e.emit(Ops.SUB, INDEX, (e.scope.origin[r], begin))


def _store(e: Emission, stage: FragmentStage, row: Inst, term: Inst, found: Inst) -> None:
    """(In this block: it follows the barrier.)"""
    src = (memory_of(e, stage), _place_of(e, stage, row, term), found)
    e.emit(Low.STORE, dtypes.void, src, 0, found.lanes, here=True)


def _place_of(e: Emission, stage: FragmentStage, row: Inst, term: Inst) -> Inst:
    swapped = e.emit(Ops.XOR, INDEX, (row, _part(e, row, stage.tile, 2)))
    chunk = e.emit(Ops.XOR, INDEX, (_quotient(e, term, stage.chunk), _part(e, row, CIRCLE, CHUNKS)))
    places = [(swapped, stage.terms), (chunk, stage.chunk), (_remainder(e, term, stage.chunk), 1)]
    return e.add(block_offset(e, stage), _offset(e, places))


def _offset(e: Emission, places: list[tuple[Inst, int]]) -> Inst:
    total = e.const(0)
    for place, pitch in places:
        total = e.add(total, place if pitch == 1 else e.emit(Ops.MUL, INDEX, (place, e.const(pitch))))
    return total


def _part(e: Emission, x: Inst, by: int, count: int) -> Inst:
    """The digit of `x` that counts in steps of `by`, of so many."""
    return _remainder(e, _quotient(e, x, by), count)


def _quotient(e: Emission, x: Inst, by: int) -> Inst:
    return e.emit(Ops.IDIV, INDEX, (x, e.const(by)), True) if by > 1 else x


def _remainder(e: Emission, x: Inst, by: int) -> Inst:
    return e.emit(Ops.MOD, INDEX, (x, e.const(by)), True)


# *** the product ***


class _Factors(NamedTuple):
    """A REDUCE and where its factors lie."""

    u: UOp
    rows: FragmentStage
    columns: FragmentStage


def reduce_fragments(e: Emission, node: ReduceLoop, body: Callable[[], None]) -> None:
    """The sums of the open tile, around the loops of `body`; then its values are known."""
    (u,), vectorized = node.group, e.scope.vectorized
    assert vectorized is not None
    stages = [e.local.fragments[s] for s in u.src[0].src]
    rows, columns = sorted(stages, key=lambda s: s.side.loop is vectorized)
    zero = e.const(0.0, u.dtype, 4)
    sums = {
        (i, j): e.emit(Low.ACC, u.dtype, (zero,), None, 4, here=True)
        for i in range(0, rows.tile, 2)
        for j in range(0, columns.tile, 2)
    }
    e.adding.append(lambda: _add(e, _Factors(u, rows, columns), sums))
    body()
    e.adding.pop()
    found = {at: e.emit(Low.GET, u.dtype, (acc,), None, 4, here=True) for at, acc in sums.items()}

    def sum_at(i: int, j: int) -> tuple[Inst, int]:
        pair, place = _pair_of(columns, j)
        return found[i // 2 * 2, 2 * pair], 2 * (i % 2) + place

    for i in range(rows.tile):
        for j in range(0, columns.tile, e.scope.lanes):
            row = _joined(e, [sum_at(i, j + lane) for lane in range(e.scope.lanes)])
            remember(e, u, {rows.side.loop: i, vectorized: j}, row)


def _pair_of(stage: FragmentStage, column: int) -> tuple[int, int]:
    """Which of the pairs of columns that an instruction has of a thread's tile, and which of the two: neighbours, or,
    so that a thread reads neighbouring ones, one of each half."""
    half = stage.tile // 2
    return (column % half, column // half) if stage.is_by_terms else (column // 2, column % 2)


def _joined(e: Emission, parts: list[tuple[Inst, int]]) -> Inst:
    """A vector of single lanes of vectors, a power of two of them."""
    if len(parts) == 2:
        (a, i), (b, j) = parts
        return e.emit(Low.SHUFFLE, a.dtype, (a, b), (i, a.lanes + j), 2)
    half = len(parts) // 2
    both = _joined(e, parts[:half]), _joined(e, parts[half:])
    return e.emit(Low.SHUFFLE, both[0].dtype, both, tuple(range(2 * half)), 2 * half)


def _add(e: Emission, p: _Factors, sums: dict[tuple[int, int], Inst]) -> None:
    """The block of the reduction that is shared: two instructions for each pair of rows and of columns."""
    chunks = _rows_of(e, p.rows), _columns_of(e, p.columns)
    for half in range(2):
        left, right = ([e.emit(Low.HALVES, x.dtype, (x,), half, x.lanes // 2) for x in side] for side in chunks)
        for (i, j), acc in sums.items():
            old = e.emit(Low.GET, acc.dtype, (acc,), None, 4, here=True)
            src = (left[i], left[i + 1], right[j // 2], old)
            new = e.emit(Low.WARP_DOT, acc.dtype, src, p.u.src[0].arg, 4, here=True)
            e.emit(Low.SET, dtypes.void, (acc, new), here=True)


def _rows_of(e: Emission, stage: FragmentStage) -> list[Inst]:
    """A chunk of each row of this thread's tile."""
    first = _since(e, stage.side.loop, instruction(e, stage.side.begin))
    if stage.is_by_terms:
        return _chunks_by_terms(e, stage, first)
    odd = _part(e, first, stage.tile, 2)  # of two neighbouring threads this is the second one: its rows are swapped
    even = e.add(first, odd), e.emit(Ops.SUB, INDEX, (first, odd))
    at = [_chunk(e, stage, first, row) for row in even]
    return [_load(e, stage, at[i % 2], i * stage.terms) for i in range(stage.tile)]


def _columns_of(e: Emission, stage: FragmentStage) -> list[Inst]:
    """A chunk of the column that this thread reads of each pair: those of the tile of the thread whose place beside it
    is half of this one's below, the first ones or the second ones."""
    thread = e.emit(Low.ITEM, INDEX, (), 0)
    below, beside = _quotient(e, thread, WARP_BESIDE), _remainder(e, thread, WARP_BESIDE)
    own = _since(e, stage.side.loop, instruction(e, stage.side.begin))
    of_warp = e.emit(Ops.SUB, INDEX, (own, _times(e, beside, stage.tile)))
    first = e.add(of_warp, _times(e, _quotient(e, below, 2), stage.tile))
    second = _remainder(e, below, 2)
    if stage.is_by_terms:
        return _chunks_by_terms(e, stage, e.add(first, _times(e, second, stage.read)))
    second = e.emit(Ops.XOR, INDEX, (second, _part(e, first, stage.tile, 2)))
    at = _chunk(e, stage, first, e.add(first, second))
    return [_load(e, stage, at, j * stage.terms) for j in range(0, stage.tile, 2)]


def _chunks_by_terms(e: Emission, stage: FragmentStage, first: Inst) -> list[Inst]:
    """A chunk of each row that this thread reads, from `first` on, of a stage that has the rows of each iteration side
    by side."""
    own, lanes = _remainder(e, e.emit(Low.ITEM, INDEX, (), 0), WARP_BESIDE), min(stage.read, stage.chunk)
    chunks, chunk = stage.side.size // stage.chunk, _quotient(e, first, stage.chunk)
    base = e.add(_times(e, own, chunks * stage.chunk), chunk)
    within = e.add(block_offset(e, stage), _remainder(e, first, stage.chunk))

    def rows(term: int, row: int) -> Inst:
        place = term * chunks + row // stage.chunk
        low = place % BANK_CHUNKS
        moved = _times(e, _moved(e, stage, e.add(base, e.const(low)), own), stage.chunk)
        return _load(e, stage, e.add(within, moved), (place - low) * stage.chunk, lanes)

    terms = [[rows(i, j) for j in range(0, stage.read, lanes)] for i in range(stage.chunk)]
    return [_joined(e, [(rows[j // lanes], j % lanes) for rows in terms]) for j in range(stage.read)]


def _times(e: Emission, x: Inst, by: int) -> Inst:
    return e.emit(Ops.MUL, INDEX, (x, e.const(by)))


def _chunk(e: Emission, stage: FragmentStage, first: Inst, row: Inst) -> Inst:
    """Where a thread's chunk of a row lies, of a tile that begins at `first`."""
    own = _remainder(e, e.emit(Low.ITEM, INDEX, (), 0), WARP_BESIDE)
    chunk = e.emit(Ops.XOR, INDEX, (own, _part(e, first, CIRCLE, CHUNKS)))
    return e.add(block_offset(e, stage), _offset(e, [(row, stage.terms), (chunk, stage.chunk)]))


def _load(e: Emission, stage: FragmentStage, at: Inst, constant: int, lanes: int = 0) -> Inst:
    """So many neighbours, or a chunk. (In this block: the contents change between barriers.)"""
    src = memory_of(e, stage), at
    return e.emit(Low.LOAD, stage.value.dtype, src, constant, lanes or stage.chunk, here=True)
