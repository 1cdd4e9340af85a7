"""A view and its base are one storage: which live tensors share memory,
and how one is written so that all of them show it.

A stored tensor lies in a BUFFER (or AFTER, where writes to it wait), and what has the same memory below its views
shares it. A value that is not computed yet is a node, and equal values are one node though they are not one storage:
there views also share an identity (`Tensor._storage`), which a tensor gets when the first view of it is made. `sharing`
asks for both.

A write gives an unrealized value memory of its own, still lazily, and moves everything that shares it there:

    w = zeros(2, 2); r = w[0]; r[1] = 3    ==>  m = AFTER(b, STORE(b, zeros)); n = AFTER(m, STORE(m[0, 1], 3));
                                                w: n; r: n[0]

What was computed before reads `m`, the value of its time. A value with a gradient is not written but made anew (n = m
with 3 placed in it), so that backward() finds what it was.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock, get_ident, local
from typing import TYPE_CHECKING

from manygrad.tensor import grad_mode
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.lock import locked
from manygrad.tensor.source import mark
from manygrad.tensor.stored import ORIGIN, OwnNumber, has_ended, has_live_history, note_former
from manygrad.tensor.uop import GroupOp, Ops, UOp
from manygrad.tensor.uop.shape import attached, numel, unviewed
from manygrad.tensor.uop.views import HIDDEN, OTHER_WIDTH, STEPS, below, memory, rebased

if TYPE_CHECKING:
    from manygrad.tensor.tensor import Tensor

MOST_WAITING = 64  # writes to the same memory: a schedule compares each of them with all others
RECENT = 32  # keys that who asks for newer tensors looks at first
MEMORY = frozenset({Ops.BUFFER, Ops.AFTER, Ops.PARAM})


def _nobody() -> None:
    """In place of a reference, a mark."""


class TensorSet:
    """A weak set by identity (`==` on tensors is elementwise, so `WeakSet` will not do), in order of insertion:
    of the program."""

    def __init__(self) -> None:
        self._refs: dict[int, Callable[[], Tensor | None]] = {}
        self._recent: deque[int] = deque(maxlen=RECENT)  # keys that were inserted last, marks among them

    @property
    def keys(self) -> dict[int, Callable[[], Tensor | None]]:
        """One for each, which is never another dict; the last is the mark of who asked for the newest last."""
        return self._refs

    def add(self, t: Tensor) -> None:
        key, refs = id(t), self._refs
        refs[key] = weakref.ref(t, lambda _: refs.pop(key, None))
        self._recent.append(key)

    def renew(self, t: Tensor) -> None:
        """As if inserted now, if it is there."""
        if (ref := self._refs.pop(id(t), None)) is not None:
            self._refs[id(t)] = ref
            self._recent.append(id(t))

    def discard(self, t: Tensor) -> None:
        self._refs.pop(id(t), None)

    def mark(self, mark: object) -> None:
        """`newer` gives what is inserted from now on to whoever holds this object."""
        own = id(mark)
        self._refs.pop(own, None)
        self._refs[own] = _nobody
        self._recent.append(own)

    def newer(self, mark: object) -> list[Tensor]:
        """Tensors inserted since the last call with this object, which is held by whoever asks; all at the first."""
        own, keys = id(mark), list(self._recent)
        if own not in self._refs or own not in keys:
            keys = list(self._refs)  # (at once: a dict that changes under a reversed iterator may end the process)
        elif keys[-1] == own:
            return []
        new = dict.fromkeys(itertools.takewhile(lambda k: k != own, reversed(keys)))
        refs = [self._refs.get(k, _nobody) for k in new]
        self.mark(mark)
        return [t for r in refs if (t := r()) is not None]

    def forget(self, mark: object) -> None:
        self._refs.pop(id(mark), None)

    def __iter__(self) -> Iterator[Tensor]:
        return iter([t for r in list(self._refs.values()) if (t := r()) is not None])

    def __len__(self) -> int:
        return len(self._refs)


class PendingSet(TensorSet):
    """A realize carries out the assignments of its own thread, and of others' what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: dict[int, int] = {}
        self._acting = local()

    def add(self, t: Tensor) -> None:
        self._threads[id(t)] = getattr(self._acting, "for_thread", None) or get_ident()
        super().add(t)

    @contextmanager
    def of(self, thread: int) -> Iterator[None]:
        """What this thread assigns inside is that thread's assignment: it had put it off."""
        before = getattr(self._acting, "for_thread", None)
        self._acting.for_thread = thread
        try:
            yield
        finally:
            self._acting.for_thread = before

    def mine(self) -> list[Tensor]:
        if not self._refs:
            return []
        me, threads = get_ident(), self._threads
        return [t for t in self if threads.get(id(t)) == me]


