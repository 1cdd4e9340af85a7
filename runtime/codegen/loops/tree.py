"""The nodes of a loop tree. All are immutable; a list of them runs one after the other.

    for i0 in begin..finish by 6, parallel:               For
      r0 = 6 from i0:                                     Tile
        for i1 in 0..512 by 64:
          r1 = 64 from i1 in vectors of 16:
            reduce ADD(argument 1 argument 2) over k2:    Reduce
              for i2 in 0..512:
                k2 = 1 from i2:
                  accumulate                              Accumulate
            store argument 0                              Store

A Tile binds a range to some of its iterations, which stand in registers: what is below is written out for each of
them, in vectors along the range of its lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from manygrad.runtime.codegen.analysis.describe import Signature
from manygrad.runtime.codegen.kernel.online import Pair
from manygrad.runtime.codegen.loops.index import Index
from manygrad.runtime.codegen.loops.lanes import Lanes, Tiling
from manygrad.runtime.codegen.loops.local import FragmentStage, GroupStage, Local, Stage
from manygrad.tensor.uop.uop import UOp


class Node:
    """One of those below."""


Nodes = tuple[Node, ...]


def every(nodes: Nodes) -> Iterator[Node]:
    """The nodes and all that are in them."""
    for node in nodes:
        yield node
        for part in ("body", "otherwise", "parts"):
            yield from every(getattr(node, part, ()))


class Kind(Enum):
    SERIAL = "serial"
    PARALLEL = "parallel"  # cut over the threads: from this call's first index to its last
    GRID = "grid"  # cut over the groups of a device
    GROUP = "group"  # one iteration for each work item of a group, side by side
    SUBGROUP = "subgroup"  # dealt out to the work items of a subgroup: side by side, every so many iterations each


@dataclass(frozen=True)
class For(Node):
    """From `begin` up to `end` in steps."""

    counter: Index
    begin: Index
    end: Index
    step: int
    body: Nodes
    kind: Kind = Kind.SERIAL
    dim: int = 0  # of a loop over work items: which dimension of the group


@dataclass(frozen=True)
class Scope(Node):
    """A scope: what is computed in it, and depends on an Index that is `here`, stays in it."""

    body: Nodes


@dataclass(frozen=True)
class If(Node):
    condition: Index
    body: Nodes
    otherwise: Nodes = ()


class Ragged(Enum):
    """How a tile's last vector along its range may be partial."""

    NO = 0
    FIXED = 1  # it ends with the tile
    SIZE = 2  # by a size that is known when the kernel runs


@dataclass(frozen=True)
class TileLoop(Node):
    """`extent` iterations of `range` from `origin` on."""

    range: UOp
    origin: Index
    extent: int
    body: Nodes
    ragged: Ragged = Ragged.NO
    size: Index | None = None  # of the range, where the last vector is ragged by it
    reach: int = 0  # iterations beyond the extent that there are
    vector: Index | None = None  # the counter of the loop over single vectors of the tile around


@dataclass(frozen=True)
class BlockLoop(Node):
    """Some tiles of a range, of which local memory holds what is packed, or a group's memory what is shared; `begin`:
    the first iteration; `place`: of the blocks in the group's memory the one that it is."""

    range: UOp
    begin: Index
    body: Nodes
    place: Index | None = None


@dataclass(frozen=True)
class PackLoop(Node):
    """One value of a CacheRead: the loops that fill its stage, with Pack inside."""

    stage: Stage
    lanes: Lanes
    body: Nodes


@dataclass(frozen=True)
class PackStage(Node):
    """Packs operands into local memory: what is below reads them there."""

    parts: tuple[PackLoop, ...]


@dataclass(frozen=True)
class Pack(Node):
    """One tile of a stage; `masks`: under which conditions it reads anything; `borrowed`: vectors stand along the
    stage's loop for the packing alone, and a tile need not fill them; `along`: a matrix unit's rows are read as they
    lie, along the reduction."""

    stage: Stage
    masks: tuple[UOp, ...] = ()
    borrowed: bool = False
    along: bool = False


@dataclass(frozen=True)
class Share(Node):
    """The loops in which the work items of a group copy what they share, with CopyElement, or SharePart, inside."""

    stage: GroupStage | FragmentStage
    body: Nodes


@dataclass(frozen=True)
class CopyElement(Node):
    """One element of what is shared."""

    stage: GroupStage


@dataclass(frozen=True)
class Fetch(Node):
    """What each work item will copy of the next block of a stage is read into its registers, by FetchPart inside."""

    stage: FragmentStage
    body: Nodes


@dataclass(frozen=True)
class FetchPart(Node):
    """The open tiles are read: the work item's part of that number; zeros where it is not `inside` the reduction."""

    stage: FragmentStage
    number: int
    inside: Index


