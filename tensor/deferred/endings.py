"""How a trace ends: an optimiser steps, or a value is read. Where all of it was followed so far, it is one replay."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

from manygrad.tensor.deferred.arguments import UnknownArgument, is_carried, told
from manygrad.tensor.deferred.calls import DeferredCall, Making, PutOff, Read, Resumed, needed_for
from manygrad.tensor.deferred.counts import COUNTS
from manygrad.tensor.deferred.tensors import DeferredTensor, is_placed, settle
from manygrad.tensor.deferred.trace import PUT_OFF, THREAD, Trace, begin, flush_others, making_calls, note_communication
from manygrad.tensor.deferred.tree import KeptGraphs, Key, Spec, TraceEnding, TraceNode
from manygrad.tensor.engine import MadeCalls, engine
from manygrad.tensor.environment import overridden
from manygrad.tensor.lock import LOCK
from manygrad.tensor.storage import TRAINED
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops
from manygrad.tensor.uop.views import memory

OPTIMIZERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # each one's own number
_numbers = itertools.count(1)
FLOWS_ON = "a gradient flows on from values that live on after the step"
LEAF_LIVES = "a value of the step that was made one to train (requires_grad_()) lives on, and the step goes on"
STATE_FLOWS = "a gradient flows on from memory that is written (x += p, where x = x + p is a new value)"
MOST_UNWRITTEN = 256  # calls of a trace that writes; then a read makes them, whatever it reads
MOST_UNREAD = 16  # values of a trace; then a read stores what lives on, which has no gradient afterwards
PLAIN = frozenset({bool, int, float, str, type(None)})  # which are equal where they are the same
REPLAY, RECORD = range(2)  # as `Engine.agree` has it
Gradients = Sequence[tuple[Tensor, Any]]  # parameters, each with its gradient, a value of the trace


# *** an optimiser's step ***


def end_with_step(
    trace: Trace,
    optimizer: Any,
    prepare: Callable[[], Any],
    step: Callable[[], Any],
    params: list[Tensor],
    memories: Callable[[], list[Tensor]],
) -> None:
    """Makes a step of an optimiser, with all calls before it. `prepare`: what it does before its first step, and again
    where parameters were replaced since; that is not captured. `memories`: what it reads besides gradients."""
    what: list[Any] = ["step", OPTIMIZERS.setdefault(optimizer, next(_numbers)), *settings(optimizer)]
    given = [p for p in params if p._grad is not None and not trace.has(p._grad)]
    if given and not trace.is_off:
        trace.inside(prepare, (), {})  # (parameters are named by where they lie)
    try:
        for p in params:
            told(p._grad, what, trace.serial, trace.external)
        for p in given:
            told(p, what, trace.serial, trace.external)
    except UnknownArgument as e:
        trace.is_off, trace.why = True, f"a gradient: {e}"
    grads = [(p, g) for p in params if (g := p._grad) is not None and trace.has(g)]
    done = goes_on = False
    try:
        if may_be_replayed(trace, is_step=True):
            with LOCK:
                if not any(
                    k[: len(what)] == tuple(what) and e.replay is not None for k, e in trace.node.endings.items()
                ):
                    trace.inside(prepare, (), {})  # (what it changes, and was put off to be read, is made before)
                done, goes_on = all_as_one(trace, tuple(what), step, grads, memories())
        if not done:
            give_up(trace, "the step of an optimiser")
    finally:
        if not goes_on:
            begin(trace.tree)
    COUNTS.note_step(what[1], done)
    if not done:
        since = engine().communicated()
        trace.inside(step, (), {})
        note_communication(since)
        # (as a replay does: what lives on lazily would keep the next step from being one)
        if carried := [t for _, t in trace.values.living() if is_carried(t)]:
            engine().realize(carried)
    _note_parts(params)


def _note_parts(params: Sequence[Tensor]) -> None:
    """After a step gradients are parts of one memory, each another one."""
    for p in params:
        g = p._grad
        if type(g) is Tensor and g.uop.op is not Ops.BUFFER:
            g.__dict__["_is_part"] = True


def settings(optimizer: Any) -> list[Any]:
    """What a step of an optimiser depends on besides tensors."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found.append((len(group["params"]), group.number_of_list()))
        for k, v in group.items():
            if k != "params" and k not in group.variable:
                found.append((k, type(v), v if type(v) in PLAIN else str(v)))
    return found


