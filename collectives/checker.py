"""Symbolic proof that a program takes its precondition to its postcondition.

Every element of every buffer is an expression over inputs `(rank, index)`; instructions are executed in global order,
element by element. Contributions are then compared as multisets (a double reduce fails), and for algorithms of order
`tree` the expression itself must be the canonical tree, which is what makes all of them give the same bits. Refused:

- reading an element not written yet, out of bounds, or through a slot that was never borrowed or is already released;
- writing an element that someone still borrows; writing `in`;
- reading what another rank is to write, or writing what is borrowed to be read;
- two borrows of one name at once; a slot never released;
- rounding twice: reducing over an already reduced value from a buffer that does not hold partial sums.

Cost: O(instructions · length); meant for small counts, as every index pattern shows up there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from manygrad.collectives.algorithms import ALGORITHMS
from manygrad.collectives.program import (
    Chunk,
    Collective,
    Copy,
    Instr,
    Program,
    Reduce,
    Slot,
    Source,
    Transfer,
    show_instr,
    show_source,
)
from manygrad.errors import ProgramError

Expr = tuple[Any, ...]  # ("in", rank, index) or (op, left, right)


def canonical(op: str, values: Sequence[Expr]) -> Expr:
    """The balanced tree over `values`, split at the largest power of two below their number."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return (op, canonical(op, values[:half]), canonical(op, values[half:]))


def contributions(e: Expr) -> Counter[Expr]:
    """The inputs in `e`, with how often each occurs."""
    return Counter([e]) if e[0] == "in" else contributions(e[1]) + contributions(e[2])


def expected(c: Collective, rank: int) -> list[Expr]:
    """The postcondition: `out` of `rank`."""
    pieces = c.pieces
    if c.kind in ("all_reduce", "reduce_scatter"):
        start, length = (0, c.count) if c.kind == "all_reduce" else pieces[rank]
        return [canonical(c.op, [("in", r, i) for r in range(c.ranks)]) for i in range(start, start + length)]
    if c.kind == "all_gather":
        return [("in", r, i) for r in range(c.ranks) for i in range(pieces[r][1])]
    if c.kind == "all_to_all":
        rows = c.rows or (1,) * c.ranks
        start, length = pieces[rank]
        return [("in", r, rows[r] * start + i) for r in range(c.ranks) for i in range(rows[r] * length)]
    return [("in", c.root, i) for i in range(c.out_length(rank))]


@dataclass
class _Borrow:
    src_rank: int
    chunk: Chunk
    is_written: bool

    def cells(self) -> Iterator[tuple[int, str, int]]:
        return ((self.src_rank, self.chunk.buffer, k) for k in range(self.chunk.offset, self.chunk.end))


