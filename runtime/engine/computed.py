"""What tensors see of computed values, and what these remember of how they were computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from manygrad.runtime.current import current
from manygrad.runtime.engine.linear import capture
from manygrad.runtime.engine.recovery import assigned
from manygrad.runtime.storage import buffers_of
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.source import line_of
from manygrad.tensor.storage import MEMORY, PENDING, TRAINED, unrealized
from manygrad.tensor.stored import (
    ENDED,
    FORMER,
    HELD,
    HISTORY,
    LOST,
    ORIGIN,
    SOURCES,
    WRITTEN,
    Sources,
    carries,
    has_ended,
    has_live_history,
    was_leaf,
)
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp, standing_on, toposort
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.table import Table
from manygrad.tensor.uop.views import memory, rebased
from manygrad.tensor.uop.walk import together

# stored one after the other, of which a gradient is remembered: a state that is carried on for ever holds no more
MOST_WRITES = 100
COUNT: Table[int] = Table("count")  # of those that the history of memory has
WROTE_OFTEN = f"was written to more than {MOST_WRITES} times with what has a gradient, each time stored"
WROTE_LEAF = "was computed from a parameter, and read after that had been written to (by an optimiser step, in place)"


def stored_on(device: str | tuple[str, ...] | None, becomes: dict[UOp, UOp]) -> dict[UOp, UOp]:
    """What values on a device may read. A constant is one node on all devices, but is stored on one."""
    return {u: buffer for u, buffer in becomes.items() if u.device is not None or buffer.device == device}


def see_computed(others: list[Tensor], becomes: dict[UOp, UOp]) -> None:
    """Tensors read what they are made of where it is stored now. One that is equal to what was computed, or a view of
    such a one, reads a lazy copy of it: the storage may be assigned."""
    if any(u.device is None for u in becomes):
        devices = [t.device for t in others]
        for d in dict.fromkeys(devices):
            _see_computed([t for t, own in zip(others, devices) if own == d], stored_on(d, becomes))
    else:
        _see_computed(others, becomes)


def _see_computed(others: list[Tensor], becomes: dict[UOp, UOp]) -> None:
    bases = [memory(t.uop) for t in others]
    mapped = substitute(UOp(Ops.SINK, dtypes.void, tuple(bases)), becomes)
    for t, base, u in zip(others, bases, mapped.src):
        if base in becomes and base.op is not Ops.AFTER:
            u = UOp(Ops.CONTIGUOUS, base.dtype, (becomes[base],))
        if u is not base:
            t.uop = rebased(t.uop, base, u, leaf=base.op is not Ops.AFTER)
            if t._storage is not None:
                t._storage.own()  # (lets go of the graph as it was)


def replace_lazy(becomes: dict[UOp, UOp], own: dict[int, UOp]) -> None:
    """Live tensors see what has been computed as storage."""
    lazy = unrealized()
    if any(r.is_paused for r in capture):  # what the step makes computes it itself, in each replay
        lazy = [t for t in lazy if any(r.holds(t) for r in capture)]
    if not lazy:
        return
    held = [(r, t) for r in capture for t in lazy if r.holds(t)]
    others = [t for t in lazy if id(t) not in own]
    for t in lazy:
        if id(t) in own:
            t.uop, t._storage = own[id(t)], None
    see_computed(others, becomes)
    for recording, t in held:
        recording.outside[id(t)] = (t, t.uop)


# *** gradients ***


def remember(computed: dict[UOp, UOp], becomes: dict[UOp, UOp], overwritten: set[UOp], clock: int) -> None:
    """A computed value that depends on something trained keeps its graph (over what is stored now), so that
    backward() works after item() or numpy(). One that was made from values overwritten by now remembers just that.
    """
    trained, flowing = _trained(computed), _flowing(becomes)
    trained_memory = {assigned(t.uop) for t in TRAINED if t.uop.op in MEMORY} if flowing else set()
    written: dict[UOp, UOp] = {}  # memory that a gradient flows on from -> the last assignment to it
    before: dict[UOp, tuple[UOp | None, int]] = {}  # the history of what lay there, where a gradient flowed from it
    for u, buffer in becomes.items():
        if u.op is Ops.AFTER:
            if has_live_history(buffer):
                before[buffer] = HISTORY[buffer]
            elif has_ended(buffer):
                ENDED.setdefault(buffer, WROTE_LEAF)
            HISTORY.pop(buffer)
            SOURCES.pop(buffer)
            ORIGIN.pop(buffer)
            WRITTEN[buffer] = clock
            if buffer not in trained_memory:  # (what is assigned to a leaf is its value)
                _note_writes(u, buffer, flowing, written, before)
        elif u in FORMER:
            FORMER[buffer] = FORMER[u]
    for buffer, u in written.items():
        _remember_writes(u, buffer, becomes, overwritten, clock, before.get(buffer))
    leaves = {t.uop for t in TRAINED}
    floats = [u for u in computed if u not in leaves and u.dtype.is_float]
    values = [u for u in floats if u in trained or u in flowing]
    _note_sources([u for u in floats if u not in trained], becomes)
    if not values:
        return
    for device in dict.fromkeys(becomes[u].device for u in values):
        mine = [u for u in values if becomes[u].device == device]
        sources = UOp(Ops.SINK, dtypes.void, tuple(s for u in mine for s in u.src))
        stale = standing_on(
            [sources],
            lambda u: u in overwritten or has_ended(u),
            lambda u: u.op is Ops.AFTER or u in becomes,
        )
        is_stale = {u for u in mine if any(s in stale for s in u.src)}
        ended = standing_on([u for u in mine if u not in trained], is_stale.__contains__, lambda u: not carries(u))
        now = iter(substitute(sources, stored_on(device, becomes)).src)
        for u in mine:
            src = tuple(next(now) for _ in u.src)
            if u in ended:
                ENDED[becomes[u]] = WROTE_LEAF
            else:
                HISTORY[becomes[u]] = (None if u in is_stale else u.replace(src=src), clock)


def _note_sources(values: list[UOp], becomes: dict[UOp, UOp]) -> None:
    """What `gradient()` of a tensor without requires_grad cannot see, and says so: which live values these were made
    of."""
    if not values:
        return
    lazy, noted = {t.uop for t in unrealized()}, set(values)
    below: dict[UOp, frozenset[UOp]] = {}
    for u in toposort(values, carries):
        if not carries(u):
            continue
        now = becomes.get(u, u)
        found = [below[s] for s in u.src if s in below]
        if u in noted:
            if found:
                sources = [Sources.of(x) for x in together(found)]
                Sources.of(now).add(sources)
            below[u] = frozenset((now,))  # (which says what is below it)
        elif now.op is Ops.BUFFER or u in lazy:
            below[u] = together([*found, frozenset((now,))])
        elif found:
            below[u] = together(found)


def kept_on_the_way(effects: list[UOp], overwritten: set[UOp]) -> list[UOp]:
    """Values stored on the way that were made from what is overwritten now, or by an assignment that waits, and not by
    training: the random numbers of a dropout. backward() after item() needs them; they could not be computed again.
    (On several workers what waits may be another thing on each: one alone may have read.)
    """
    if current().world.size == 1:
        waiting = {memory(t.uop) for t in PENDING}
        overwritten = overwritten | {before for u in waiting for before in _earlier(u)}
    if not overwritten or not (trained := _trained(effects)):
        return []
    readers = standing_on(effects, overwritten.__contains__, Ops.AFTER)
    return [
        u for u in toposort(effects) if u.op is Ops.CONTIGUOUS and u.arg is None and u in readers and u not in trained
    ]


def _earlier(u: UOp) -> Iterator[UOp]:
    """What a memory that assignments wait for was before each of them."""
    while u.op is Ops.AFTER:
        u = u.src[0]
        yield u


def _flowing(roots: Iterable[UOp]) -> set[UOp]:
    """The nodes below `roots` through which a gradient flows, or would, to what a leaf to train is or was."""
    leaves = {t.uop for t in TRAINED}
    if not leaves:
        return set()
    ends = lambda u: u in leaves or u in HISTORY or u in ENDED or was_leaf(u)  # noqa: E731
    return {u for u in standing_on(roots, ends, lambda u: not carries(u)) if carries(u)}


def _note_writes(
    u: UOp,
    buffer: UOp,
    flowing: set[UOp],
    written: dict[UOp, UOp],
    before: dict[UOp, tuple[UOp | None, int]],
) -> None:
    """What an assignment leaves in memory: more that a gradient would have to flow through, or none of it any more."""
    for store in u.src[1:]:
        if store.op is not Ops.STORE or store.arg is not None:
            continue
        target, value = store.src
        flows, is_whole = value in flowing, target.op in MEMORY and value.op is not Ops.DETACH
        if is_whole and not (
            flows and value in standing_on([value], lambda x: x is u.src[0], lambda x: not carries(x))
        ):
            written.pop(buffer, None)
            before.pop(buffer, None)
            ENDED.pop(buffer)
            HELD.pop(buffer)
        if flows or buffer in written or buffer in before:
            written[buffer] = u


def _remember_writes(
    last: UOp,
    buffer: UOp,
    becomes: dict[UOp, UOp],
    overwritten: set[UOp],
    clock: int,
    history: tuple[UOp | None, int] | None,
) -> None:
    """Memory that was written with what has a gradient keeps the graph of its writes. What was there before, with a
    `history` perhaps, has another node in it: its gradient can be had, its value is gone."""
    own = {last, *_earlier(last)}
    apart = lambda x: x not in own and (x.op is Ops.AFTER or x in becomes)  # noqa: E731
    has_gone = standing_on([last], lambda x: x not in own and x in overwritten, apart)
    ended = standing_on([last], lambda x: x not in own and has_ended(x), lambda x: apart(x) or not carries(x))
    HELD[buffer] = buffers_of(buffer)
    if last in has_gone or last in ended:
        ENDED.setdefault(buffer, WROTE_LEAF)
    if buffer in ENDED:
        return
    count = COUNT.get(buffer) or 0 if history is not None else 0
    COUNT[buffer] = count + 1
    if count >= MOST_WRITES:
        COUNT[buffer], ENDED[buffer] = 0, WROTE_OFTEN
        return
    before = engine().new_buffer(buffer, buffer.arg.device)
    LOST[before] = (
        f"the gradient needs a value of shape {buffer.shape} as it was before it was written to in place "
        f"({line_of(last)}); write x = x * y where there is x *= y, which makes a new tensor"
    )
    if history is not None:
        HISTORY[before] = history
    now = {x: b for x, b in stored_on(buffer.arg.device, becomes).items() if x not in own}
    HISTORY[buffer] = (substitute(last, now | {buffer: before}), clock)


def _trained(roots: Iterable[UOp]) -> set[UOp]:
    """The nodes below `roots` through which a gradient flows to a live tensor that requires one."""
    leaves = {t.uop for t in TRAINED}
    return standing_on(roots, lambda u: u in leaves or u in HISTORY, Ops.DETACH) if leaves else set()