LIVE = TensorSet()
TRAINED = TensorSet()  # leaves whose gradient is asked for
HOOKED = TensorSet()  # those that had a hook on their gradients once
PENDING = PendingSet()  # assigned, not yet realized


_naming = Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_naming._at_fork_reinit)  # type: ignore[attr-defined]


class Storage:
    """The identity of what views share before it is in memory. One made for a reshape `at` of a view is `of` that
    view's storage; whether it is its own, for that reshape moves elements, is found out when someone asks."""

    __slots__ = ("__weakref__", "at", "of")

    def __init__(self, of: Storage | None = None, at: UOp | None = None):
        self.of, self.at = of, at

    def own(self) -> Storage:
        """The one that stands for all that share it."""
        if self.at is not None:
            self.of = None if memory(self.at) is self.at else self.of
            self.at = None
        return self if self.of is None else self.of.own()


def identity(t: Tensor) -> Storage:
    """Storage that `t` has in common with its views; two threads that make one each have the same.
    (Not under `LOCK`: building a graph waits for none.)"""
    if t._storage is None:
        made = Storage()  # (under the lock nothing is made: a garbage collection might ask for it)
        with _naming:
            t._storage = t._storage or made
    return t._storage


def of_view(u: UOp, source: Tensor) -> Storage | None:
    """The storage of `u`, a value made from `source` by movement ops, detach or bitcast."""
    x = u.src[0]
    while x is not source.uop:
        if x.op not in STEPS:
            return None
        x = x.src[0]
    base = identity(source)
    return Storage(base, u) if u.op is Ops.RESHAPE and x.op in STEPS else base


def is_stored(u: UOp) -> bool:
    """Whether there is memory to write to: a buffer, perhaps with assignments that are still to be carried out."""
    return memory(u).op in MEMORY


def unrealized() -> list[Tensor]:
    """The live tensors that are not memory, nor an unchanged part of it: every realize looks for them."""
    buffer = Ops.BUFFER
    return [t for t in LIVE if t.uop.op is not buffer]


def sharing(t: Tensor) -> list[Tensor]:
    """The live tensors whose memory is, or will be, that of `t`; `t` among them."""
    base = memory(t.uop)
    if base.op in MEMORY:
        return [s for s in LIVE if memory(s.uop) is base]
    if t._storage is None:
        return [t]
    own = t._storage.own()
    return [s for s in LIVE if s._storage is not None and memory(s.uop) is base and s._storage.own() is own]


