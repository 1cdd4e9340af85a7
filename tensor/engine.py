"""The stages that run a graph, as `Tensor` needs them; the root `__init__` registers what has it.

`tensor/` does not import the schedule or the runtime: it talks to them through this interface. An engine holds nothing
of a worker's: it looks that up in the current Runtime (`runtime/current.py`), so there is one engine a process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from manygrad.tensor import environment as env

if TYPE_CHECKING:
    import numpy as np

    from manygrad.tensor.dtype import DType
    from manygrad.tensor.tensor import Tensor
    from manygrad.tensor.uop import UOp


class MadeCalls(NamedTuple):
    """Calls that were recorded.

    `out`: what they give; `replay`: of them (`tensor/deferred/tree.py`), where there can be one; `flowing`: places
    of what a gradient flows on from; `state_flows`: whether one flows on from memory that they write. Of values that
    live on besides: `graphs`, of each by its place; `own`: the nodes in them that stand for the inputs; `stored`:
    places of those that were stored, too, and numbers below 0 of memory that they read, which are the last ones of
    `out`; `lasts`: whether the graphs are right after each replay.
    """

    out: list[Tensor]
    replay: Any
    flowing: list[int]
    state_flows: bool
    own: list[UOp]
    graphs: dict[int, UOp]
    stored: list[int]
    lasts: bool


class Engine(Protocol):
    """Large: what the front end asks of the stages after it."""

    def realize(self, tensors: list[Tensor], pending: bool = True) -> None:
        """Compute the tensors; their `uop` becomes a BUFFER.
        With `pending` all assignments that wait are carried out, too."""

    def carry_out(self, tensors: list[Tensor]) -> None:
        """Has the assignments to these tensors that wait be carried out, but for where a function is being traced."""

    def from_numpy(self, array: np.ndarray, dtype: DType, device: str | tuple[str, ...], share: bool = False) -> UOp:
        """A BUFFER that holds a copy of `array`, one on each of several devices, or, with `share` where the one
        device's memory is the host's, that is its memory."""

    def new_buffer(self, uop: UOp, device: str | tuple[str, ...]) -> UOp:
        """A BUFFER for the value of `uop`, which takes no memory before something is stored in it."""

    def map_file(self, path: str, parts: list[tuple[DType, tuple[int, ...], int]]) -> list[UOp]:
        """BUFFERs on `DISK:path`, one for each (dtype, shape, offset in bytes). A file that is too short is made longer
        when they are used."""

    def part_of_file(self, uop: UOp, dtype: DType, shape: tuple[int, ...]) -> UOp | None:
        """The memory of `uop`, which is on DISK, as a BUFFER of another type; None where it is not one piece of it."""

    def to_numpy(self, buffer: UOp) -> np.ndarray:
        """The contents of a realized BUFFER on one device, or of one of its copies (a copy)."""

    def has_copy(self, buffer: UOp) -> bool:
        """Whether this worker has one of several copies of a realized BUFFER."""

    def share(self, buffer: UOp) -> np.ndarray | None:
        """The memory of a realized BUFFER on one device as an array that keeps it alive;
        None where the host cannot see it."""

    def canonical(self, device: str) -> str:
        """The one name of a device; ValueError if there is no such device."""

    def follows(self, device: str | tuple[str, ...] | None) -> bool:
        """Whether loops with values on a device are followed: not in files, nor with a part of the workers."""

    def is_read_by_all(self, uop: UOp) -> bool:
        """Whether a value on several devices is read by all workers that have it, or by none: not where one alone may
        compute it, and the plans of the others that read it would be other ones if it stored it."""

    def communicated(self) -> int:
        """How many collectives of all workers this one has entered; 0 where it is alone."""

    def note_loop(self) -> None:
        """A step or a read of a plain loop has communicated: from now on ranks meet before they do so (`agree`)."""

    def agree(self, place: int, how: int) -> int:
        """How all ranks make what ends a trace, and communicates: 0 as a replay, 1 as a recording, 2 call by call.
        `place`: the same on ranks that came there by the same calls; `how`: as this one can."""

    def workers(self) -> tuple[int, int]:
        """This worker's rank, and how many there are."""

    def world(self) -> object:
        """Who this worker is (`multi/world.py`)."""

    def on_host(self, device: str) -> bool:
        """Whether the host sees the memory of a device of this worker."""

    def sharding_axis(self, uop: UOp) -> int | None:
        """The dim along which a value on several devices is cut."""

    def store_spec(self, uop: UOp) -> tuple[int | None, tuple[int, ...]]:
        """(dim that is cut, cut positions) of the buffer that would hold a value on several devices."""

    def differs_by_rank(self, buffer: UOp) -> None:
        """A realized BUFFER of which each worker holds its own rows only: it is not compared over ranks."""

    def refuse_in_capture(self, what: str) -> None:
        """An error where a step is being captured: `what` would be done by Python once, and in no replay."""

    def capture_calls(
        self,
        fn: Callable[..., list[Tensor]],
        inputs: list[Tensor],
        state: list[Tensor],
        writes: bool,
        kept: list[Tensor],
    ) -> MadeCalls:
        """Calls `fn`, whose calls read `inputs` and `state`, and may write. `kept`: what lives on besides what it
        gives, which `fn` appends."""

    def take_stored(self, values: list[tuple[Tensor, UOp]], others: list[Tensor]) -> None:
        """Each of these values is in memory already, at this BUFFER or view of one, as if it had just been computed:
        it lies there now, `others` that are made of it read it there, and backward() goes on from it."""

    def begin_update(self) -> None:
        """An optimiser is about to make a step; the program may end here (LAST_STEP)."""

    def note_written(self, buffers: Iterable[UOp]) -> None:
        """A replay is about to write to BUFFERs that other values may have been computed from."""

    def count_update(self) -> None:
        """An optimiser has made a step."""

    def is_realized(self, buffer: UOp) -> bool:
        """Whether a BUFFER holds data."""

    def word_of(self, what: str, low: int, size: int, line: str, device: str | tuple[str, ...]) -> UOp:
        """The BUFFER in which a place of the program keeps the worst index it met; reads look at it."""

    def lose(self, t: Tensor, why: str) -> None:
        """From now on whoever reads `t` gets an error."""

    def spoil(self, buffer: UOp, why: str) -> None:
        """From now on whoever reads this memory, or what is made of it, gets an error."""


_engine: Engine | None = None


def register(engine: Engine) -> None:
    """From now on `engine()` gives this one."""
    global _engine
    _engine = engine


def engine() -> Engine:
    if _engine is None:
        raise RuntimeError("no engine: import the package `manygrad`, not only its folder `tensor`")
    return _engine


def default_device() -> str:
    """Where tensors live that are told no device (DEVICE)."""
    return engine().canonical(str(env.DEVICE.value))
