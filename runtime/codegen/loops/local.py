"""Layout of a thread's local memory: operands that are packed there, rows that are kept, sums that rest, sums
of a matrix unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from manygrad.runtime.codegen.analysis.affine import index_sum
from manygrad.runtime.codegen.analysis.describe import size_max
from manygrad.runtime.codegen.loops.context import KernelContext
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.opts.cache_read import (
    packed_as,
    stage_rows,
    stage_sizes,
    staged_values,
    tiled_loops,
)
from manygrad.runtime.codegen.opts.keep import kept_bytes, kept_rows, kept_values, pitch
from manygrad.runtime.codegen.opts.matrix import matrices, matrix_rows, turned_rows
from manygrad.runtime.codegen.target import CHUNK_BYTES, FRAGMENT_BYTES
from manygrad.tensor.dtype import DType
from manygrad.tensor.uop.uop import UOp

HEADER_BYTES = 64  # where a thread keeps up to which index it has run the kernel (0: not yet), so what it holds packed


@dataclass(frozen=True)
class Stage:
    """A value packed into local memory at every tile of `loop`: element [i of `ranges`..., position in the tile].

    The position is that in the tiles of all loops up to `loop` on which the value depends, in nested order. Of a
    blocked loop: [tile in the block, i of `ranges`..., position in the tile]. `turned`: rows for a matrix unit, as it
    reads them: [tile of the one range, position in the tile, iteration in the range's tile]. Of an element that is
    packed in parts all first ones of the loop's tile come before the second ones.
    """

    value: UOp
    loop: UOp
    ranges: tuple[UOp, ...]
    row: UOp  # the joint index of `ranges`, in elements
    rows: int  # of a blocked loop: elements from one of its iterations to the next
    # a reduce range of which a block is packed at a time; elements from one iteration to the next
    blocked: tuple[UOp, int] | None
    pitches: Mapping[UOp, int]  # elements from one position in a loop's tile to the next
    offset_bytes: int
    turned: bool
    # the one of `ranges` whose iterations are packed in groups, each as one element of their size, and how many a group
    grouped: UOp | None
    group: int
    dtype: DType  # of what is packed: of the value, or of its parts
    parts: int  # that an element has
    part: int  # elements from one part to the next


@dataclass(frozen=True)
class Kept:
    """An expression's values along `r` in local memory: a row for each position of the tile."""

    r: UOp
    owners: tuple[UOp, ...]  # the REDUCEs over `r` of them: the values are there once one has run
    rows: tuple[tuple[UOp, int], ...]
    pitch: int
    offset_bytes: int


@dataclass(frozen=True)
class MatrixSums:
    """Sums of a whole tile that a matrix unit adds up, and where they lie when they are whole: square after square,
    those side by side first."""

    rows: UOp | None  # the loop whose tile is their rows; None: there is one row
    height: int  # rows
    wide: int  # squares side by side
    terms: int  # iterations of the reduction's tile
    offset_bytes: int


@dataclass(frozen=True)
class GroupStage:
    """A value in the memory that a group shares: element [i of the block of `k`, place in the group's part of each
    loop]. `source` is the value along ranges of its own, with which a work item copies what any of them reads."""

    value: UOp
    source: UOp
    k: UOp
    k_source: UOp
    iterations: int
    row: int  # elements of one iteration
    loops: tuple[SharedLoop, ...]  # the one that is vectorized last
    offset_bytes: int
    ring: int  # blocks of `iterations` that there are, one after the other
    width: int | None  # elements that one asynchronous instruction copies; None: they go through registers

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.iterations * self.row


@dataclass(frozen=True)
class SharedLoop:
    """A group's part of a loop. Of tiles of several vectors all first ones come before the second ones, so that
    neighbouring threads read what lies side by side; `vectors`: how many a tile has, `lanes`: of each."""

    loop: UOp
    source: UOp
    begin: Index  # the first iteration of the group's part
    size: int
    pitch: int  # elements from one iteration to the next
    vectors: int = 1
    lanes: int = 1


@dataclass(frozen=True)
class FragmentStage:
    """A factor of a warp's matrix product in the memory that a group shares: of each row (or column) of the group's
    part the iterations of a block of `k`, in chunks of 16 bytes, each of which a thread reads at once.

    Rows that a quarter of a warp reads at once lie in other banks: of two neighbouring threads' rows one is swapped
    with its neighbour, and chunks of rows further apart are moved on in a circle. `along`: the range of `source` along
    which the argument is read in vectors; None: element by element. `is_copied`: asynchronous instructions copy its
    chunks as they are: where these lie along the rows, each iteration's rows are one after the other."""

    value: UOp
    source: UOp  # along ranges of its own, of the loop and of k
    k: UOp
    k_source: UOp
    side: SharedLoop
    tile: int  # rows of a thread
    read: int  # of these it reads itself: of columns half
    along: UOp | None
    offset_bytes: int
    ring: int
    is_copied: bool

    @property
    def terms(self) -> int:
        """Iterations of a block."""
        return FRAGMENT_BYTES // self.value.dtype.itemsize

    @property
    def chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // self.value.dtype.itemsize

    @property
    def elements(self) -> int:
        """Elements of a block."""
        return self.side.size * self.terms

    @property
    def is_by_terms(self) -> bool:
        return self.is_copied and self.along is self.side.source


class Local:
    """The local memory of one kernel, and what its groups share."""

    def __init__(self, kernel: KernelContext) -> None:
        self.nbytes = 0
        self.stages: dict[UOp, Stage] = {}  # by what is packed
        self.kept: dict[UOp, Kept] = {}  # expression along its reduce range
        self.again: dict[UOp, tuple[Kept, UOp]] = {}  # the same along another range, and that range
        self._sums: int | None = None
        self.matrices: dict[UOp, MatrixSums] = {}  # by REDUCE
        self.shared_bytes = 0
        self.shared: dict[UOp, GroupStage] = {}  # by what is read
        self.fragments: dict[UOp, FragmentStage] = {}  # the same, of a warp's matrix product
        if kernel.nest.staged:
            self.reserve(HEADER_BYTES)
        for r, slot in kernel.nest.staged:
            self._stage(kernel, r, slot)
        for r, again in kernel.nest.kept:
            self._keep(kernel, r, again)
        for u in kernel.sig.reduces:
            if (k := kernel.nest.matrix) is not None and k in u.src[1:]:
                (high, wide), rows = matrices(kernel.nest, u), matrix_rows(kernel.nest, u)
                at = self.reserve(high * wide * u.src[0].arg.rows * u.src[0].arg.vector_bytes)
                height = kernel.nest.tile_of(rows) if rows is not None else 1
                self.matrices[u] = MatrixSums(rows, height, wide, kernel.nest.tile_of(k), at)

    def reserve(self, nbytes: int) -> int:
        """Its offset in bytes."""
        offset = self.nbytes
        self.nbytes += -(-nbytes // 64) * 64
        return offset

    def sums(self, nbytes: int) -> int:
        """Where the sums of a blocked reduction rest, wherever its loops are written."""
        if self._sums is None:
            self._sums = self.reserve(nbytes)
        return self._sums

    def share(self, nbytes: int) -> int:
        """Its offset in bytes in the memory of a group."""
        offset = self.shared_bytes
        self.shared_bytes += -(-nbytes // 64) * 64
        return offset

    def _stage(self, kernel: KernelContext, loop: UOp, slot: int) -> None:
        nest = kernel.nest
        for u, ranges in staged_values(kernel.sig, slot):
            sizes = stage_sizes(nest, loop, ranges)
            grouped = next((r for r in ranges if r in nest.dots), None)
            each = nest.dots[grouped] if grouped is not None else 1
            parts, dtype = packed_as(nest, u, ranges)
            pitches, pitch = {}, each
            for r in reversed(tiled_loops(nest, loop, u)):
                pitches[r] = pitch
                pitch *= nest.tile.get(r, 1)
            part, pitch = pitch, pitch * parts
            # (the iterations of a group lie side by side in its element)
            shares = [each if r is grouped else 1 for r in ranges]
            steps = {r: math.prod(sizes[i + 1 :]) * pitch // math.prod(shares[i:]) for i, r in enumerate(ranges)}
            if turned := any(turned_rows(nest, v, u) for v in kernel.sig.reduces):
                steps = {ranges[0]: parts * nest.tile_of(loop)}
            row = index_sum(tuple(steps.items()), 0)
            blocked = next(((r, c) for (r, c), n in zip(steps.items(), sizes) if n < size_max(r)), None)
            rows = stage_rows(nest, loop, sizes)
            nbytes = rows * pitch // each * nest.block.get(loop, 1) * dtype.itemsize
            if turned:
                (k,) = ranges
                pitches, part = {loop: nest.tile_of(k), k: 1}, nest.tile_of(k) * nest.tile_of(loop)
            at = self.reserve(nbytes)
            self.stages[u] = Stage(
                u, loop, ranges, row, rows * parts, blocked, pitches, at, turned, grouped, each, dtype, parts, part
            )

    def _keep(self, kernel: KernelContext, r: UOp, again: UOp) -> None:
        sig, nest = kernel.sig, kernel.nest
        over = [w for w in sig.reduces if w.src[1:] == (r,)]
        for v, u in kept_values(sig, r, again).items():
            if u not in self.kept:
                owners = tuple(w for w in over if u in w.src[0].toposort())
                at = self.reserve(kept_bytes(u, r, nest))
                self.kept[u] = Kept(r, owners, kept_rows(u, r, nest), pitch(r), at)
            self.again[v] = (self.kept[u], again)
