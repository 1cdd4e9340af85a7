"""cut: long transfers in pieces, so that receiving, reducing and sending on go on at the same time.

    before                                after, for pieces of 2
    1 -> 0: in[0:4] as s1                 1 -> 0: in[0:2] as s1     1 -> 0: in[2:4] as s1.1
    0: out[0:4] = add(in[0:4], s1)        0: out[0:2] = add(in[0:2], s1)     0: out[2:4] = add(in[2:4], s1.1)
    0: release s1                         0: release s1     0: release s1.1

Every instruction is elementwise over one length, so each is cut at the same distances from its start, and an element's
sum is the same tree over the same ranks. The order stays as it is, but that neighbouring reductions take turns, piece
by piece, and so do the transfers that they read (few pieces are held at a time). `prepare` moves sends up to where
their piece is ready, and receives down to where it is needed.

Between hosts a piece is one frame: it is reduced from the memory that it was received in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, zip_longest

from manygrad.collectives.program import Chunk, Copy, Instr, Program, Reduce, Slot, Source, Transfer


def cut(program: Program, length: int) -> Program:
    """`program` in pieces of at most `length` elements. All ranks must cut alike."""
    pieces: dict[tuple[int, str], int] = {}  # of each slot
    found: list[Instr] = []
    for group, instrs in groupby(program.instrs, _group):
        parts = [list(_cut(i, length, pieces)) for i in instrs]
        if group:
            found += [i for turn in zip_longest(*parts) for i in turn if i is not None]
        else:
            found += [i for part in parts for i in part]
    return replace(program, instrs=found)


def _group(i: Instr) -> str:
    """Neighbours of one group go in turns; each of those without one is cut by itself."""
    return i.group if isinstance(i, Transfer) else "" if isinstance(i, Copy) else "reductions"


def _cut(instr: Instr, length: int, pieces: dict[tuple[int, str], int]) -> Iterator[Instr]:
    if isinstance(instr, Transfer):
        count = pieces[instr.dst_rank, instr.slot] = -(-instr.src.length // length)
        for k in range(count):
            yield replace(instr, src=_piece(instr.src, k, length), slot=_name(instr.slot, k))
    elif isinstance(instr, Copy):
        for k in range(-(-instr.dst.length // length)):
            yield replace(instr, dst=_piece(instr.dst, k, length), src=_source(instr.src, k, length))
    elif isinstance(instr, Reduce):
        for k in range(-(-instr.dst.length // length)):
            srcs = tuple(_source(s, k, length) for s in instr.srcs)
            copies = tuple(Slot(_name(s.name, k)) for s in instr.copies)
            yield replace(instr, dst=_piece(instr.dst, k, length), srcs=srcs, copies=copies)
    else:
        for k in range(pieces.pop((instr.rank, instr.slot))):
            yield replace(instr, slot=_name(instr.slot, k))


def _piece(c: Chunk, k: int, length: int) -> Chunk:
    return Chunk(c.buffer, c.offset + k * length, min(length, c.length - k * length))


def _source(s: Source, k: int, length: int) -> Source:
    return Slot(_name(s.name, k)) if isinstance(s, Slot) else _piece(s, k, length)


def _name(slot: str, k: int) -> str:
    return f"{slot}.{k}" if k else slot
