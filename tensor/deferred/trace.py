"""A trace: the calls that a thread makes from one computation to the next, followed along those that it made before.

A call that was made at this place before is put off: its results are known by shape and type, and a `DeferredTensor`
stands for each. Where the trace ends as one did before, all of it is one replay. A call that is new here, and anybody
who asks for the graph of a result, has the calls made after all, in their order, as if nothing had been put off.

What is put off reads and writes tensors from before. Whoever is about to change one of these, in any thread, has the
calls made first (`flush_readers`), and so has whoever computes something else in this thread.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from threading import RLock, get_ident, local
from types import CodeType
from typing import Any

from manygrad.tensor.autocast import as_given
from manygrad.tensor.deferred.arguments import (
    CONSTANTS,
    NOBODY,
    External,
    UnknownArgument,
    Value,
    most_carried,
    nbytes,
    told,
)
from manygrad.tensor.deferred.calls import DeferredCall, Maker, Making, PutOff, Read, TraceValues, needed_for
from manygrad.tensor.deferred.changed_gradients import part_of
from manygrad.tensor.deferred.counts import COUNTS
from manygrad.tensor.deferred.rounds import Rounds
from manygrad.tensor.deferred.tensors import DeferredTensor, settle
from manygrad.tensor.deferred.tree import MOST_NODES, Key, Spec, TraceEnding, TraceNode, TraceTree, as_leaf
from manygrad.tensor.deferred.varying import (
    FILLING,
    has_new_number,
    has_varying,
    mark_varying,
    stays_varying,
    tell,
    with_input,
)
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.environment import overridden
from manygrad.tensor.grad_mode import is_grad_enabled
from manygrad.tensor.lock import LOCK
from manygrad.tensor.ops.random import drawing_as, thread_of_draws
from manygrad.tensor.source import user_line, user_place
from manygrad.tensor.storage import HOOKED, LIVE, MOVES, PENDING, before_change, is_stored, sharing
from manygrad.tensor.tensor import TRAINING, Tensor
from manygrad.tensor.uop import Ops
from manygrad.tensor.uop.views import memory

CONSTANT = frozenset({"full", "ones", "zeros"})  # what they give is one number in all places
MOST_CALLS = 20_000  # are put off; then they are made
_serials = itertools.count(1)
# the traces that have put calls off, by serial
PUT_OFF: weakref.WeakValueDictionary[int, Trace] = weakref.WeakValueDictionary()
WRITING: weakref.WeakValueDictionary[int, Trace] = weakref.WeakValueDictionary()  # those that will write


class Trace:
    """A thread's calls since the last ending. Large: what is known of it at each call, and what each ending needs."""

    def __init__(self, tree: TraceTree) -> None:
        self.tree = tree
        self.lock = RLock()  # held while `put_off` changes
        self.maker = Maker(get_ident(), thread_of_draws())
        self.serial = next(_serials)
        self.node = tree.root
        self.is_following = True  # all calls so far are put off
        self.is_off = False  # calls are made as they come, until the next ending
        self.put_off: list[PutOff] = []
        self.external = External(self.serial)
        self.values = TraceValues(self.serial)
        self.writes = False  # something that is put off
        self.has_gradients = False  # since something was read last
        self.has_read = False  # values, and goes on
        self.is_busy = False  # making what was put off
        self.why = ""  # what it comes to is not replayed, in words
        self.rounds = Rounds()

    # *** calls ***

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`fn(*args, **kwargs)`, now or later."""
        if self.has_read and not any(self.has(x) for x in (*args, *kwargs.values())):
            if fn.__name__ in CONSTANT:  # (which stands in this trace, and in the next)
                return self.inside(fn, args, kwargs)
            return self.begin_anew().call(fn, args, kwargs)
        external, serial = self.external, self.serial
        code, at = user_place()
        rounds = self.rounds
        if self.node.depth >= rounds.look_at:
            rounds.look(self)
        begins = rounds.begins_with
        if begins is not None and begins == (fn, id(code), at) and not rounds.is_held and rounds.is_over(self):
            return self.next_round().call(fn, args, kwargs)
        if self.tree.varying:
            here = (fn, id(code), at) in self.tree.varying
            if here or (self.tree.marks and has_varying(args)):
                if fn.__name__ in FILLING or stays_varying(fn, args):
                    self.tree.marks = True
                    return mark_varying(self.inside(fn, args, kwargs))
                if not kwargs:
                    fn, args = with_input(fn, args)
        sig: list[Any] = [fn, id(code), at, is_grad_enabled(), TRAINING.get(), dtypes.default_float]
        known = len(external.tensors)
        try:
            if overridden.get() is not None:
                raise UnknownArgument("it is called inside of a Context(...)")
            kept: list[Any] = []
            for x in args:
                kind = type(x)
                if kind in CONSTANTS:
                    sig += (kind, x)
                    kept.append(x)
                else:
                    kept.append(told(x, sig, serial, external))
            named = kwargs
            if kwargs:
                named = {}
                for k, x in kwargs.items():
                    sig.append(k)
                    named[k] = told(x, sig, serial, external)
            key = tuple(sig)
            child = self.node.children.get(key)
        except (UnknownArgument, TypeError) as e:  # (what has no hash)
            why = str(e) if isinstance(e, UnknownArgument) else "an argument has no hash"
            return self.refuse(fn, args, kwargs, why)
        if child is not None and child.is_followed and not child.is_plain and len(self.put_off) < MOST_CALLS:
            with self.lock:
                if self.is_following:
                    self._put_off(child, DeferredCall(child, kept, named))
                    r = child.results[0] if child.kind is None else 0
                    return self.values.promise(self, r) if type(r) is Spec else self._promised(child, args)
        return self._make(fn, args, kwargs, key, known, code)

    def next_round(self) -> Trace:
        """The trace that goes on with the next rounds of a loop that nobody reads."""
        from manygrad.tensor.deferred.endings import end_with_round

        end_with_round(self)
        THREAD.trace.rounds = Rounds(self.rounds.begins_with, self.rounds.every)
        return THREAD.trace

    def carried(self) -> frozenset[int]:
        """Numbers of the values that a read stores, too, where the program still has them: all but large ones, those
        that a gradient may flow through, and those that lie on no device yet. None before a backward pass: to what is
        stored what has a gradient may yet be written."""
        if self.node.carried is None:
            flowing, kept = set[int](), set[int]()  # kept: storages that stay lazy
            flows = passed = False
            most, storages = most_carried(self.external.nodes), self.values.storages
            for c in self.put_off:
                if type(c) is not DeferredCall:  # (a read before: what it stored may have a history)
                    flowing.update(c.gives())
                    flows = flows or bool(getattr(c, "flowing", None))
                elif c.node.gradients:
                    passed = True
                else:
                    given = dict(zip(c.gives(), [r for r in c.node.results if type(r) is Spec]))
                    kept |= {
                        storages[n]
                        for n, spec in given.items()
                        if spec.device is None or nbytes(spec.shape, spec.dtype) > most
                    }
                    if c.may_pass_gradients(flowing):
                        flowing |= {n for n, spec in given.items() if spec.dtype.is_float}
                        flows = True
            found = (n for n in range(len(storages)) if n not in flowing and storages[n] not in kept)
            self.node.carried = frozenset(found) if passed or not flows else frozenset()
        return self.node.carried

    def begin_anew(self) -> Trace:
        """Something else begins: another step, say."""
        if self.writes:
            self.flush("something else begins, which may read what is written")
        self.keep_unsettled()
        return begin(self.tree)

    def keep_unsettled(self) -> None:
        """Nothing is called on its values any more: what these do not stand on is forgotten, with its memory."""
        with self.lock:
            if self.put_off and not self.is_busy and not self.writes:
                left = [n for n, t in self.values.living() if type(t) is DeferredTensor]
                found = needed_for(self.put_off, left)
                used = {*left, *(n for c in found for n in c.used() if type(c) is DeferredCall)}
                self.put_off = [c.of(used) if type(c) is Read else c for c in found]
                if not self.put_off:
                    self.is_done()

    def has(self, x: Any) -> bool:
        """Whether an argument is one of this trace's values."""
        if isinstance(x, Tensor):
            value = x.__dict__.get("_value")
            return value is not None and value[0] == self.serial
        return type(x) in (tuple, list) and any(map(self.has, x))

    def _put_off(self, child: TraceNode, call: DeferredCall) -> None:
        if not self.put_off:
            PUT_OFF[self.serial] = self
        if not child.is_known:
            self.node.note_known(child)
        self.node = child
        self.put_off.append(call)
        if child.writes:
            self.writes = True
            WRITING[self.serial] = self

    def _promised(self, node: TraceNode, args: Sequence[Any]) -> Any:
        promise = self.values.promise
        out = [promise(self, r) if isinstance(r, Spec) else r if r is None else args[r] for r in node.results]
        if node.kind is None:
            return out[0]
        return node.kind(*out) if hasattr(node.kind, "_fields") else node.kind(out)

    def refuse(self, fn: Callable[..., Any], args: Any, kwargs: Any, why: str) -> Any:
        """A call that cannot be put off; it and what follows, up to the next ending, are made as they come."""
        why = f"`{'backward' if fn.__name__ == '_leaf_gradients' else fn.__name__}` cannot be put off: {why}"
        if not self.put_off:
            COUNTS.note_flush(why)
        self.flush(why)
        self.is_off = True
        return fn(*args, **kwargs)

    def _make(self, fn: Any, args: Any, kwargs: Any, key: Key, known: int, code: CodeType) -> Any:
        """A call that was not made here before, or comes after one that was not. `code`: the user's, which makes it."""
        self.flush(f"`{fn.__name__}` was not called so before, after the same calls")
        if len(self.values) >= MOST_CALLS:  # (a thread that never computes anything has no ending)
            return begin(self.tree).call(fn, args, kwargs)
        self.is_following = False
        moves, computed, joined = MOVES.count, MOVES.computed, MOVES.joined
        is_new = key not in self.node.children
        if is_new:
            LIVE.mark(self)
        try:
            out = self.inside(fn, args, kwargs)
        except BaseException:
            LIVE.forget(self)
            raise
        child = self.node.children.get(key)
        if child is None and not is_new:  # (it went with state that its key names)
            self.is_off = True
            return out
        if child is not None:
            self.node.note_known(child)
        else:
            child = self._grow(fn, key, known, code)
            if (not kwargs or fn.__name__ in FILLING) and has_new_number(self.node, key):
                self.tree.note_varying(key[:3], code)
            child.describe(out, args, {id(t) for t in LIVE.newer(self)})
            # (what it gives may depend on values, or on which tensors the program still has)
            if MOVES.computed != computed or MOVES.joined != joined:
                child.is_followed = False
            if MOVES.count != moves:
                child.writes = self.external.written()
            LIVE.forget(self)
        made = [t for t, r in zip(out if child.kind else [out], child.results) if type(r) is Spec]
        self._go_to(child, made, is_new)
        self.external.let_go(known)
        return out

    def _go_to(self, child: TraceNode, made: list[Any], is_new: bool = False) -> None:
        """A call has been made, and gave these tensors. `is_new`: nobody made it here before."""
        self.node = child
        self.is_off = not child.is_followed
        if self.is_off:
            return
        specs = [r for r in child.results if type(r) is Spec]
        for t, spec in zip(made, specs, strict=True):
            if is_new:
                spec.storage = self.values.storage_of(t)
            t.__dict__["_value"] = (self.serial, len(self.values))
            self.values.add(t, spec)

    def inside(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`; the calls that it makes are a part of it."""
        before, THREAD.is_inside = THREAD.is_inside, True
        try:
            return fn(*args, **kwargs)
        finally:
            THREAD.is_inside = before

    def _grow(self, fn: Any, key: Key, known: int, code: CodeType) -> TraceNode:
        """A new node below this one."""
        tree = self.tree
        tree.nodes -= self.node.make_room()
        if tree.nodes >= MOST_NODES:
            tree.root.children.clear()
            tree.nodes = 0
        tree.nodes += 1
        self.node.note_new()
        child = self.node.children[key] = TraceNode(self.node, key, fn, user_line(), code)
        x = self.external
        child.place = key[:3]
        tell(self.node, key, child.line)
        child.hold(key, [(t, u) for t, u, s in zip(x.tensors[known:], x.nodes[known:], x.is_state[known:]) if s])
        return child

    # *** gradients ***

    def leaf_gradients(self, fn: Callable[..., Any], loss: Tensor, *asked: Any) -> list[tuple[Tensor, Tensor]]:
        """What `backward()` adds to the gradients of tensors from before."""
        value = loss.__dict__.get("_value")
        if (
            any(x is not None and x is not False for x in asked)
            or value is None
            or value[0] != self.serial
            or overridden.get() is not None
        ):
            return self.refuse(fn, (loss, *asked), {}, "it has arguments, or its loss is none of this step's values")
        code, at = user_place()
        # (a layer may be frozen, or no longer, since the trace met it)
        trained = tuple([n for n, t in enumerate(self.external.tensors) if t is not NOBODY and t._requires_grad])
        modes = is_grad_enabled(), TRAINING.get(), dtypes.default_float
        key = (fn, id(code), at, *modes, value[1], trained)
        child = self.node.children.get(key)
        self.has_gradients = True
        if child is not None and child.is_followed and not child.is_plain:
            with self.lock:
                if self.is_following:
                    self._put_off(child, DeferredCall(child, [Value(value[1]), *asked], {}))
                    leaves = [self._leaf(i) for i in child.gradients]
                    promised = [self.values.promise(self, r) for r in child.results]
                    return [(t, g) for t, g in zip(leaves, promised) if t is not None]
        self.flush("`backward` was not called so before")
        self.is_following = False
        found: list[tuple[Tensor, Tensor]] = self.inside(fn, (loss, *asked), {})
        child = self.node.children.get(key)
        if child is None:
            child = self._grow(fn, key, len(self.external.tensors), code)
            numbers = [self.values.leaf_number(t, self.external) for t, _ in found]
            specs = [Spec.of(g) for _, g in found]
            has_hooks = any(t._hooks and not t._requires_grad for t in HOOKED) or any(t._retains for t in LIVE)
            child.is_followed = bool(found) and not has_hooks and None not in numbers and None not in specs
            if child.is_followed:
                child.gradients = tuple([n for n in numbers if n is not None])
                child.results = [s for s in specs if s is not None]
                for spec in child.results:
                    spec.requires_grad = False  # type: ignore[union-attr]
        made = {id(t): g for t, g in found}
        self._go_to(child, [made[id(self._leaf(i))] for i in child.gradients])
        return found

    def _leaf(self, number: int) -> Tensor | None:
        """A tensor from before, or, below 0, the value with the number ~number, if the program still has that."""
        return self.external.tensor(number) if number >= 0 else self.values.tensor(~number)

    def train(self, t: Tensor) -> None:
        """A value of this trace becomes one to train."""
        made = self.call(as_leaf, (t,), {})
        t._requires_grad, trace = True, THREAD.trace  # (which may be another one since)
        if type(made) is DeferredTensor:
            trace.values.renew(t, made)
            return
        settle(t, made)
        if trace.has(made):
            trace.values.replace(made.__dict__["_value"][1], t)

    def change_gradient(
        self, fn: Callable[..., None], value: Callable[..., Tensor], held: Tensor, *new: Tensor
    ) -> None:
        """`fn(held, *new)`, which changes a gradient to `value(held, *new)`."""
        if self.has_read and not any(map(self.has, (held, *new))):
            return self.begin_anew().change_gradient(fn, value, held, *new)
        shared = not all(map(self.has, new)) or self.is_shared(held)
        with self.rounds.in_one_piece():
            x = None if shared else held if self.has(held) else self.as_input(held)
            if x is not None:
                changed = self.call(value, (x, *new), {})
                del x
                return self.become(held, changed)
        self.flush("a gradient is changed that others read, or that is none of this step's values")
        self.is_off = True
        return self.inside(fn, (held, *new), {})

    def as_input(self, held: Tensor) -> Tensor | None:
        """Another tensor of the same value, which is from before the trace, or, as gradients are after a step, a part
        of what is; None where it is not in memory."""
        if held.uop.device is None and isinstance(held.device, str):  # (made of numbers: others in each step)
            engine().realize([held])
        u, steps = held.uop, list[Any]()
        while u.op in (Ops.RESHAPE, Ops.SHRINK, Ops.PERMUTE, Ops.DETACH):
            steps[:0] = [u.op.name, u.arg]
            u = u.src[0]
        if type(held) is not Tensor or u.op is not Ops.BUFFER:
            return None
        whole = self.external.whole(u, held)
        return self.call(part_of, (whole, *steps), {}) if steps else whole

    # *** values that are written ***

    def call_in_place(self, fn: Callable[..., Any], value: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """`fn(*args, **kwargs)`, which writes `value(*args, **kwargs)` to its first argument, a value of this trace.
        Where no other tensor shares its memory, that is another value, which the tensor is from then on."""
        target: Tensor = args[0]
        flows_on = not is_grad_enabled() and target.requires_grad  # (its gradient, past the write)
        if flows_on or self.is_shared(target):
            written: Tensor = self.call(fn, args, kwargs)
            return written
        place = self.rounds.begins_with
        if place is not None and place[0] is value:
            code, at = user_place()
            if place[1:] == (id(code), at) and self.rounds.is_over(self):
                return self.next_round().call(fn, args, kwargs)
        with self.rounds.in_one_piece():
            made = self.call(value, args, kwargs)
            self.become(target, made)
        return target

    def become(self, target: Tensor, made: Tensor) -> None:
        """`made` is written to `target`."""
        if type(made) is DeferredTensor:
            self.values.renew(target, made)
            return
        with LOCK:
            self.inside(target._overwrite, (made,), {})
        self.external.refresh()
        if self.has(made):
            self.values.replace(made.__dict__["_value"][1], target)
        elif self.has(target):  # (the call was refused, and is none of the trace)
            self.is_off = True

    def is_shared(self, t: Tensor) -> bool:
        """Whether the program has others in the memory of `t`, or calls that are put off read it as from before."""
        if self.values.is_shared(t):
            return True
        if type(t) is DeferredTensor:
            return t._spec.is_view
        if any(id(t) in trace.external.numbers for trace in PUT_OFF.values()):
            return True
        if not is_stored(t.uop):
            return len(sharing(t)) > 1
        base = memory(t.uop)
        apart = "_is_part" if "_is_part" in t.__dict__ else "_is_result"
        return any(
            memory(x.uop) is base and x is not t and "_is_result" not in x.__dict__ and apart not in x.__dict__
            for x in LIVE
        )

    # *** making what was put off ***

    def flush(self, why: str) -> None:
        """Makes all calls that were put off. `why`: in words (`counts.py`)."""
        if not self.put_off:
            return
        with LOCK, self.lock:
            if self.is_busy or not self.put_off:
                return
            self.is_following = False
            COUNTS.note_flush(why)
            self.check()
            making = Making(self.external, self.values)
            try:
                with making_calls(self), drawing_as(self.maker.draws), PENDING.of(self.maker.thread):
                    making.make(self.put_off)
            except BaseException as error:
                self.lose(making.values, error)
                raise
            finally:
                self.is_done()

    def writes_parameters(self) -> bool:
        """Whether calls that are put off write what is trained: earlier values no longer depend on it."""
        tensors = self.external.tensors
        calls = [c for c in self.put_off if type(c) is DeferredCall] if self.writes else []
        written = {n for c in calls for n in c.node.writes}
        # (of what no call here has read, -1, no value depends)
        return any(n >= 0 and tensors[n] is not None and bool(tensors[n]._requires_grad) for n in written)

    def show_writes(self, t: Tensor) -> None:
        """Makes what was put off, if it writes to `t`, a tensor from before: it may have a gradient then."""
        if self.writes and (n := self.external.numbers.get(id(t))) is not None:
            if any(n in c.node.writes for c in self.put_off if type(c) is DeferredCall):
                self.flush("whether a tensor requires a gradient is asked for")

    def check(self) -> None:
        """What was put off to be read is as it was."""
        x = self.external
        if [t.uop for t in x.tensors] == x.nodes:
            return
        for n, (t, u) in enumerate(zip(x.tensors, x.nodes)):
            if t.uop is u:
                continue
            if is_stored(u) or t.uop.op is not Ops.BUFFER:
                raise RuntimeError(
                    f"a tensor of shape {t.shape} was changed while calls that read it were put off, in a way that was "
                    "not noticed in time; this is a fault of manygrad, and FOLLOW=0 avoids it"
                )
            x.nodes[n] = t.uop  # (another thread has computed it meanwhile)

    def is_done(self) -> None:
        """Nothing is put off any more."""
        if self.writes:
            WRITING.pop(self.serial, None)
        self.put_off, self.writes = [], False
        PUT_OFF.pop(self.serial, None)

    def lose(self, made: dict[int, Tensor], error: BaseException) -> None:
        """A computation failed: what was made of the living values stays, the others have none."""
        with making_calls(self):
            for n, t in self.values.living():
                found = made.get(n)
                if type(t) is not DeferredTensor:
                    continue
                settle(t, Tensor(0, dtype=t.dtype).expand(t.shape) if found is None else found)
                if found is None:
                    engine().lose(t, f"a tensor of shape {t.shape} has no value: its computation failed with {error!r}")


class making_calls(as_given):
    """While the calls of a trace are made, calls are made as they come, and nobody else makes these."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __enter__(self) -> None:
        super().__enter__()
        self.inside, THREAD.is_inside, self.trace.is_busy = THREAD.is_inside, True, True

    def __exit__(self, *exc: object) -> None:
        THREAD.is_inside, self.trace.is_busy = self.inside, False
        super().__exit__(*exc)


def begin(tree: TraceTree) -> Trace:
    """A trace begins, this thread's from now on. (Another one goes on to stand for the values that somebody has.)"""
    if tree.is_of_another_world():
        tree.forget()
    THREAD.trace = Trace(tree)
    return THREAD.trace


def note_communication(since: int) -> None:
    """What ended a trace was made as it came, and before it this worker had entered `since` collectives."""
    ending, THREAD.ending = THREAD.ending, None
    communicates = engine().communicated() != since
    if ending is not None:
        ending.communicates = communicates
    if communicates:
        engine().note_loop()


def flush_writers(mine: Trace) -> None:
    """Makes calls that other threads have put off, and that write: what is built now reads what they write."""
    for trace in list(WRITING.values()) if WRITING else ():
        if trace is not mine and not trace.is_busy:
            trace.flush("another thread reads what they write")


def flush_others(mine: Trace) -> None:
    """Makes the calls that other threads have put off: they read what is there now."""
    for trace in list(PUT_OFF.values()) if len(PUT_OFF) > bool(mine.put_off) else ():
        if trace is not mine:
            trace.flush("another thread writes")


def flush_readers(t: Tensor) -> None:
    """`t` is about to be changed: calls that were put off, and read it or what shares its memory, are made now."""
    if not PUT_OFF:
        return
    changed = {id(x) for x in sharing(t)} | {id(t)}
    for trace in list(PUT_OFF.values()):
        if not trace.is_busy and not changed.isdisjoint(trace.external.numbers):
            trace.flush("what they read is changed")


class _ThreadTrace(local):
    """`trace`: of this thread."""

    def __init__(self) -> None:
        self.is_inside = False  # of a call that is being made
        self.ending: TraceEnding | None = None  # the last one, where its calls are made as they come
        self.trace = Trace(TraceTree())


THREAD = _ThreadTrace()
before_change.append(flush_readers)

__all__ = [
    "PUT_OFF",
    "THREAD",
    "WRITING",
    "Trace",
    "begin",
    "flush_others",
    "flush_readers",
    "flush_writers",
    "making_calls",
    "note_communication",
]
