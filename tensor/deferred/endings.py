"""How a trace ends: an optimiser steps, or a value is read. Where all of it was followed so far, it is one replay."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from manygrad.tensor.deferred.arguments import is_carried
from manygrad.tensor.deferred.calls import DeferredCall, Making, PutOff, Read, Resumed
from manygrad.tensor.deferred.counts import COUNTS
from manygrad.tensor.deferred.tensors import DeferredTensor, settle
from manygrad.tensor.deferred.trace import PUT_OFF, THREAD, Trace, begin, flush_others, making_calls, note_communication
from manygrad.tensor.deferred.tree import KeptGraphs, Key, Spec, TraceEnding, TraceNode
from manygrad.tensor.engine import engine
from manygrad.tensor.environment import overridden
from manygrad.tensor.lock import LOCK
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops
from manygrad.tensor.uop.views import memory

OPTIMIZERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # each one's own number
_numbers = itertools.count(1)
MOST_UNREAD = 16  # values of a trace; then a read stores what lives on, which has no gradient afterwards
REPLAY, RECORD = range(2)  # as `Engine.agree` has it


# *** an optimiser's step ***


def end_with_step(
    trace: Trace, optimizer: Any, prepare: Callable[[], Any], step: Callable[[], Any], params: list[Tensor]
) -> None:
    """Makes a step of an optimiser, with all calls before it. `prepare`: what it does before its first step, and again
    where parameters were replaced since; that is not captured."""
    grads: list[Any] = []
    for p in params:
        g = p._grad
        if g is not None and not trace.has(g):
            trace.is_off, trace.why = True, "a gradient is none of this step's values"
            break
        grads.append(None if g is None else g.__dict__["_value"][1])
    what = ("step", OPTIMIZERS.setdefault(optimizer, next(_numbers)), *grads, *settings(optimizer))
    done = False
    try:
        if may_be_replayed(trace):
            with LOCK:
                done = step_as_one(trace, what, prepare, step)
        if not done:
            give_up(trace, "the step of an optimiser")
    finally:
        begin(trace.tree)
    if not done:
        since = engine().communicated()
        trace.inside(step, (), {})
        note_communication(since)
        # (as a replay does: what lives on lazily would keep the next step from being one)
        if carried := [t for _, t in trace.values.living() if is_carried(t)]:
            engine().realize(carried)


def settings(optimizer: Any) -> list[Any]:
    """What a step of an optimiser depends on besides tensors."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found.append(len(group["params"]))
        found += [(k, str(v)) for k, v in group.items() if k != "params" and k not in group.variable]
    return found


def step_as_one(trace: Trace, what: Key, prepare: Callable[[], Any], step: Callable[[], Any]) -> bool:
    """Whether the step is made, with all calls before it, by a replay or a recording."""
    if not any(k[:-1] == what and e.replay is not None for k, e in trace.node.endings.items()):
        trace.inside(prepare, (), {})  # (what it changes, and was put off to be read, is made before)
    return all_as_one(trace, what, step)


def all_as_one(trace: Trace, what: Key, step: Callable[[], Any] | None) -> bool:
    """Whether all calls are made, and then an optimiser's step, by a replay or a recording."""
    trace.drop_gradients()
    living = trace.values.living()
    numbers = [n for n, _ in living]
    ending = THREAD.ending = trace.node.ending((*what, tuple(numbers)))
    if not trace.put_off or not trace.is_following:
        trace.why = trace.why or ending.plain
        return False
    trace.check()
    if not may_replay(trace, ending, writes=True):
        return False

    out = computed(trace, ending, trace.put_off, step, numbers, writes=True)
    for (_, t), now in zip(living, out):
        settle(t, now)
    trace.is_done()
    return True


# *** values that are read ***


def end_with_read(trace: Trace, numbers: Sequence[int] = ()) -> None:
    """Values are about to be read: these, or, without numbers, what may depend on any call. Where somebody has others,
    or may differentiate these, the trace goes on, and these are stored from here on."""
    done = goes_on = False
    try:
        if may_be_replayed(trace):
            with LOCK:
                done, goes_on = read_as_one(trace, numbers)
        if not done:
            give_up(trace, "a value that is read")
    finally:
        if not goes_on:
            begin(trace.tree)