def is_one_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two values that are not computed yet are, or are views of, one storage: one that was written to, say."""
    if a._storage is None or b._storage is None or (base := memory(a.uop)) is not memory(b.uop):
        return False
    return before_writes(base) in ORIGIN if base.op in MEMORY else a._storage.own() is b._storage.own()


class Moves:
    """How often a write has moved tensors, something was computed, and what was detached has a gradient since: what a
    call has done besides building."""

    count = 0
    computed = 0
    joined = 0


MOVES = Moves()
before_change: list[Callable[[Tensor], None]] = []  # told which tensor, and what shares its memory, is about to change


def about_to_change(t: Tensor) -> None:
    """Has what was put off, and reads `t`, be done first."""
    for tell in before_change:
        tell(t)


def own_view(u: UOp) -> UOp:
    """A detached node of its own, of a leaf say, whose gradient is told from that of others in that memory."""
    return UOp(Ops.DETACH, u.dtype, (u,), OwnNumber.new())


def rebased_views(tensors: Sequence[Tensor], base: UOp, new: UOp) -> list[tuple[Tensor, UOp]]:
    """Each of these views of `base`, as the same view of `new`; a leaf as a node of its own."""
    views = [rebased(s.uop, base, new) for s in tensors]
    count = Counter(map(id, views))  # (of nodes, which live as long as `views`)
    for i, (s, u) in enumerate(zip(tensors, views)):
        is_numbered = s.uop.op is Ops.CONTIGUOUS and u is not base and u is not new
        if s._requires_grad and (is_numbered or count[id(u)] > 1):
            views[i] = own_view(u) if is_stored(u) else UOp(Ops.CONTIGUOUS, u.dtype, (u,), OwnNumber.new())
    return list(zip(tensors, views))


def detached(u: UOp) -> UOp | None:
    """The node behind which a view is detached; None where a gradient may flow through. Who has the same one was not
    detached from the other."""
    while u.op in STEPS and u.op is not Ops.DETACH:
        u = u.src[0]
    return u if u.op is Ops.DETACH else None


def move(tensors: list[Tensor], base: UOp, new: UOp, pending: bool) -> None:
    """The memory of `tensors`, views of `base`, is `new` from now on."""
    MOVES.count += 1
    for s, u in rebased_views(tensors, base, new):
        if s._requires_grad:
            note_former(s)
        s.uop, s._leaf = u, u.arg if s._requires_grad and u.op is Ops.CONTIGUOUS else None
        LIVE.renew(s)
        TRAINED.renew(s)
        if pending:
            PENDING.add(s)


@locked
def store(t: Tensor) -> None:
    """Gives `t`, and what shares its storage, memory that will hold its value once something is realized."""
    about_to_change(t)
    together = sharing(t)
    base = memory(t.uop) if len(together) > 1 else t.uop
    buffer = engine().new_buffer(base, base.device or t._device)
    ORIGIN[buffer] = base  # until it is carried out: what it is again if it cannot be
    move(
        together,
        base,
        UOp(Ops.AFTER, base.dtype, (buffer, mark(UOp(Ops.STORE, dtypes.void, (buffer, base))))),
        pending=True,
    )


def start(u: UOp) -> UOp:
    """The first of the assignments `u` that wait."""
    while u.src[0].op is Ops.AFTER:
        u = u.src[0]
    return u


def waits(t: Tensor) -> bool:
    """Whether it lies in memory that assignments wait for."""
    return memory(t.uop).op is Ops.AFTER


def before_writes(u: UOp) -> UOp:
    """Memory as it was before the assignments that wait."""
    while u.op is Ops.AFTER:
        u = u.src[0]
    return u


def becomes_new(t: Tensor, value: Tensor) -> bool:
    """Whether a write of `value` makes a new value, to keep what backward() needs:
    of what is computed from a leaf, or will be."""
    if not grad_mode.is_grad_enabled() or not t.dtype.is_float:
        return False
    base = memory(t.uop)
    if base.op in MEMORY:
        return has_live_history(before_writes(base))
    return value.requires_grad or t._new(base).requires_grad


_assigned: ContextVar[TensorSet | None] = ContextVar("tensors that were assigned", default=None)


@contextmanager
def assignments() -> Iterator[TensorSet]:
    """The tensors that this thread assigns to, as long as they live. Their nodes do not tell: equal constants are one,
    and what a tensor is assigned may be what it was."""
    found = TensorSet()
    token = _assigned.set(found)
    try:
        yield found
    finally:
        _assigned.reset(token)


def note_assignment(t: Tensor) -> None:
    if (found := _assigned.get()) is not None:
        found.add(t)


@locked
def write(t: Tensor, value: Tensor, anew: bool, joins: bool | None = False) -> None:
    """Writes `value`, of the shape and type of `t`, where `t` lies, or makes the memory's value `anew`;
    everything that shares it shows it. `joins`: as `as_written` has it (`tensor/ops/differentiation.py`)."""
    about_to_change(t)
    if not anew and not is_stored(t.uop):
        store(t)
    together, base = sharing(t), memory(t.uop)
    before = UOp(Ops.DETACH, base.dtype, (base,)) if joins else base
    MOVES.joined += joins is not False
    family = detached(t.uop)
    for s in together if joins is not False else ():
        if detached(s.uop) is family and (now := attached(s.uop)) is not s.uop and not s._requires_grad:
            s.uop = now if joins else UOp(Ops.DETACH, now.dtype, (now,), HIDDEN)
    moves, value = _at_base(t.uop, base, value)
    target = _moved(moves, base)
    axis = engine().sharding_axis
    if moves and (anew or (isinstance(base.device, tuple) and axis(base) is not None and axis(target) is None)):
        # (a part of the dim that is cut: by position in the whole)
        with grad_mode.set_grad_enabled(anew or grad_mode.is_grad_enabled()):
            value, target = place(value._new(before), moves, value), base
    if anew:
        u = value.uop  # (where it is memory, that stays its own)
        move(together, base, UOp(Ops.CONTIGUOUS, u.dtype, (u,)) if is_stored(u) else u, pending=False)
        if base.op in MEMORY and len(together) > 1:  # (that said so far that they are one storage)
            one = Storage()
            for s in together:
                s._storage = one
        return
    _keep_copies(base)
    if has_ended(before_writes(base)) and (not grad_mode.is_grad_enabled() or attached(t.uop) is not t.uop):
        value = value.detach()  # (which says of a gradient no more than it did: `runtime/engine/computed.py`)
    move(
        together,
        base,
        UOp(Ops.AFTER, base.dtype, (base, mark(UOp(Ops.STORE, dtypes.void, (target, value.uop))))),
        pending=True,
    )
    if waiting(base) >= MOST_WAITING:
        engine().carry_out([t])


def waiting(u: UOp) -> int:
    """How many writes to a memory wait."""
    count = 0
    while u.op is Ops.AFTER:
        count, u = count + 1, u.src[0]
    return count


def place(whole: Tensor, moves: list[UOp], value: Tensor) -> Tensor:
    """`whole` with `value` in the elements that `moves` (views, outermost first) leave of it."""
    at = whole._new(_moved(moves, whole.arange(numel(whole.shape)).reshape(whole.shape).uop))
    return whole.flatten()._scatter_at(value.flatten(), [at.flatten()], "place").reshape(whole.shape)


def _moved(moves: list[UOp], base: UOp) -> UOp:
    for m in reversed(moves):
        base = m.replace(dtype=base.dtype, src=(base,))
    return base


def _at_base(u: UOp, base: UOp, value: Tensor) -> tuple[list[UOp], Tensor]:
    """(movement ops from `u` down to `base`, what to write there so that the view `u` shows `value`)."""
    moves: list[UOp] = []
    while u is not base:
        source = below(u)
        assert source is not None, "not a view of its memory"
        if u.op in GroupOp.VIEW:
            moves.append(u)
        elif u.op is Ops.BITCAST:
            value = value.bitcast(source.dtype)
        elif (
            u.op is Ops.CUSTOM and u.arg is OTHER_WIDTH
        ):  # elements of another width: those that are not written are part of those that are
            value = (place(value._new(u), moves, value) if moves else value).bitcast(source.dtype)
            moves = []
        u = source
    return moves, value


def _keep_copies(base: UOp) -> None:
    """What reads `base` without being a view of it keeps the value of this time."""
    for s in LIVE:
        if unviewed(memory(s.uop)) is base:
            keep_copy(s)


def keep_copy(t: Tensor) -> None:
    """A tensor that reads memory through movement ops alone, but is no view of it, is computed when it is realized: it
    keeps the value of this time."""
    t.uop = kept(t.uop)


def kept(u: UOp) -> UOp:
    """The value `u` as one to be stored, where it is a copy that nothing has to be computed for."""
    own = memory(u)
    is_copy = own.op not in MEMORY and unviewed(own).op in MEMORY
    return rebased(u, own, UOp(Ops.CONTIGUOUS, own.dtype, (own,))) if is_copy else u


__all__ = [
    "HOOKED",
    "LIVE",
    "PENDING",
    "TRAINED",
    "PendingSet",
    "Storage",
    "TensorSet",
    "becomes_new",
    "identity",
    "is_one_storage",
    "is_stored",
    "keep_copy",
    "kept",
    "memory",
    "move",
    "place",
    "sharing",
    "start",
    "store",
    "unrealized",
    "waits",
    "write",
]
