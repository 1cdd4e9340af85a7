"""Programs: what every rank does in a collective, as one globally ordered list.

A `Program` is a valid *sequential* execution order of all ranks' instructions. A worker runs only the instructions in
which one of its own ranks takes part, in that order; because a send never blocks, any such projection is free of
deadlock. Algorithms build the projection directly (`only`), so that a worker's work does not grow with ranks².

Chunks are `(buffer, offset, length)` in elements. Each rank has the buffers `in` and `out` and numbered temporaries
(`t0`, `t1`, ...; a `Temp` says how long, and whether it holds partial sums, which are float32 for the half types).
A `Transfer` gives the destination a *borrowed read-only view* of the source's chunk, named by a slot; nothing is
copied until a `Copy` or `Reduce` reads it, and the source must not write the chunk before the slot's `Release`. One
that `is_written` gives a place instead: a `Reduce` of the destination writes it, and the source must neither read nor
write it before the `Release`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")
OPS = ("add", "mul", "max")


@dataclass(frozen=True, slots=True)
class Chunk:
    """`length` elements at element `offset` of a rank's `buffer`."""

    buffer: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Slot:
    """A borrowed view, by the name its `Transfer` gave it on the reading rank."""

    name: str


Source = Chunk | Slot


@dataclass(frozen=True, slots=True)
class Transfer:
    """`dst_rank` borrows `src_rank`'s chunk as `slot`.

    Neighbours in the program that have one `group` are read by one reduction: in pieces (`cut.py`) they go in turns.
    """

    src_rank: int
    dst_rank: int
    src: Chunk
    slot: str
    group: str = ""
    is_written: bool = False  # by `dst_rank`


@dataclass(frozen=True, slots=True)
class Copy:
    rank: int
    dst: Chunk
    src: Source


@dataclass(frozen=True, slots=True)
class Reduce:
    """`dst = tree(op, srcs)` elementwise: a balanced tree over `srcs` in order, rounded once into `dst`'s type; the
    same is written to `copies`, borrowed places."""

    rank: int
    dst: Chunk
    srcs: tuple[Source, ...]
    op: str = "add"
    copies: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """The borrowed view `slot` is not read any more."""

    rank: int
    slot: str


Instr = Transfer | Copy | Reduce | Release


@dataclass(frozen=True, slots=True)
class Temp:
    """A temporary of `rank`: `length` elements; `partial`: it holds partial sums (float32 for the half types)."""

    rank: int
    name: str
    length: int
    partial: bool = True


@dataclass(frozen=True)
class Collective:
    """The task, before any algorithm is chosen.

    | kind | `in` of rank r | `out` of rank r |
    |---|---|---|
    | all_reduce | `count` | `count`: the reduction over ranks |
    | reduce_scatter | `count` | `sizes[r]`: r's slice of the reduction (`sum(sizes) == count`) |
    | all_gather | `sizes[r]` | `count == sum(sizes)`: all inputs, in rank order |
    | all_to_all | `rows[r] * count`: block j has `rows[r] * sizes[j]` | `sizes[r] * sum(rows)`: block i is rank i's |
    | broadcast | `count` on `root` only | `count` |
    | send | `count` on `root` only | `count` on `target` only |

    `sizes` defaults to `split(count, ranks)`, `rows` to ones. `group`: how many neighbouring ranks are in one worker
    (or on one host), a divisor of `ranks`; it changes only which algorithms make sense. Raises `ValueError` on sizes
    that do not fit.
    """

    kind: str
    ranks: int
    count: int
    op: str = "add"
    sizes: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    root: int = 0
    target: int = 0
    group: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown collective {self.kind!r}; known: {KINDS}")
        if self.op not in OPS:
            raise ValueError(f"unknown reduction {self.op!r}; known: {OPS}")
        if self.ranks < 1 or self.count < 0:
            raise ValueError(
                f"{self.kind}: ranks must be ≥ 1 and count ≥ 0, got ranks={self.ranks}, count={self.count}"
            )
        for name, value in (("sizes", self.sizes), ("rows", self.rows)):
            if value is not None and (len(value) != self.ranks or min(value) < 0):
                raise ValueError(
                    f"{self.kind}: {name} needs {self.ranks} non-negative numbers, one a rank, got {value}"
                )
        if self.sizes is not None and sum(self.sizes) != self.count:
            raise ValueError(f"{self.kind}: sizes {self.sizes} sum to {sum(self.sizes)}, but count is {self.count}")
        if self.group < 1 or self.ranks % self.group:
            raise ValueError(f"{self.kind}: group {self.group} does not divide {self.ranks} ranks")
        for name, rank in (("root", self.root), ("target", self.target)):
            if not 0 <= rank < self.ranks:
                raise ValueError(f"{self.kind}: {name} {rank} is outside 0..{self.ranks - 1}")

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """`(offset, length)` of each rank's piece of the `count` elements."""
        sizes = self.sizes if self.sizes is not None else split(self.count, self.ranks)
        return list(zip(accumulate(sizes, initial=0), sizes))

    def in_length(self, rank: int) -> int:
        if self.kind == "all_gather":
            return self.pieces[rank][1]
        if self.kind == "all_to_all":
            return self.count * (self.rows[rank] if self.rows else 1)
        return self.count if self.kind not in ("broadcast", "send") or rank == self.root else 0

    def out_length(self, rank: int) -> int:
        if self.kind == "reduce_scatter":
            return self.pieces[rank][1]
        if self.kind == "all_to_all":
            return self.pieces[rank][1] * (sum(self.rows) if self.rows else self.ranks)
        return self.count if self.kind != "send" or rank == self.target else 0