def read_as_one(trace: Trace, numbers: Sequence[int]) -> tuple[bool, bool]:
    """(whether the values are there, whether the trace goes on)"""
    if trace.writes and trace.is_following:  # (and a read sees what was written)
        if writes_leaves(trace):
            return all_as_one(trace, ("all",), None), False
        return read_and_write(trace, numbers)
    living = trace.values.living()
    is_made = not trace.put_off or not trace.is_following
    if numbers and len(trace.values) < MOST_UNREAD:
        numbers = trace.values.one_storage(numbers, living)
    elif numbers:
        # (what lives on is stored, too: each step that carried it on would compute more)
        if is_made:
            carried = [n for n, t in living if n not in numbers and is_carried(t)]
            if carried:  # (in one go: what both stand on is computed once)
                engine().realize([t for n, t in living if n in carried or n in numbers])
        else:
            carried = [n for n, _ in living if n in trace.carried()]
        numbers = trace.values.one_storage([*numbers, *carried], living)
    has_others = any(n not in numbers and not is_read(t) for n, t in living)
    key = ("read", *numbers)
    ending = THREAD.ending = trace.node.ending(key)
    if is_made:  # (as they came)
        trace.why = trace.why or ending.plain
        if ending.has_history is None:
            ending.has_history = any(t.requires_grad for n, t in living if n in numbers)
        flows = ending.has_history or any(t.requires_grad for n, t in living if n not in numbers)
        goes_on = bool(numbers) and (has_others or flows)
        if goes_on:
            go_on(trace, key)
        return False, goes_on
    trace.check()
    if ending.replay is None and (not numbers or gives_gradients(needed_for(trace, numbers))):
        ending.plain = "a gradient, or what depends on any call, is read before the step ends"
    if not may_replay(trace, ending, writes=False):
        return False, False

    needed = [] if ending.replay is not None else needed_for(trace, numbers)
    out = computed(trace, ending, needed, None, numbers, writes=False)
    read = dict(zip(numbers, out))
    for n, t in living:
        if n in read:
            t.__dict__["_stored"] = read[n]
    flows = bool(ending.has_history) or any(type(c) is Read and c.flows for c in trace.put_off)
    if has_others or flows:
        trace.put_off.append(Read(read, flows))
        go_on(trace, key)
        return True, True
    for _, t in living:
        if type(t) is DeferredTensor:
            settle(t, t.__dict__["_stored"])
    trace.is_done()
    return True, False


def read_and_write(trace: Trace, numbers: Sequence[int]) -> tuple[bool, bool]:
    """As `read_as_one`, after calls that write (dropout, batch norm): a read carries that out, too. These calls are not
    made again when the trace goes on: what lives on of them is a graph, over what is in memory then."""
    at = next((i for i, c in enumerate(trace.put_off) if type(c) is DeferredCall and c.node.gradients), None)
    calls, later = trace.put_off[:at], trace.put_off[len(trace.put_off) if at is None else at :]
    living = trace.values.living()
    numbers = trace.values.one_storage(numbers, living) if numbers else ()
    given = {n for c in calls for n in c.gives()}
    kept = sorted(given & {*(n for n, _ in living), *(n for c in later for n in c.used())})
    storages = [trace.values.storages[n] for n in kept]
    simple = not trace.has_read and numbers and given.issuperset(numbers) and len({*storages}) == len(storages)
    if not simple or any(type(c) is DeferredCall and c.node.writes for c in later):
        trace.why = "a value is read before the step ends, and calls before it write (dropout, batch norm)"
        return False, False
    key = ("read and write", *numbers, *kept)
    ending = THREAD.ending = trace.node.ending(key)
    trace.check()
    if not may_replay(trace, ending, writes=True):
        return False, False

    inputs = trace.external.inputs()
    out = computed(trace, ending, calls, None, numbers, writes=True, kept=kept)
    assert ending.kept is not None
    read = dict(zip(ending.kept.stored, out))
    trace.is_done()
    if not (later or ending.has_history or any(n not in read for n, _ in living)):
        for n, t in living:
            settle(t, read[n])
        return True, False
    for n, t in living:
        if n in read:
            t.__dict__["_stored"] = read[n]
    x = trace.external
    x.nodes = [t.uop for t in x.tensors]  # (what was written is another node where it was not in memory)
    values = Read(read, bool(ending.has_history))
    trace.put_off = [Resumed(ending.kept, inputs, values), values, *later]
    PUT_OFF[trace.serial] = trace
    memory_read = [(u.shape, u.dtype) for u in ending.kept.results]
    go_on(trace, (*key, *ending.kept.stored, *memory_read))
    return True, True