def all_as_one(
    trace: Trace,
    what: Key,
    step: Callable[[], Any] | None = None,
    grads: Gradients = (),
    memories: Sequence[Tensor] = (),
) -> tuple[bool, bool]:
    """(whether all calls are made, and then an optimiser's step, by a replay or a recording; whether the trace goes
    on)"""
    living = trace.values.living()
    numbers = [n for n, _ in living]
    ending = THREAD.ending = trace.node.ending((*what, tuple(numbers)))
    if not trace.is_following or not (trace.put_off or step):
        trace.why = trace.why or ending.plain
        return False, False
    trace.check()
    if ending.plain == FLOWS_ON and step is not None:
        return step_and_go_on(trace, (*what, tuple(numbers)), step, grads, memories, sorted(ending.flowing or ()))
    if not may_replay(trace, ending, writes=True, memories=memories):
        return False, False

    out = computed(trace, ending, trace.put_off, step, numbers, writes=True, grads=grads)
    for (_, t), now in zip(living, out):
        settle(t, now)
    trace.is_done()
    return True, False


def step_and_go_on(
    trace: Trace,
    what: Key,
    step: Callable[[], Any],
    grads: Gradients,
    memories: Sequence[Tensor],
    kept: list[int],
) -> tuple[bool, bool]:
    """A step after which gradients may flow through values that live on, `kept`: those that another model made (both
    halves of a GAN), say. They are graphs from then on, as after calls that write and are read."""
    living = trace.values.living()
    numbers = [n for n, _ in living]
    storages = [trace.values.storages[n] for n in kept]
    given = {n for c in trace.put_off for n in c.gives()}
    is_leaf = any(t._requires_grad for _, t in living)
    if is_leaf or not given.issuperset(numbers) or len({*storages}) != len(storages):
        trace.why = LEAF_LIVES if is_leaf else FLOWS_ON
        return False, False
    key = ("step and on", *what, *kept)
    ending = THREAD.ending = trace.node.ending(key)
    if not may_replay(trace, ending, writes=True, memories=memories):
        return False, False
    inputs = inputs_of(trace)
    out = computed(trace, ending, trace.put_off, step, numbers, writes=True, kept=kept, grads=grads)
    assert ending.kept is not None
    trace.is_done()
    resume(trace, key, ending, inputs, dict(zip(ending.kept.stored, out)), living, [])
    return True, True


def end_with_round(trace: Trace) -> None:
    """What lives of a loop is computed, which nobody has read for many rounds."""
    done = False
    living = [t for _, t in trace.values.living()]
    placed = [t for t in living if is_placed(t)]  # (what lies on no device yet stays so)
    try:
        if may_be_replayed(trace) and len(placed) == len(living):
            with LOCK:
                done, _ = all_as_one(trace, ("round",))
        if not done:
            give_up(trace, "a round of a loop that is not read")
    finally:
        begin(trace.tree)
    if not done:
        trace.inside(engine().realize, (placed,), {})


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
        if trace.why == LEAF_LIVES:  # (weights that are others in each step would stand on all before)
            living = [t for _, t in trace.values.living() if t._requires_grad or trace.has_gradients]
            if lazy := [t for t in living if is_carried(t)]:
                engine().realize(lazy)
        goes_on = goes_on and not trace.external.has_histories()
    finally:
        if not goes_on:
            begin(trace.tree)