@dataclass(frozen=True)
class SharePart(Node):
    """What was fetched of a part is written to where the open tiles are shared."""

    stage: FragmentStage
    number: int


@dataclass(frozen=True)
class StartCopies(Node):
    """The loops in which the work items of a group start copies of the block around, with CopyPart inside. What they
    write is there once a work item has waited for them, and the others know it after a barrier."""

    stage: GroupStage | FragmentStage
    body: Nodes


@dataclass(frozen=True)
class CopyPart(Node):
    """An instruction's copy of the open tiles; zeros where it is not `inside` the reduction. `to`: where they go in the
    block, along the reduction, then along each loop."""

    stage: GroupStage | FragmentStage
    to: tuple[Index, ...]
    inside: Index


@dataclass(frozen=True)
class CommitCopies(Node):
    """The copies that were started since the last one are a set, which is waited for as one."""


@dataclass(frozen=True)
class AwaitCopies(Node):
    """All of a work item's sets of copies are done but the last so many."""

    pending: int


@dataclass(frozen=True)
class Barrier(Node):
    """All work items of a group get here before one goes on, and see what the others wrote to shared memory."""


@dataclass(frozen=True)
class Rest(Node):
    """Sums that lie in local memory between the blocks of a reduction."""

    offset_bytes: int
    at: Index  # where those of the current tile are, in elements
    begun: Index  # whether a block has been added
    is_last: bool


@dataclass(frozen=True)
class ReduceLoop(Node):
    """REDUCEs over the same ranges, in accumulators for every position of the tiles around; `split`: the range of
    which neighbouring iterations go to lanes of their own; `masks`: under which conditions they read anything;
    `partials`: vectors of partial sums that each position has, which are folded after the body; `across`: so many work
    items have some, which are combined, too; `words`: the accumulators hold two sums of 16 bits a lane, which are added
    up after the body; `matrix`: a matrix unit has them, and they lie in local memory after the body; `warp`: the
    threads of a warp have them, each those of its own tile."""

    group: tuple[UOp, ...]
    lanes: Lanes
    split: UOp | None
    masks: tuple[UOp, ...]
    body: Nodes
    rest: Rest | None = None
    partials: int = 1
    across: int = 1
    words: bool = False
    matrix: bool = False
    warp: bool = False


@dataclass(frozen=True)
class Accumulate(Node):
    """Adds the tile to what the Reduce or Online around has of it."""


@dataclass(frozen=True)
class OnlineReduce(Node):
    """A maximum and a sum of exponentials below it in one pass; two where they are not finite."""

    pair: Pair
    lanes: Lanes
    body: Nodes
    otherwise: tuple[ReduceLoop, ReduceLoop]


@dataclass(frozen=True)
class Holds(Node):
    """Conditions at positions of the tiles around, which are known in the body."""

    facts: tuple[tuple[UOp, tuple[tuple[UOp, int], ...], bool], ...]
    body: Nodes


@dataclass(frozen=True)
class Vectors(Node):
    """The body with other lanes."""

    lanes: Lanes
    body: Nodes


@dataclass(frozen=True)
class PrefetchLoads(Node):
    """Beside each of `loads`, of an argument, what it will load in the next tile of the loop `ahead` is prefetched:
    `distance` iterations further."""

    argument: int
    loads: tuple[UOp, ...]
    ahead: UOp
    distance: int
    body: Nodes


@dataclass(frozen=True)
class PrefetchAhead(Node):
    """Beside each load of an argument, what lies so many bytes further is prefetched."""

    argument: int
    nbytes: int
    body: Nodes


class StorePart(Enum):
    """Which vectors of the tile a Store writes, where its loop begins at cache lines."""

    ALL = 0
    BEFORE = 1  # the elements up to the first line
    LINES = 2  # whole lines


@dataclass(frozen=True)
class Store(Node):
    """The STOREs of the kernel, at every position of the tiles, or at those of one `row`; `past_caches`: the arguments
    whose whole vectors go to memory past the caches; `at_lines`: vectors begin where what they store is aligned."""

    row: tuple[tuple[UOp, int], ...] = ()
    stored: StorePart = StorePart.ALL
    past_caches: tuple[int, ...] = ()
    at_lines: bool = False


@dataclass(frozen=True)
class Tree:
    """The loops of a kernel, how they cut its ranges, what lies in the local memory that they use, and how they are
    run: `counts`: (size, step) of the ranges that make up the parallel loop; `group`: work items of a group in each
    dimension."""

    sig: Signature
    tiling: Tiling
    local: Local
    nodes: Nodes
    counts: tuple[tuple[UOp, int], ...] = ()
    group: tuple[int, ...] = ()