def is_read(t: Tensor) -> bool:
    """Whether a living value is in memory, because it has been read."""
    return "_stored" in t.__dict__ or (type(t) is Tensor and t.uop.op is Ops.BUFFER)


def writes_leaves(trace: Trace) -> bool:
    """Whether all that gradients were made of is written: a step by hand, after which values are stored that stand on
    what it was."""
    calls = [c.node for c in trace.put_off if type(c) is DeferredCall]
    leaves = {n for node in calls for n in node.gradients}
    return bool(leaves) and leaves.issubset(n for node in calls for n in node.writes)


def go_on(trace: Trace, key: Key) -> None:
    """The trace goes on after a read."""
    child = trace.node.children.get(key)
    if child is None:
        child = trace.node.children[key] = TraceNode(trace.node, key)
    trace.node = child
    trace.has_read = True


def gives_gradients(calls: Sequence[PutOff]) -> bool:
    return any(type(c) is DeferredCall and c.node.gradients for c in calls)


def needed_for(trace: Trace, numbers: Sequence[int]) -> list[PutOff]:
    """The calls that these values stand on, and the reads of what they stand on."""
    needed, found = set(numbers), set()
    for i, call in reversed(list(enumerate(trace.put_off))):
        if type(call) is not Read and not needed.isdisjoint(call.gives()):
            found.add(i)
            needed.update(call.read.stored if type(call) is Resumed else call.used())
    return [
        call
        for i, call in enumerate(trace.put_off)
        if i in found or (type(call) is Read and not needed.isdisjoint(call.stored))
    ]


# *** both ***


def give_up(trace: Trace, ending: str) -> None:
    """What ends here is no replay: calls that are put off are made as they came. `ending`: in words."""
    why = f"{ending} ends calls that are not replayed: {trace.why or 'they are made so for the first time'}"
    if trace.put_off:
        trace.flush(why)
    elif trace.why:
        COUNTS.note_flush(why)


def may_be_replayed(trace: Trace) -> bool:
    return not trace.is_off and trace.node is not trace.tree.root and overridden.get() is None


def may_replay(trace: Trace, ending: TraceEnding, writes: bool) -> bool:
    """Whether an ending can be captured, or the capture of it be replayed now, on all ranks if they communicate."""
    if ending.plain:
        trace.node.note_plain()
        trace.why = ending.plain
        return False
    if ending.replay is not None and not ending.replay.fits():
        trace.why = "state or gradients lie elsewhere than when it was recorded"
        return False
    if writes and shares_state(trace, ending):
        trace.why = "an input lies in memory that may be written"
        return False
    trace.why = agreed(trace, ending, writes) if engine().workers()[1] > 1 else ""
    return not trace.why


def agreed(trace: Trace, ending: TraceEnding, writes: bool) -> str:
    """Has all ranks make an ending in one way, where they communicate for it; why it is made call by call, or nothing.
    A read that does not communicate is this rank's own business. What is written is not, where any value of the trace
    is one of all ranks: they would come to another plan that reads it, one with what was computed, one without."""
    if ending.communicates is None:
        return "whether ranks communicate for it is seen where its calls are made as they come"
    if not ending.communicates:
        return "it writes, and ranks do not communicate for it" if writes and is_of_all(trace) else ""
    how = engine().agree(ending.place, REPLAY if ending.replay is not None else RECORD)
    if how == RECORD:
        ending.replay = None
    return "" if how in (REPLAY, RECORD) else "another rank has not come to it by the same calls"