def read_as_one(trace: Trace, numbers: Sequence[int]) -> tuple[bool, bool]:
    """(whether the values are there, whether the trace goes on)"""
    if trace.writes and trace.is_following:  # (and a read sees what was written)
        if writes_leaves(trace):
            return all_as_one(trace, ("all",))
    living = trace.values.living()
    if any(t._requires_grad for _, t in living):
        trace.why = LEAF_LIVES
        return False, False
    if trace.writes and trace.is_following:
        return read_and_write(trace, numbers)
    if not trace.put_off or not trace.is_following:
        return False, read_as_made(trace, numbers, living)
    if numbers and stores_unread(trace, ("read", *numbers)):
        numbers = [*numbers, *(n for n, _ in living if n in trace.carried())]
    numbers = trace.values.one_storage(numbers, living)
    has_others = any(n not in numbers and not is_read(t) for n, t in living)
    key = ("read", *numbers)
    ending = THREAD.ending = trace.node.ending(key)
    trace.check()
    if ending.replay is None and not numbers:
        ending.plain = "what depends on any call is read before the step ends"
    if not may_replay(trace, ending, writes=False):
        return False, False

    needed = [] if ending.replay is not None else needed_for(trace.put_off, numbers)
    out = computed(trace, ending, needed, None, numbers, writes=False)
    read = Read(dict(zip(numbers, out)), ending.flowing)
    if has_others or read.flowing or any(type(c) is Read and c.flowing for c in trace.put_off):
        settle_read(trace, dict(zip(numbers, out)), living, ending.flowing)
        if trace.has_gradients:  # (what nothing stands on any more is not made again)
            trace.put_off = needed_for(
                trace.put_off, [n for n, t in living if n not in read.stored or n in read.flowing]
            )
        trace.put_off.append(read)
        go_on(trace, key)
        return True, True
    settle_read(trace, dict(zip(numbers, out)), living)
    for _, t in living:
        if type(t) is DeferredTensor:
            settle(t, t.__dict__["_stored"])
    trace.is_done()
    return True, False


def read_as_made(trace: Trace, numbers: Sequence[int], living: list[tuple[int, Tensor]]) -> bool:
    """Values are read of calls that were made as they came. Whether the trace goes on."""
    if numbers and stores_unread(trace, ("read", *numbers)):
        # (in one go: what both stand on is computed once; `Trace.carried` says why not before a backward pass)
        awaits = not trace.has_gradients and any(t.requires_grad for _, t in living)
        if carried := [n for n, t in living if not awaits and n not in numbers and is_carried(t)]:
            engine().realize([t for n, t in living if n in carried or n in numbers])
            numbers = [*numbers, *carried]
    numbers = trace.values.one_storage(numbers, living)
    key = ("read", *numbers)
    ending = THREAD.ending = trace.node.ending(key)
    trace.why = trace.why or ending.plain
    if ending.flowing is None:
        ending.flowing = frozenset(n for n, t in living if n in numbers and t.requires_grad)
    has_others = any(n not in numbers and (t.requires_grad or not is_read(t)) for n, t in living)
    if not numbers or not (has_others or ending.flowing):
        return False
    go_on(trace, key)
    return True


def settle_read(
    trace: Trace, read: dict[int, Tensor], living: Sequence[tuple[int, Tensor]], flowing: Container[int] | None = None
) -> None:
    """These values are stored. Those that a gradient may flow through have their calls, too, as long as the trace goes
    on."""
    for n, t in living:
        if n in read and type(t) is DeferredTensor:
            if (flowing and n in flowing) or trace.values.is_shared(t):
                t.__dict__["_stored"] = read[n]
            else:
                settle(t, read[n])


def stores_unread(trace: Trace, key: Key) -> bool:
    """Whether a read of values stores others that live on: gradients, which are made once, and what has become much.
    On several workers one alone may read, but for what they communicate for. `key`: of the read of these alone."""
    if engine().workers()[1] == 1:
        return trace.has_gradients or len(trace.values) >= MOST_UNREAD
    return trace.has_gradients and bool(trace.node.ending(key).communicates)


def read_and_write(trace: Trace, numbers: Sequence[int]) -> tuple[bool, bool]:
    """As `read_as_one`, after calls that write (dropout, batch norm): a read carries that out, too. These calls are not
    made again when the trace goes on: what lives on of them is a graph, over what is in memory then."""
    living = trace.values.living()
    numbers = trace.values.one_storage(numbers, living) if numbers else ()
    at = next((i for i, c in enumerate(trace.put_off) if gives_gradients(c)), len(trace.put_off))
    calls, later, kept = parts(trace, at, living)
    if numbers and stores_unread(trace, ("read and write", *numbers, *kept)):
        numbers = trace.values.one_storage([*numbers, *(n for n, _ in living if n in trace.carried())], living)
        calls, later, kept = parts(trace, len(trace.put_off), living)
    given = {n for c in calls for n in c.gives()}
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

    inputs = inputs_of(trace)
    out = computed(trace, ending, calls, None, numbers, writes=True, kept=kept)
    assert ending.kept is not None
    read = dict(zip(ending.kept.stored, out))
    trace.is_done()
    if not (later or ending.flowing or any(n not in read for n, _ in living)):
        for n, t in living:
            settle(t, read[n])
        return True, False
    resume(trace, key, ending, inputs, read, living, later)
    return True, True


