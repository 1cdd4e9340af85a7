"""The args of ops that have several parts.

Each construction of a node hashes its arg to find out whether the node is there already. So what many nodes have is a
NamedTuple, which hashes as fast as a tuple. It is also equal to the tuple of its parts: a node is always made with the
type that `Ops` names, for the node of the same parts without it would be found in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from manygrad.tensor.dtype import DType
from manygrad.tensor.uop.ops import Ops


@dataclass(frozen=True)
class BufferSpec:
    """What a BUFFER is: a unique id (or PARAM slot), shape, type, and where it lives.

    `device` is a name, or a tuple of names for a sharded buffer; then `axis` is the dim that is cut (None: replicated)
    and `bounds` the n+1 cut positions along it.
    """

    uid: int
    shape: tuple[Any, ...]
    dtype: DType
    device: str | tuple[str, ...]
    axis: int | None = None
    bounds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Members:
    """Who takes part in a collective; the last part of its arg."""

    devices: tuple[str, ...]
    mine: tuple[int, ...]  # the positions of this worker's devices
    counts: tuple[int, ...]  # how many elements each of them gets
    number: int  # the collective's place in the program: all workers run theirs in this order
    line: str  # the user's


class CheckArg(NamedTuple):
    """What an index has to be: low <= it < size, or the one that is spared."""

    low: int
    size: int
    spared: int | None


class ShardArg(NamedTuple):
    """Where the parts of a value go."""

    devices: tuple[str, ...]
    axis: int | None  # the dim that is cut; None: each device has the whole value


class ReduceArg(NamedTuple):
    """A reduction of the tensor graph; the dims that it goes over are kept as 1."""

    op: Ops  # ADD, MUL or MAX
    axes: tuple[int, ...]
    blocks: int | None = None  # of a sum in blocks, whose order stays: how many its value has (`multi/lower_shards.py`)


class RangeArg(NamedTuple):
    """A loop of a kernel."""

    id: int  # another for each RANGE of a kernel
    kind: str  # "loop": it stores in each iteration; "reduce": a REDUCE is over it


class VarArg(NamedTuple):
    """A symbolic integer: min <= it <= max."""

    name: str  # one variable of a graph has it
    min: int
    max: int


class ViewArg(NamedTuple):
    """A part of a buffer."""

    offset: int  # where it begins, in elements
    shape: tuple[Any, ...]  # of as many elements, one after the other
