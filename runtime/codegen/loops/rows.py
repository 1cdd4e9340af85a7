"""Rows that do not begin at a cache line, stored past the caches: each row's loop begins where a line does.

before:  for j in 0, 16, ..: STORE out[1000 i + j]  (the vectors of every second row lie across two lines)
after:   STORE of the elements before the first line; for j in whole lines: STREAM out[1000 i + j]; STORE of the rest

The values are those of the loop as it was, in other vectors. For kernels whose innermost loop is the lanes', which
reads and writes what lies side by side.
"""

from __future__ import annotations

from dataclasses import replace

from manygrad.runtime.codegen.loops import index
from manygrad.runtime.codegen.loops.context import KernelContext
from manygrad.runtime.codegen.loops.index import Index, Of, RowOf
from manygrad.runtime.codegen.loops.lanes import Lanes
from manygrad.runtime.codegen.loops.tiles import Around, Body, Tiler
from manygrad.runtime.codegen.loops.tree import Node, Nodes, Ragged, StorePart, Vectors
from manygrad.runtime.codegen.opts.alignment import begins_anywhere, whole_vectors
from manygrad.runtime.codegen.target import LINE_BYTES


def has_rows(kernel: KernelContext) -> bool:
    """Whether the kernel's rows are stored so."""
    nest, stores = kernel.nest, kernel.sig.stores
    return (
        all(s.src[0].src[0].arg in nest.streamed for s in stores)
        and not any(nest.vectorized is not None and whole_vectors(s, nest.vectorized, nest.lanes) for s in stores)
        and begins_anywhere(kernel.sig, nest)
    )


def each_row(t: Tiler, around: Around, body: Body) -> Nodes:
    """`body` for all of the rows in the tile, one after the other, in vectors that begin where lines do."""
    nest = t.kernel.nest
    r = nest.vectorized
    assert r is not None
    line = index.const(max(nest.lanes, *(LINE_BYTES // s.src[1].dtype.itemsize for s in t.kernel.sig.stores)))
    lanes, size = Lanes(r, nest.lanes, singly=r, begins=1), index.const(r.src[0].arg)
    found: list[Node] = []
    for row in t.kernel.tiling.positions(frozenset(nest.loops) - {r}, around.tiles, around.lanes):
        of_row = replace(around, lanes=lanes, row=tuple(row.items()))
        first = Index(Of.LINE, (line,), RowOf(r, of_row.row))
        last = index.sub(size, index.mod(index.sub(size, first), line))

        def some(begin: Index, end: Index, around: Around) -> Node:
            return t.counted(r, begin, end, nest.lanes, around, body, Ragged.SIZE, end)

        found.append(some(index.const(0), first, of_row))
        found.append(t.counted(r, first, last, nest.lanes, replace(of_row, stored=StorePart.LINES), body))
        found.append(some(last, size, of_row))
    return (Vectors(lanes, tuple(found)),)
