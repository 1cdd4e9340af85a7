"""State after a failed realize: the process as it was, less what caused the failure.

Before anything ran, an assignment that cannot be carried out is dropped, and its tensor keeps the value it had
(`drop`). Once kernels ran, memory has changed: what they wrote is what tensors hold from then on (`settle`). A value
that would have to be read from what is overwritten by then, or from a dropped assignment, is `lost`: whoever uses it is
told so, and gets no wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from manygrad.runtime.buffer import Buffer
from manygrad.runtime.engine.linear import run_linear
from manygrad.runtime.executors.items import ExecItem, Vars
from manygrad.runtime.storage import STORAGE
from manygrad.tensor.source import line_of
from manygrad.tensor.storage import PENDING, unrealized
from manygrad.tensor.stored import HISTORY, LOST, ORIGIN, WRITTEN
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp, standing_on
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.views import memory, rebased

NewBuffer = Callable[[UOp, str | tuple[str, ...]], UOp]


class RealizeProgress:
    """How far a realize has come: the memory written, and the memory that was still to be written when it failed."""

    def __init__(self) -> None:
        self.begun = False  # something ran
        self.complete = False  # everything ran
        self.final = False  # nothing is left that could be tried again without what failed
        self.last = False  # what ran last were the last calls of all
        self.written: set[int] = set()
        self.unwritten: set[int] = set()

    def run(self, items: list[ExecItem], vars: Vars, last: bool = False) -> None:
        """`last`: nothing has to be run after these."""
        self.unwritten = _written(items)
        self.last = last
        for item in items:
            item.allocate()  # before anything runs: no memory is no half of a step
        left: Iterator[ExecItem] = iter(items)
        self.begun = True
        try:
            run_linear(items, vars, left)
        except BaseException:
            self.final = True
            rest = list(left)
            done = items[: len(items) - len(rest)]
            self.written |= _written(done)
            self.unwritten = _written([*done[-1:], *rest])
            raise
        self.written |= _written(items)
        self.unwritten = set()

    def has_written(self, buffer: UOp) -> bool:
        return not self.written.isdisjoint(_memory(buffer))

    def is_complete(self, buffer: UOp) -> bool:
        """Whether all that was to be written there has been."""
        memory = _memory(buffer)
        return self.last and not self.written.isdisjoint(memory) and self.unwritten.isdisjoint(memory)


def _written(items: Iterable[ExecItem]) -> set[int]:
    return {id(b.base or b) for item in items for b in item.written}


def _memory(buffer: UOp) -> set[int]:
    found = STORAGE.get(buffer)
    parts = found if isinstance(found, list) else [found]
    return {id(b.base or b) for b in parts if isinstance(b, Buffer)}


def assigned(u: UOp) -> UOp:
    """The memory that assignments write."""
    while u.op is Ops.AFTER:
        u = u.src[0]
    return u


def lost(t: Tensor, why: str, new_buffer: NewBuffer) -> None:
    """From now on whoever reads `t` gets an error."""
    u = new_buffer(t.uop, t.uop.device or t._device)
    LOST[u] = why
    t.uop, t._storage = u, None
    PENDING.discard(t)


def drop(failed: dict[UOp, str], new_buffer: NewBuffer) -> None:
    """Takes back the assignments `failed` (with the reasons), and those that read or follow them."""
    lazy = unrealized()
    touched = standing_on([t.uop for t in lazy], failed.__contains__)
    if not touched:
        return
    why = next(iter(failed.values()))
    for t in lazy:
        if t.uop in touched and not _take_back(t, touched):
            lost(
                t,
                f"a value of shape {t.shape} was computed from a tensor after an assignment that failed ({why}), and "
                "is lost; compute it again",
                new_buffer,
            )


def _take_back(t: Tensor, bad: set[UOp]) -> bool:
    """A view of memory shows the memory as it is without the assignments in `bad`; False for what is not memory."""
    base = memory(t.uop)
    if base.op is not Ops.AFTER:
        return False
    before = base
    while before.op is Ops.AFTER and before in bad:
        # (memory that nothing was stored in: the value it was to hold)
        before = ORIGIN.get(before.src[0]) or before.src[0]
    if before in bad:
        return False
    t.uop = rebased(t.uop, base, before)
    if before.op is not Ops.AFTER:
        PENDING.discard(t)
    return True


def settle(
    sink: UOp, own: dict[int, UOp], overwritten: set[UOp], progress: RealizeProgress, clock: int, new_buffer: NewBuffer
) -> bool:
    """After a failure on the way: what has been written is what tensors hold; what has not been begun goes on waiting.
    Whether an assignment may have been lost in the middle.

    A kernel that failed or was interrupted may have written a part; such a tensor holds what lies in its memory.
    """
    targets = {assigned(u) for u in sink.toposort() if u.op is Ops.AFTER}
    written = {b for b in targets if progress.has_written(b)}
    complete = {b for b in written if progress.is_complete(b)}

    def is_done(u: UOp) -> bool:
        return u.op is Ops.AFTER and assigned(u) in written

    def is_gone(u: UOp) -> bool:
        return u in written or (u in overwritten and is_done(u)) or (is_done(u) and assigned(u) not in complete)

    for b in written:
        HISTORY.pop(b)
        ORIGIN.pop(b)
        WRITTEN[b] = clock
    lazy = unrealized()
    gone = standing_on([t.uop for t in lazy], is_gone, is_done)
    carried_out = {u: assigned(u) for t in lazy for u in t.uop.toposort() if is_done(u)}
    cut = False
    for t in lazy:
        base = memory(t.uop)
        if is_done(base):
            cut = cut or assigned(base) not in complete
            t.uop = rebased(t.uop, base, assigned(base))
            PENDING.discard(t)
        elif t.uop not in gone:
            t.uop = substitute(t.uop, carried_out)
        elif id(t) in own and progress.is_complete(memory(own[id(t)])):
            t.uop, t._storage = own[id(t)], None
            HISTORY[memory(t.uop)] = (None, clock)
        elif _take_back(t, gone):
            cut = True
        else:
            lost(
                t,
                f"a value of shape {t.shape} (line {line_of(t.uop)}) was to be computed from memory that a realize had "
                "overwritten when it failed, and is lost; compute it again",
                new_buffer,
            )
    return cut