def resume(
    trace: Trace,
    key: Key,
    ending: TraceEnding,
    inputs: Sequence[Tensor],
    read: dict[int, Tensor],
    living: Sequence[tuple[int, Tensor]],
    later: Sequence[PutOff],
) -> None:
    """The trace goes on after calls that are not made again; these values are stored, `later` calls are put off."""
    assert ending.kept is not None
    settle_read(trace, read, living, ending.flowing)
    trace.external.refresh()  # (what was written is another node where it was not in memory)
    values = Read(read, ending.flowing)
    trace.put_off = [Resumed(ending.kept, inputs, values), values, *later]
    PUT_OFF[trace.serial] = trace
    memory_read = [(u.shape, u.dtype) for u in ending.kept.results]
    go_on(trace, (*key, *ending.kept.stored, *memory_read))


def parts(trace: Trace, at: int, living: Sequence[tuple[int, Tensor]]) -> tuple[list[PutOff], list[PutOff], list[int]]:
    """The calls before the one in this place, it and those after it, and what is used on of the first ones' values."""
    calls, later = trace.put_off[:at], trace.put_off[at:]
    given = {n for c in calls for n in c.gives()}
    return calls, later, sorted(given & {*(n for n, _ in living), *(n for c in later for n in c.used())})


def is_read(t: Tensor) -> bool:
    """Whether a living value is in memory, because it has been read."""
    return "_stored" in t.__dict__ or (type(t) is Tensor and t.uop.op is Ops.BUFFER)


def may_read_written(trace: Trace, tensors: Sequence[Tensor]) -> bool:
    """Whether any of these, which are in memory, may be written by a call that is put off. (The mean of weights over
    steps does not have to be there before the loss of the last step is printed.)"""
    if trace.has_read or len(trace.put_off) > MOST_UNWRITTEN:
        return True
    written = {n for c in trace.put_off if type(c) is DeferredCall for n in c.node.writes}
    if -1 in written:
        return True
    memories = {memory(trace.external.nodes[n]) for n in written}
    return any(memory(t.__dict__.get("_stored", t).uop) in memories for t in tensors)


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
    trace.has_read, trace.has_gradients = True, False


def gives_gradients(call: PutOff) -> bool:
    return type(call) is DeferredCall and bool(call.node.gradients)


# *** both ***


def give_up(trace: Trace, ending: str) -> None:
    """What ends here is no replay: calls that are put off are made as they came. `ending`: in words."""
    why = f"{ending} ends calls that are not replayed: {trace.why or 'they are made so for the first time'}"
    if trace.put_off:
        trace.flush(why)
    elif trace.why:
        COUNTS.note_flush(why)


def may_be_replayed(trace: Trace, is_step: bool = False) -> bool:
    """`is_step`: an optimiser's, of gradients that may be from before the trace."""
    return not trace.is_off and (is_step or trace.node is not trace.tree.root) and overridden.get() is None


def may_replay(trace: Trace, ending: TraceEnding, writes: bool, memories: Sequence[Tensor] = ()) -> bool:
    """Whether an ending can be captured, or the capture of it be replayed now, on all ranks if they communicate.
    `memories`: what it reads besides the tensors of the trace."""
    if ending.plain:
        trace.node.note_plain()
        trace.why = ending.plain
        return False
    if ending.replay is not None and not ending.replay.fits():
        trace.why = "state or gradients lie elsewhere than when it was recorded"
        return False
    if writes and shares_state(trace, ending, memories):
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


def shares_state(trace: Trace, ending: TraceEnding, memories: Sequence[Tensor]) -> bool:
    """Whether a value that may be another each time lies in the memory of state, which may be written meanwhile, or is
    written itself, in memory that is another one's, too."""
    x = trace.external
    written = {n for c in trace.put_off if type(c) is DeferredCall for n in c.node.writes if n >= 0}
    if apart := [n for n in written if not x.is_state[n]]:
        lies_in = [id(memory(u)) for u in x.nodes]
        if any(lies_in.count(lies_in[n]) > 1 for n in apart):
            return True
    if ending.state is None:
        ending.state = {id(memory(u)) for u, state in zip(x.nodes, x.is_state) if state}
    others = ending.state.union(id(memory(t.uop)) for t in memories)
    return any(id(memory(u)) in others for u, state in zip(x.nodes, x.is_state) if not state)