@dataclass
class Program:
    """The instructions of the ranks in `only`, in global order, and their temporaries."""

    collective: Collective
    algorithm: str
    only: frozenset[int]
    instrs: list[Instr] = field(default_factory=list)
    temps: list[Temp] = field(default_factory=list)

    # The methods below append, and skip what is empty or concerns no rank of `only`.
    def transfer(
        self, src_rank: int, dst_rank: int, src: Chunk, slot: str, group: str = "", is_written: bool = False
    ) -> Slot:
        if src.length and (src_rank in self.only or dst_rank in self.only):
            self.instrs.append(Transfer(src_rank, dst_rank, src, slot, group, is_written))
        return Slot(slot)

    def copy(self, rank: int, dst: Chunk, src: Source) -> None:
        if dst.length and rank in self.only:
            self.instrs.append(Copy(rank, dst, src))

    def reduce(self, rank: int, dst: Chunk, srcs: list[Source], copies: Sequence[Slot] = ()) -> None:
        if dst.length and rank in self.only:
            self.instrs.append(Reduce(rank, dst, tuple(srcs), self.collective.op, tuple(copies)))

    def release(self, rank: int, slot: Slot, length: int) -> None:
        if length and rank in self.only:
            self.instrs.append(Release(rank, slot.name))

    def temp(self, rank: int, name: str, length: int, partial: bool = True) -> None:
        if length and rank in self.only:
            self.temps.append(Temp(rank, name, length, partial))

    def shifted(self, step: int) -> Iterator[tuple[int, int]]:
        """`(src, dst)` with `dst = src + step` round the ring, where one of them is in `only`, in order of src."""
        n = self.collective.ranks
        senders = set(self.only) | {(r - step) % n for r in self.only}
        return ((s, (s + step) % n) for s in sorted(senders))

    def swapped(self, bit: int) -> Iterator[tuple[int, int]]:
        """`(src, dst)` with `dst = src ^ bit`, where one of them is in `only`, in order of src."""
        return ((s, s ^ bit) for s in sorted(set(self.only) | {r ^ bit for r in self.only}))

    def show(self) -> str:
        """One line an instruction: the readable form in docs and golden tests."""
        return "\n".join(show_instr(i) for i in self.instrs)


def split(count: int, ranks: int) -> tuple[int, ...]:
    """`count` elements over `ranks`, as evenly as can be; the first ranks get the remainder."""
    base, extra = divmod(count, ranks)
    return (base + 1,) * extra + (base,) * (ranks - extra)


def show_source(s: Source) -> str:
    return s.name if isinstance(s, Slot) else f"{s.buffer}[{s.offset}:{s.end}]"


def show_instr(i: Instr) -> str:
    if isinstance(i, Transfer):
        return f"{i.src_rank} -> {i.dst_rank}: {show_source(i.src)} as {i.slot}{', to be written' * i.is_written}"
    if isinstance(i, Copy):
        return f"{i.rank}: {show_source(i.dst)} = {show_source(i.src)}"
    if isinstance(i, Reduce):
        targets = " = ".join([show_source(i.dst), *(s.name for s in i.copies)])
        return f"{i.rank}: {targets} = {i.op}({', '.join(map(show_source, i.srcs))})"
    return f"{i.rank}: release {i.slot}"
