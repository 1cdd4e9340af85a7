"""The args of ops that have several parts.

Each construction of a node hashes its arg to find out whether the node is there already. So what many nodes have is a
NamedTuple, which hashes as fast as a tuple. It is also equal to the tuple of its parts: a node is always made with the
type that `Ops` names, for the node of the same parts without it would be found in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from manygrad.tensor.dtype import DType
from manygrad.tensor.uop.ops import Ops

if TYPE_CHECKING:
    from manygrad.tensor.uop.uop import UOp


@dataclass(frozen=True)
class BufferSpec:
    """Identity of a BUFFER: a unique id (or PARAM slot), shape, type, and where it lives.

    `device` is a name, or a tuple of names for a sharded buffer; then `axis` is the dim that is cut (None: replicated)
    and `bounds` the n+1 cut positions along it.
    """

    uid: int
    shape: tuple[Any, ...]
    dtype: DType
    device: str | tuple[str, ...]
    axis: int | None = None
    bounds: tuple[int, ...] = ()

    def __hash__(self) -> int:  # (of what tells most of them apart: each new tensor asks for it several times)
        return hash((self.uid, self.shape))


class VarArg(NamedTuple):
    """A symbolic integer: min <= it <= max."""

    name: str  # one variable of a graph has it
    min: int
    max: int


class ReduceArg(NamedTuple):
    """A reduction of the tensor graph; the dims that it goes over are kept as 1."""

    op: Ops  # ADD, MUL or MAX
    axes: tuple[int, ...]
    blocks: int | None = None  # of a sum in blocks, whose order stays: how many its value has (`multi/rules/reduce.py`)


class CheckArg(NamedTuple):
    """Bounds of an index: low <= it < size, or the one that is spared."""

    low: int
    size: int
    spared: int | None


class ShardArg(NamedTuple):
    """Where the parts of a value go."""

    devices: tuple[str, ...]
    axis: int | None  # the dim that is cut; None: each device has the whole value
    bounds: tuple[int, ...] = ()  # of the parts, n+1 places; (): `even_bounds`


@lru_cache(4096)
def even_bounds(size: int, n: int) -> tuple[int, ...]:
    """n parts whose sizes differ by one at most: 10 over 4 -> 0, 3, 5, 8, 10.
    A cut into 2n parts has the positions of a cut into n."""
    return tuple(-(-i * size // n) for i in range(n + 1))


class FinishArg(NamedTuple):
    """Computation on each element of a sum over devices."""

    value: UOp  # over PARAM 0, the element
    axis: int | None = None  # the dim along which the result is wanted cut; None: each device has all of it
    bounds: tuple[int, ...] = ()  # n+1 places


@dataclass(frozen=True)
class Members:
    """Who takes part in a collective."""

    devices: tuple[str, ...]
    mine: tuple[int, ...]  # the positions of this worker's devices
    counts: tuple[int, ...]  # how many elements each of them gets
    number: int  # the collective's place in the program: all workers run theirs in this order
    line: str  # the user's
    part: int = 0  # of a collective that was cut into several, which one: they run in this order
    stored: bool = False  # what it combines is in memory when the program starts, on all devices

    @property
    def place(self) -> tuple[int, int]:
        return self.number, self.part


class AllReduceArg(NamedTuple):
    """The terms of all devices are summed up, or combined by another op; each has the result."""

    op: Ops
    size: int  # elements of each term, and of the result
    members: Members
    finish: UOp | None = None  # what the result is of each sum, which is PARAM 0; None: the sum itself


class AllGatherArg(NamedTuple):
    """The parts of all devices are joined."""

    bounds: tuple[int, ...]  # n+1 places, in elements: what of the result is whose
    members: Members


class ReduceScatterArg(NamedTuple):
    """As an all-reduce, but each device has its part of the result."""

    op: Ops
    bounds: tuple[int, ...]  # as of an all-gather
    members: Members
    finish: UOp | None = None  # as of an all-reduce


class AllToAllArg(NamedTuple):
    """From parts of rows to parts of columns."""

    rows: tuple[int, ...]  # n+1 places: which rows a device has before
    columns: tuple[int, ...]  # n+1 places, in elements of a row: which columns it has then
    members: Members


class BroadcastArg(NamedTuple):
    """Sends what one device holds to all."""

    root: int  # the device's position
    size: int  # elements
    members: Members


class PointToPointArg(NamedTuple):
    """From the first of two devices to the second."""

    size: int  # elements
    members: Members


CollectiveArg = AllReduceArg | AllGatherArg | ReduceScatterArg | AllToAllArg | BroadcastArg | PointToPointArg


def finish_of(arg: CollectiveArg) -> UOp | None:
    return arg.finish if isinstance(arg, AllReduceArg | ReduceScatterArg) else None


def terms_dtype(what: UOp) -> DType:
    """Type of the elements that a collective is given."""
    finish = finish_of(what.arg)
    return what.dtype if finish is None else next(u.dtype for u in finish.toposort() if u.op is Ops.PARAM)


class MessageArg(NamedTuple):
    """A message of a collective."""

    peer: int  # the rank of the worker to which it goes, or from which it comes
    number: int  # among those that go there, or come from there: they keep their order
    is_written: bool = False  # by who receives it, which reads nothing


class RangeArg(NamedTuple):
    """A loop of a kernel."""

    id: int  # another for each RANGE of a kernel
    kind: str  # "loop": it stores in each iteration; "reduce": a REDUCE is over it


class ViewArg(NamedTuple):
    """A part of a buffer."""

    offset: int  # where it begins, in elements
    shape: tuple[Any, ...]  # of as many elements, one after the other


# what stands in graphs on disk (`tensor/uop/serial.py`)
ARGS: tuple[type, ...] = (
    *(BufferSpec, VarArg, ReduceArg, CheckArg, ShardArg, FinishArg, Members, MessageArg, RangeArg, ViewArg),
    *get_args(CollectiveArg),
)