def computed(
    trace: Trace,
    ending: TraceEnding,
    calls: Sequence[PutOff],
    step: Callable[[], Any] | None,
    numbers: Sequence[int],
    writes: bool,
    kept: Sequence[int] | None = None,
    grads: Gradients = (),
) -> list[Tensor]:
    """The values of these numbers, after these calls, which may write, and an optimiser's step, by a replay, or by a
    recording that can be replayed the next time. `kept`: numbers of values that are used on, which are not computed;
    `grads`: what the step finds as the gradient of each parameter."""
    if writes:
        flush_others(trace)
    THREAD.ending, since = None, engine().communicated()
    inputs = inputs_of(trace)
    if step is None and kept is None and not writes:
        inputs = asked_for(trace, ending, calls, inputs)
    making = Making(trace.external)
    lazy: list[Tensor] = []
    of_params = [(p, g._value[1]) for p, g in grads]
    promised = [(t, t._grad) for t in TRAINED if type(t._grad) is DeferredTensor] if ending.replay is None else []
    for t, _ in promised:
        t._grad = None

    def run(*_: Tensor) -> list[Tensor]:
        making.make(calls, (*numbers, *(kept or ()), *(n for _, n in of_params)))
        if step is not None:
            before = [p._grad for p, _ in of_params]
            try:
                for p, n in of_params:
                    p._grad = making.values[n]
                step()
            finally:
                for (p, _), g in zip(of_params, before):
                    p._grad = g
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
                out = made.out
                note_recorded(ending, made, numbers, kept, writes, engine().communicated() != since)
                trace.tree.note_use(ending)
                if ending.replay is not None:
                    trace.tree.keep(ending)
    except BaseException as error:
        trace.lose(making.values, error)
        trace.is_done()
        raise
    finally:
        for t, g in promised:
            t._grad = g
    for t in out:
        t.__dict__["_is_result"] = True
    return out


def inputs_of(trace: Trace) -> list[Tensor]:
    """What may be others each time: tensors from before the trace, memory of what was read, and what values that live
    on stand on."""
    found = {id(t): t for t in trace.external.inputs()}
    for call in trace.put_off if trace.has_read else ():
        if not isinstance(call, DeferredCall):
            found |= {id(t): t for t in call.tensors() if id(t) not in found}
    return list(found.values())


def asked_for(trace: Trace, ending: TraceEnding, calls: Sequence[PutOff], inputs: list[Tensor]) -> list[Tensor]:
    """The inputs of the calls that a read needs, which are noted when it is recorded: of many values that are read one
    by one each needs few."""
    if ending.replay is None:
        read = {id(t) for call in calls for t in call.tensors()}
        leaves = {n for call in calls if isinstance(call, DeferredCall) for n in call.node.gradients if n >= 0}
        read |= {id(trace.external.tensors[n]) for n in leaves}
        ending.inputs = tuple(i for i, t in enumerate(inputs) if id(t) in read)
    return [inputs[i] for i in ending.inputs]


def note_recorded(
    ending: TraceEnding,
    made: MadeCalls,
    numbers: Sequence[int],
    kept: Sequence[int] | None,
    writes: bool,
    communicated: bool,
) -> None:
    """What was recorded, of these values, and whether it can be replayed."""
    if kept is not None:
        numbers = [*numbers, *(kept[k] if k >= 0 else k for k in made.stored)]
        graphs = {kept[k] if k >= 0 else k: u for k, u in made.graphs.items()}
        ending.kept = KeptGraphs(graphs, made.own, [t.uop for t in made.out], numbers)
    ending.flowing = frozenset(numbers[k] for k in made.flowing)
    if made.replay is None:
        ending.plain = "the calls made state that lives on, or computed nothing"
    elif communicated and not ending.communicates:
        ending.plain = "ranks communicate for a value that lives on, and that nothing asks for"
    elif made.state_flows:
        ending.plain = STATE_FLOWS
    elif kept is not None:
        if not made.lasts:
            ending.plain = "a value that lives on stands on what is overwritten, or on memory of the calls"
    elif writes and ending.flowing:
        ending.plain = FLOWS_ON
    ending.replay = None if ending.plain else made.replay


__all__ = ["end_with_read", "end_with_step"]