def is_of_all(trace: Trace) -> bool:
    """Whether a value of the trace lies with several workers."""
    given = [r.device for c in trace.put_off if type(c) is DeferredCall for r in c.node.results if type(r) is Spec]
    places = {*given, *(u.device for u in trace.external.nodes)}
    return any("@" in name for place in places if isinstance(place, tuple) for name in place)


def shares_state(trace: Trace, ending: TraceEnding) -> bool:
    """Whether a value that may be another each time lies in the memory of state, which may be written meanwhile, or is
    written itself, in memory that is another one's, too."""
    x = trace.external
    written = {n for c in trace.put_off if type(c) is DeferredCall for n in c.node.writes if n >= 0}
    if apart := [n for n in written if not x.is_state[n]]:
        memories = [id(memory(u)) for u in x.nodes]
        if any(memories.count(memories[n]) > 1 for n in apart):
            return True
    if ending.state is None:
        ending.state = {id(memory(u)) for u, state in zip(x.nodes, x.is_state) if state}
    return any(id(memory(u)) in ending.state for u, state in zip(x.nodes, x.is_state) if not state)


def computed(
    trace: Trace,
    ending: TraceEnding,
    calls: Sequence[PutOff],
    step: Callable[[], Any] | None,
    numbers: Sequence[int],
    writes: bool,
    kept: Sequence[int] | None = None,
) -> list[Tensor]:
    """The values of these numbers, after these calls, which may write, and an optimiser's step, by a replay, or by a
    recording that can be replayed the next time. `kept`: numbers of values that are used on, which are not computed."""
    if writes:
        flush_others(trace)
    THREAD.ending, since = None, engine().communicated()
    inputs = trace.external.inputs()
    if trace.has_read:
        inputs += [t for call in trace.put_off if type(call) is Read for t in call.memories.values()]
    making = Making(trace.external)
    lazy: list[Tensor] = []
    gradients = [(t, t._grad) for t in trace.leaves]  # (of a read: they are put off still)
    for t in trace.leaves:
        t._grad = None

    def run(*_: Tensor) -> list[Tensor]:
        making.make(calls, (*numbers, *(kept or ())))
        if step is not None:
            step()
        out = [making.values[n] for n in numbers]
        lazy.extend(making.values[n] for n in kept or ())
        making.values.clear()
        return out

    try:
        with making_calls(trace):
            if ending.replay is not None:
                COUNTS.replays += 1
                trace.tree.note_use(ending)
                out = ending.replay.run(inputs)
                if step is not None:
                    engine().count_update()
            else:
                COUNTS.recordings += 1
                state = trace.external.state()
                made = engine().capture_calls(run, inputs, state, writes, lazy)
                out, replay, ending.has_history = made.out, made.replay, made.flows
                if kept is not None:
                    stored = [*numbers, *(kept[k] if k >= 0 else k for k in made.stored)]
                    graphs = {kept[k] if k >= 0 else k: u for k, u in made.graphs.items()}
                    ending.kept = KeptGraphs(graphs, made.own, [t.uop for t in out], stored)
                if replay is None:
                    ending.plain = "the calls made state that lives on, or computed nothing"
                elif engine().communicated() != since and not ending.communicates:
                    ending.plain = "ranks communicate for a value that lives on, and that nothing asks for"
                elif kept is not None:
                    if not made.lasts:
                        ending.plain = "a value that lives on stands on what is overwritten, or on memory of the calls"
                elif writes and ending.has_history:
                    ending.plain = "a gradient flows on from values that live on after the step"
                ending.replay = None if ending.plain else replay
                trace.tree.note_use(ending)
                if ending.replay is not None:
                    trace.tree.keep(ending)
    except BaseException as error:
        trace.lose(making.values, error)
        trace.is_done()
        raise
    finally:
        for t, g in gradients:
            t._grad = g
    return out


__all__ = ["end_with_read", "end_with_step"]