class _Machine:
    """The state of all ranks: values, borrows, and the two checks every access goes through."""

    def __init__(self, p: Program):
        c = p.collective
        self.memory: dict[tuple[int, str], list[Expr | None]] = {}
        self.partial: set[tuple[int, str]] = set()
        self.borrows: dict[tuple[int, str], _Borrow] = {}
        self.lent: Counter[tuple[int, str, int]] = Counter()
        self.places: Counter[tuple[int, str, int]] = Counter()  # those of what is lent that are to be written
        for r in range(c.ranks):
            self.memory[r, "in"] = [("in", r, i) for i in range(c.in_length(r))]
            self.memory[r, "out"] = [None] * c.out_length(r)
        for t in p.temps:
            self.memory[t.rank, t.name] = [None] * t.length
            if t.partial:
                self.partial.add((t.rank, t.name))

    def bounds(self, rank: int, c: Chunk) -> list[Expr | None]:
        cells = self.memory.get((rank, c.buffer))
        if cells is None:
            raise ProgramError(f"rank {rank} has no buffer {c.buffer!r}")
        if c.length < 1 or c.offset < 0 or c.end > len(cells):
            raise ProgramError(
                f"{c.buffer}[{c.offset}:{c.end}] is outside the {len(cells)} elements of rank {rank}'s buffer, or empty"
            )
        return cells

    def read(self, rank: int, s: Source) -> tuple[list[Expr], bool]:
        """The expressions of `s`, and whether they come from a buffer of partial sums."""
        if isinstance(s, Slot):
            borrow = self.borrows.get((rank, s.name))
            if borrow is None:
                raise ProgramError(
                    f"rank {rank} reads slot {s.name!r}, which it does not hold (never borrowed, or already released)"
                )
            if borrow.is_written:
                raise ProgramError(f"rank {rank} reads slot {s.name!r}, which it is to write")
            return self.cells(borrow.src_rank, borrow.chunk)
        return self.cells(rank, s)

    def cells(self, rank: int, s: Chunk) -> tuple[list[Expr], bool]:
        cells = self.bounds(rank, s)[s.offset : s.end]
        for i, e in enumerate(cells, s.offset):
            if e is None or self.places[rank, s.buffer, i]:
                raise ProgramError(f"rank {rank}'s {s.buffer}[{i}] is read before it is written")
        return cells, (rank, s.buffer) in self.partial  # type: ignore[return-value]

    def write(self, rank: int, c: Chunk, values: list[Expr]) -> None:
        cells = self.bounds(rank, c)
        if c.buffer == "in":
            raise ProgramError(f"rank {rank} writes its input")
        if len(values) != c.length:
            raise ProgramError(f"{len(values)} elements are written to {c.length}")
        for i in range(c.offset, c.end):
            if self.lent[rank, c.buffer, i]:
                raise ProgramError(f"rank {rank} overwrites {c.buffer}[{i}] while it is borrowed")
        cells[c.offset : c.end] = values

    def put(self, rank: int, s: Slot, values: list[Expr]) -> None:
        """Writes a borrowed place."""
        borrow = self.borrows.get((rank, s.name))
        if borrow is None or not borrow.is_written or borrow.chunk.length != len(values):
            raise ProgramError(f"rank {rank} writes slot {s.name!r}, which is no place of {len(values)} elements")
        self.memory[borrow.src_rank, borrow.chunk.buffer][borrow.chunk.offset : borrow.chunk.end] = values

    def step(self, i: Instr) -> None:
        if isinstance(i, Transfer):
            if i.src_rank == i.dst_rank:
                raise ProgramError("a rank borrows from itself")
            if (i.dst_rank, i.slot) in self.borrows:
                raise ProgramError(f"rank {i.dst_rank} already holds a slot {i.slot!r}")
            borrow = self.borrows[i.dst_rank, i.slot] = _Borrow(i.src_rank, i.src, i.is_written)
            if not i.is_written:
                self.read(i.src_rank, i.src)
            else:
                self.bounds(i.src_rank, i.src)
                if any(self.lent[c] for c in borrow.cells()):
                    raise ProgramError(
                        f"rank {i.src_rank} lends {show_source(i.src)} to be written, but it is lent already"
                    )
                self.places.update(borrow.cells())
            self.lent.update(borrow.cells())
        elif isinstance(i, Copy):
            self.write(i.rank, i.dst, self.read(i.rank, i.src)[0])
        elif isinstance(i, Reduce):
            columns = []
            for s in i.srcs:
                values, partial = self.read(i.rank, s)
                if not partial and any(e[0] != "in" for e in values):
                    raise ProgramError(
                        "an already rounded sum is reduced again; hold partial sums in a partial temporary"
                    )
                columns.append(values)
            if len({len(v) for v in columns}) != 1:
                raise ProgramError(f"sources of different lengths {[len(v) for v in columns]}")
            total = [canonical(i.op, row) for row in zip(*columns)]
            self.write(i.rank, i.dst, total)
            for s in i.copies:
                self.put(i.rank, s, total)
        else:
            if (i.rank, i.slot) not in self.borrows:
                raise ProgramError(f"rank {i.rank} releases slot {i.slot!r}, which it does not hold")
            borrow = self.borrows.pop((i.rank, i.slot))
            self.lent.subtract(borrow.cells())
            if borrow.is_written:
                self.places.subtract(borrow.cells())


def check(program: Program, order: str | None = None) -> None:
    """Proves `program` (of all ranks), or raises `ProgramError` naming the instruction, element and values.

    `order` defaults to what the program's algorithm declares.
    """
    c = program.collective
    if len(program.only) != c.ranks:
        raise ProgramError(
            f"only ranks {sorted(program.only)} of {c.ranks} are in this program; the whole is needed for a proof"
        )
    order = order or ALGORITHMS[program.algorithm].order
    machine = _Machine(program)
    for n, instr in enumerate(program.instrs):
        try:
            machine.step(instr)
        except ProgramError as e:
            raise ProgramError(f"{program.algorithm} {c.kind}, instruction {n} ({show_instr(instr)}): {e}") from None
    where = f"{program.algorithm} {c.kind} over {c.ranks} ranks, {c.count} elements"
    if machine.borrows:
        raise ProgramError(f"{where}: never released: {sorted(machine.borrows)}")
    for r in range(c.ranks):
        for i, (got, want) in enumerate(zip(machine.memory[r, "out"], expected(c, r), strict=True)):
            if got is None:
                raise ProgramError(f"{where}: out[{i}] of rank {r} is never written")
            if got != want and (order == "tree" or contributions(got) != contributions(want)):
                raise ProgramError(f"{where}: out[{i}] of rank {r} is {got}, expected {want}")
            if c.op != "add" and got[0] not in ("in", c.op):
                raise ProgramError(f"{where}: out[{i}] of rank {r} is reduced by {got[0]}, expected {c.op}")
    return None
