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
from threading import RLock, local
from typing import Any

from manygrad.tensor.deferred.arguments import External, UnknownArgument, Value, resolved, told
from manygrad.tensor.deferred.tensors import DeferredTensor, deferred, settle
from manygrad.tensor.deferred.tree import (
    MOST_BYTES,
    MOST_CAPTURES,
    MOST_NODES,
    Key,
    Spec,
    TraceEnding,
    TraceNode,
)
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.environment import overridden
from manygrad.tensor.grad_mode import is_grad_enabled, set_grad_enabled
from manygrad.tensor.lock import LOCK
from manygrad.tensor.ops.random import drawing_as, thread_of_draws
from manygrad.tensor.source import standing_at, user_line
from manygrad.tensor.storage import LIVE, MOVES, before_change, is_one_storage, sharing
from manygrad.tensor.tensor import Tensor, _training
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.views import memory, rebased

MOST_CALLS = 20_000  # are put off; then they are made
_serials = itertools.count(1)
# the traces that have put calls off, by serial
PUT_OFF: weakref.WeakValueDictionary[int, Trace] = weakref.WeakValueDictionary()
WRITING: weakref.WeakValueDictionary[int, Trace] = weakref.WeakValueDictionary()  # those that will write
TREES: weakref.WeakSet[TraceTree] = weakref.WeakSet()
OPTIMIZERS: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # each one's own number


class DeferredCall:
    """A call that is put off: what it calls, with what, in which modes, and the number of the first value it makes."""

    __slots__ = ("args", "first", "grad", "kwargs", "node", "training")

    def __init__(self, node: TraceNode, args: Sequence[Any], kwargs: dict[str, Any], first: int) -> None:
        self.node, self.args, self.kwargs, self.first = node, args, kwargs, first
        self.grad, self.training = is_grad_enabled(), _training.get()

    def gives(self) -> range:
        """Numbers of the values that it makes."""
        count = sum(type(r) is Spec for r in self.node.results)
        return range(self.first, self.first + count)

    def used(self) -> list[int]:
        """Numbers of the values among its arguments."""
        found: list[int] = []
        todo = [*self.args, *self.kwargs.values()]
        while todo:
            x = todo.pop()
            if type(x) is Value:
                found.append(x.number)
            elif type(x) in (tuple, list):
                todo += x
            elif type(x) is slice:
                todo += (x.start, x.stop, x.step)
        return found


class Read:
    """In the place among calls where values were read: they are stored from then on."""

    __slots__ = ("memories", "stored")

    def __init__(self, read: dict[int, Tensor]) -> None:
        """`read`: by number."""
        self.stored = {n: t.uop for n, t in read.items()}
        self.memories: dict[UOp, Tensor] = {}  # what they lie in, whole
        for t in read.values():
            base = memory(t.uop)
            if base.op is Ops.BUFFER and base not in self.memories:
                with set_grad_enabled(True):
                    self.memories[base] = t._new(base)

    def node(self, number: int) -> UOp:
        """Where this value lies; while calls are captured, in an input of the capture's own."""
        u = self.stored[number]
        found = self.memories.get(memory(u))
        return u if found is None else rebased(u, memory(u), found.uop)

    def used(self) -> list[int]:
        return list(self.stored)

    gives = used


class TraceTree:
    """What a thread's traces have been, and what was captured of them."""

    def __init__(self) -> None:
        TREES.add(self)
        self.root = TraceNode()
        self.nodes = 0
        # the last used one last; one goes with its node
        self.captures: weakref.WeakValueDictionary[int, TraceEnding] = weakref.WeakValueDictionary()

    def forget(self) -> None:
        self.root, self.nodes = TraceNode(), 0
        self.captures.clear()

    def note_use(self, ending: TraceEnding) -> None:
        """It stays, and others used longer ago go where all together hold too much memory."""
        captures = self.captures
        captures.pop(id(ending), None)
        if ending.replay is not None:
            captures[id(ending)] = ending
        while len(captures) > 1 and (len(captures) > MOST_CAPTURES or self.nbytes() > MOST_BYTES):
            captures.pop(next(iter(captures.keys()))).replay = None

    def nbytes(self) -> int:
        """Memory that the captures hold."""
        return sum(e.replay.nbytes for e in self.captures.values() if e.replay is not None)


class Trace:
    """A thread's calls since the last ending. Large: all that a thread has not computed yet."""

    def __init__(self, tree: TraceTree) -> None:
        self.tree = tree
        self.lock = RLock()  # held while `put_off` changes
        self.draws = thread_of_draws()
        self.serial = next(_serials)
        self.node = tree.root
        self.is_following = True  # all calls so far are put off
        self.is_off = False  # calls are made as they come, until the next ending
        self.put_off: list[DeferredCall | Read] = []
        self.external = External()
        self.values: list[weakref.ref[Tensor]] = []  # the tensor of each value
        self.storages: list[int] = []  # of each value, the first one that is one storage with it
        self.writes = False  # something that is put off
        self.leaves: list[Tensor] = []  # whose gradients are put off
        self.has_read = False  # values, and goes on
        self.is_busy = False  # making what was put off

    # *** calls ***

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`fn(*args, **kwargs)`, now or later."""
        if self.has_read and not any(self.has(x) for x in (*args, *kwargs.values())):
            return begin(self.tree).call(fn, args, kwargs)  # (something else: another step, say)
        external, serial = self.external, self.serial
        sig: list[Any] = [fn, is_grad_enabled(), _training.get(), dtypes.default_float]
        known = len(external.tensors)
        try:
            if overridden.get() is not None:
                raise UnknownArgument
            kept = [told(x, sig, serial, external) for x in args]
            named = kwargs
            if kwargs:
                named = {}
                for k, x in kwargs.items():
                    sig.append(k)
                    named[k] = told(x, sig, serial, external)
            key = tuple(sig)
            child = self.node.children.get(key)
        except (UnknownArgument, TypeError):  # (what has no hash)
            return self.refuse(fn, args, kwargs)
        if child is not None and child.is_followed and not child.is_plain and len(self.put_off) < MOST_CALLS:
            with self.lock:
                if self.is_following:
                    self._put_off(child, DeferredCall(child, kept, named, len(self.values)))
                    return self._promised(child, args)
        return self._make(fn, args, kwargs, key, known)

    def has(self, x: Any) -> bool:
        """Whether an argument is one of this trace's values."""
        if isinstance(x, Tensor):
            value = x.__dict__.get("_value")
            return value is not None and value[0] == self.serial
        return type(x) in (tuple, list) and any(map(self.has, x))

    def _put_off(self, child: TraceNode, call: DeferredCall) -> None:
        if not self.put_off:
            PUT_OFF[self.serial] = self
        self.node = child
        child.is_known = True
        self.put_off.append(call)
        if child.writes:
            self.writes = True
            WRITING[self.serial] = self

    def _promised(self, node: TraceNode, args: Sequence[Any]) -> Any:
        out = [args[r] if type(r) is int else self._promise(r) for r in node.results]
        if node.kind is None:
            return out[0]
        return node.kind(*out) if hasattr(node.kind, "_fields") else node.kind(out)

    def _promise(self, spec: Any) -> DeferredTensor:
        t = deferred(self, len(self.values), spec)
        self._number(t, spec)
        return t

    def _number(self, t: Tensor, spec: Spec) -> None:
        """`t` is the next value."""
        number = len(self.values)
        self.values.append(weakref.ref(t))
        self.storages.append(number if spec.storage < 0 else spec.storage)

    def refuse(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that cannot be put off; it and what follows, up to the next ending, are made as they come."""
        self.flush()
        self.is_off = True
        return fn(*args, **kwargs)

    def _make(self, fn: Any, args: Any, kwargs: Any, key: Key, known: int) -> Any:
        """A call that was not made here before, or comes after one that was not."""
        self.flush()
        self.is_following = False
        moves, computed = MOVES.count, MOVES.computed
        LIVE.newer(self)
        out = self._inside(fn, args, kwargs)
        child = self.node.children.get(key)
        is_new = child is None
        if child is not None:
            child.is_known = True
        else:
            child = self._grow(fn, key, known)
            child.describe(out, args, {id(t) for t in LIVE.newer(self)})
            if MOVES.computed != computed:  # what it gives may depend on values
                child.is_followed = False
            if MOVES.count != moves:
                child.writes = True
                self.external.note_written()
        LIVE.forget(self)
        made = [t for t, r in zip(out if child.kind else [out], child.results) if type(r) is Spec]
        self._go_to(child, made, is_new)
        return out

    def _go_to(self, child: TraceNode, made: list[Any], is_new: bool = False) -> None:
        """A call has been made, and gave these tensors. `is_new`: nobody made it here before."""
        self.node = child
        self.is_off = not child.is_followed
        if self.is_off:
            return
        specs = [r for r in child.results if type(r) is Spec]
        for t, spec in zip(made, specs, strict=True):
            if is_new and t._storage is not None:
                known = [n for n, x in self._living() if is_one_storage(t, x)]
                spec.storage = self.storages[known[0]] if known else -1
            t.__dict__["_value"] = (self.serial, len(self.values))
            self._number(t, spec)

    def _inside(self, fn: Any, args: Any, kwargs: Any) -> Any:
        before, THREAD.is_inside = THREAD.is_inside, True
        try:
            return fn(*args, **kwargs)
        finally:
            THREAD.is_inside = before

    def _grow(self, fn: Any, key: Key, known: int) -> TraceNode:
        """A new node below this one."""
        tree = self.tree
        tree.nodes -= self.node.make_room()
        if tree.nodes >= MOST_NODES:
            tree.root.children.clear()
            tree.nodes = 0
        tree.nodes += 1
        self.node.note_new()
        child = self.node.children[key] = TraceNode(self.node, fn, user_line())
        x = self.external
        child.hold(key, [(t, u) for t, u, s in zip(x.tensors[known:], x.nodes[known:], x.is_state[known:]) if s])
        return child

    # *** gradients ***

    def backward(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`backward()`, which makes the gradients of tensors from before."""
        if THREAD.is_inside or self.is_off:
            return fn(*args, **kwargs)
        loss = args[0]
        value = loss.__dict__.get("_value")
        if len(args) > 1 or kwargs or value is None or value[0] != self.serial or overridden.get() is not None:
            return self.refuse(fn, args, kwargs)
        key = (fn, is_grad_enabled(), value[1])
        child = self.node.children.get(key)
        if child is not None and child.is_followed and not child.is_plain:
            leaves = [self.external.tensors[i] for i in child.gradients]
            with self.lock:
                if self.is_following and not any(t._grad is not None or has_hooks(t) for t in leaves):
                    self._put_off(child, DeferredCall(child, [Value(value[1])], kwargs, len(self.values)))
                    for t, spec in zip(leaves, child.results):
                        t._grad = self._promise(spec)
                    self.leaves += leaves
                    return loss
        return self._make_backward(fn, loss, key)

    def _make_backward(self, fn: Any, loss: Tensor, key: Key) -> Any:
        self.flush()
        self.is_following = False
        before = {id(t): (t, t._grad) for t in LIVE if t._requires_grad or t._retains or t._grad is not None}
        moves = MOVES.count
        out = self._inside(fn, (loss,), {})
        child = self.node.children.get(key)
        if child is not None and any(before[id(self.external.tensors[i])][1] is not None for i in child.gradients):
            self.is_off = True  # (gradients were added up that were not there when the node was made)
            return out
        if child is None:
            child = self._grow(fn, key, len(self.external.tensors))
            new = [t for t, g in before.values() if t._grad is not g]
            numbers = [self.external.numbers.get(id(t), -1) for t in new]
            specs = [None if t._grad is None else Spec.of(t._grad) for t in new]
            plain = not any(has_hooks(t) for t, _ in before.values()) and MOVES.count == moves
            is_first = all(before[id(t)][1] is None for t in new)
            child.is_followed = bool(new) and plain and is_first and -1 not in numbers and None not in specs
            if child.is_followed:
                child.gradients, child.results = tuple(numbers), [s for s in specs if s is not None]
        leaves = [self.external.tensors[i] for i in child.gradients]
        self._go_to(child, [t._grad for t in leaves])
        return out

    def set_gradient(self, fn: Callable[..., Tensor], t: Tensor, value: Tensor | None) -> Tensor:
        """`t.grad = value`: a call, where both are values of this trace."""
        if self.has(t._grad) and self.has(value) and not self.is_off:
            self.call(fn, (t, value), {})
            t._grad = value
            return t
        for g in (t._grad, value):  # (one that is put off is made first, or that would set it later)
            _ = None if g is None else g.uop
        return fn(t, value)

    def _drop_gradients(self) -> None:
        """Gradients that are put off are not there for the calls that make them."""
        for t in self.leaves:
            t._grad = None
        self.leaves = []

    # *** making what was put off ***

    def flush(self) -> None:
        """Makes all calls that were put off."""
        if not self.put_off:
            return
        with LOCK, self.lock:
            if self.is_busy or not self.put_off:
                return
            self.is_following = False
            self._check()
            self._drop_gradients()
            values: dict[int, Tensor] = {}
            inside, THREAD.is_inside, self.is_busy = THREAD.is_inside, True, True
            try:
                with drawing_as(self.draws):
                    self._make_all(self.put_off, values, is_settled=True)
            except BaseException as error:
                self._lose(self._living(), values, error)
                raise
            finally:
                THREAD.is_inside, self.is_busy = inside, False
                self._is_done()

    def _needed(self, targets: Sequence[int]) -> list[DeferredCall | Read]:
        """The calls that these values stand on."""
        needed, found = set(targets), set()
        for i, call in reversed(list(enumerate(self.put_off))):
            if type(call) is DeferredCall and not needed.isdisjoint(call.gives()):
                found.add(i)
                needed.update(call.used())
        return [
            call
            for i, call in enumerate(self.put_off)
            if i in found or (type(call) is Read and not needed.isdisjoint(call.stored))
        ]

    def _make_all(
        self, calls: list[DeferredCall | Read], values: dict[int, Tensor], is_settled: bool, wanted: Sequence[int] = ()
    ) -> None:
        """Makes the calls. A value goes with its last use, if it is not wanted: as a program's own do."""
        last = {n: i for i, call in enumerate(calls) for n in call.used()}
        for i, call in enumerate(calls):
            if type(call) is Read:
                others = list({id(t): t for t in (*values.values(), *(self._made() if is_settled else ()))}.values())
                read = [n for n in call.stored if n in values]
                engine().take_stored([(values[n], call.node(n)) for n in read], others)
                for n in read:
                    if last[n] <= i and n not in wanted:
                        del values[n]
                continue
            assert type(call) is DeferredCall
            made = self._run(call, values, is_settled)
            for n in {*call.used(), *made}:
                if last.get(n, i) <= i and n not in wanted:
                    del values[n]

    def _made(self) -> list[Tensor]:
        """The values that are made, and that somebody has."""
        return [t for _, t in self._living() if type(t) is Tensor]

    def _check(self) -> None:
        x = self.external
        if any(t.uop is not u for t, u in zip(x.tensors, x.nodes)):
            t = next(t for t, u in zip(x.tensors, x.nodes) if t.uop is not u)
            raise RuntimeError(
                f"a tensor of shape {t.shape} was changed while calls that read it were put off, in a way that was "
                "not noticed in time; this is a fault of manygrad, and FOLLOW=0 avoids it"
            )

    def _run(self, call: DeferredCall, values: dict[int, Tensor], is_settled: bool) -> list[int]:
        """Makes one call; gives the numbers of its results. `is_settled`: the tensors that stand for them become
        them."""
        node, number = call.node, call.first
        args = [resolved(x, values) for x in call.args]
        kwargs = {k: resolved(x, values) for k, x in call.kwargs.items()}
        token = _training.set(call.training)
        try:
            with set_grad_enabled(call.grad), standing_at(node.line):
                out = node.fn(*args, **kwargs)
        finally:
            _training.reset(token)
        if node.gradients:
            made = [self.external.tensors[i]._grad for i in node.gradients]
        else:
            made = [t for t, r in zip([out] if node.kind is None else out, node.results) if type(r) is Spec]
        for t in made:
            assert t is not None
            d = self.values[number]() if is_settled else None
            if d is not None:
                settle(d, t)
            values[number] = t if d is None else d
            number += 1
        return list(range(call.first, number))

    # *** endings ***

    def step(self, optimizer: Any, prepare: Callable[[], Any], step: Callable[[], Any], params: list[Tensor]) -> None:
        """A step of an optimiser, with all calls before it. `prepare`: what it does before its first step, and again
        where parameters were replaced since; that is not captured."""
        grads: list[Any] = []
        for p in params:
            g = p._grad
            if g is not None and not self.has(g):
                self.is_off = True
                break
            grads.append(None if g is None else g.__dict__["_value"][1])
        what = ("step", OPTIMIZERS.setdefault(optimizer, next(_serials)), *grads, *settings(optimizer))
        if not self._end(what, step, (), prepare):
            self._inside(step, (), {})

    def read(self, numbers: Sequence[int] = ()) -> None:
        """Values are about to be read: these, or, without numbers, of something else."""
        self._end(("read",), None, numbers)

    def _end(
        self,
        what: Key,
        step: Callable[[], Any] | None,
        targets: Sequence[int],
        prepare: Callable[[], Any] = lambda: None,
    ) -> bool:
        """Whether all that was put off is done now, up to what goes on after a read."""
        done = goes_on = False
        try:
            if not self.is_off and self.node is not self.tree.root and overridden.get() is None:
                with LOCK:
                    done, goes_on = self._finish(what, step, targets, prepare)
            if not done:
                self.flush()
        finally:
            if not goes_on:
                begin(self.tree)
        return done

    def _living(self) -> list[tuple[int, Tensor]]:
        """The values that somebody has, each with its number."""
        return [(n, t) for n, ref in enumerate(self.values) if (t := ref()) is not None]

    def _finish(
        self, what: Key, step: Callable[[], Any] | None, targets: Sequence[int], prepare: Callable[[], Any]
    ) -> tuple[bool, bool]:
        """(whether what was put off is done, whether the trace goes on after a read)"""
        if step is not None:
            if not any(k[:-1] == what and e.replay is not None for k, e in self.node.endings.items()):
                self._inside(prepare, (), {})  # (what it changes, and was put off to be read, is made before)
            self._drop_gradients()
        living = self._living()
        if targets:
            storages = {self.storages[n] for n in targets}
            targets = [n for n, _ in living if self.storages[n] in storages]
        others = [n for n, t in living if n not in targets]
        key = (*what, tuple(n for n, _ in living)) if step is not None else (*what, *targets)
        ending = self.node.endings.get(key)
        if ending is None:
            ending = self.node.endings[key] = TraceEnding()
            self.node.note_new()
        if not self.put_off or not self.is_following:
            return False, step is None and self._went_on(key, targets, others, ending)
        self._check()
        if step is None and ending.replay is None:  # (what is read must not write, nor make gradients)
            backward = any(type(c) is DeferredCall and c.node.gradients for c in self._needed(targets))
            ending.is_plain = self.writes or backward or not targets
        if ending.is_plain:
            self.node.note_plain()
        if ending.is_plain or (ending.replay is not None and not ending.replay.fits()):
            return False, False
        if (step is not None or self.writes) and self._shares_state(ending):
            return False, False
        wanted = list(targets) if step is None else [n for n, _ in living]
        out = self._computed(ending, step, wanted)
        self.tree.note_use(ending)
        if step is None and (others or ending.has_history):
            self._stay(key, dict(zip(targets, out)))
            return True, True
        for (_, t), now in zip([(n, t) for n, t in living if n in wanted], out):
            settle(t, now)
        self._is_done()
        return True, False

    def _is_done(self) -> None:
        """Nothing is put off any more."""
        self.put_off, self.writes = [], False
        PUT_OFF.pop(self.serial, None)
        WRITING.pop(self.serial, None)

    def _shares_state(self, ending: TraceEnding) -> bool:
        """Whether a value that may be another each time lies in the memory of state, which may be written meanwhile."""
        x = self.external
        if ending.state is None:
            ending.state = {id(memory(u)) for u, state in zip(x.nodes, x.is_state) if state}
        return any(id(memory(u)) in ending.state for u, state in zip(x.nodes, x.is_state) if not state)

    def _went_on(self, what: Key, targets: Sequence[int], others: list[int], ending: TraceEnding) -> bool:
        """Values are about to be read that were made as they came; whether the trace goes on: somebody has other ones,
        or may differentiate these."""
        if ending.has_history is None:
            found = [t for n in targets if (t := self.values[n]()) is not None]
            ending.has_history = any(t.requires_grad for t in found)
        if not (others or ending.has_history) or not targets:
            return False
        self._go_on(what)
        return True

    def _go_on(self, what: Key) -> None:
        child = self.node.children.get(what)
        if child is None:
            child = self.node.children[what] = TraceNode(self.node)
        self.node = child
        self.has_read = True

    def _stay(self, what: Key, stored: dict[int, Tensor]) -> None:
        """These values have been read; the others are put off still."""
        for n, t in stored.items():
            d = self.values[n]()
            if d is not None:
                d.__dict__["_stored"] = t
        self.put_off.append(Read(stored))
        self._go_on(what)

    def _computed(self, ending: TraceEnding, step: Callable[[], Any] | None, wanted: list[int]) -> list[Tensor]:
        """The values that are wanted, by a replay, or by a recording that can be replayed the next time."""
        if step is not None or self.writes:
            flush_others(self)
        inputs = self.external.inputs()
        inputs += [t for call in self.put_off if type(call) is Read for t in call.memories.values()]
        values: dict[int, Tensor] = {}
        gradients = [(t, t._grad) for t in self.leaves]  # (of a read: they are put off still)
        for t in self.leaves:
            t._grad = None
        inside, THREAD.is_inside, self.is_busy = THREAD.is_inside, True, True
        try:
            if ending.replay is not None:
                out = ending.replay.run(inputs)
                if step is not None:
                    engine().count_update()
                return out

            def run(*_: Tensor) -> list[Tensor]:
                self._make_all(self.put_off if step is not None else self._needed(wanted), values, False, wanted)
                if step is not None:
                    step()
                out = [values[n] for n in wanted]
                values.clear()
                return out

            out, ending.replay, ending.has_history = engine().capture_calls(
                run, inputs, self.external.state(), step is not None
            )
            ending.is_plain = ending.replay is None or (step is not None and ending.has_history)
            if ending.is_plain:
                ending.replay = None
            return out
        except BaseException as error:
            self._lose(self._living(), values, error)
            self._is_done()
            raise
        finally:
            THREAD.is_inside, self.is_busy = inside, False
            for t, g in gradients:
                t._grad = g

    def _lose(self, living: list[tuple[int, Tensor]], values: dict[int, Tensor], error: BaseException) -> None:
        """The computation failed: what was made of the living values stays, the others have none."""
        for n, t in living:
            made = values.get(n)
            if type(t) is not DeferredTensor:
                continue
            settle(t, Tensor(0, dtype=t.dtype).expand(t.shape) if made is None else made)
            if made is None:
                engine().lose(t, f"a tensor of shape {t.shape} has no value: its computation failed with {error!r}")


def begin(tree: TraceTree) -> Trace:
    """A trace begins, this thread's from now on. (Another one goes on to stand for the values that somebody has.)"""
    trace = THREAD.trace = Trace(tree)
    if engine().workers()[1] > 1:
        trace.is_off = True
    return trace


def has_hooks(t: Tensor) -> bool:
    """Whether backward() calls functions of the user's for it."""
    return bool(t._hooks or t._accumulated_hooks or t._retains)


def settings(optimizer: Any) -> list[Any]:
    """What a step of an optimiser depends on besides tensors."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found.append(len(group["params"]))
        found += [(k, str(v)) for k, v in group.items() if k != "params" and k not in group.variable]
    return found


def flush_writers(mine: Trace) -> None:
    """Makes calls that other threads have put off, and that write: what is built now reads what they write."""
    for trace in list(WRITING.values()):
        if trace is not mine and not trace.is_busy:
            trace.flush()


def flush_others(mine: Trace) -> None:
    """Makes the calls that other threads have put off: they read what is there now."""
    for trace in list(PUT_OFF.values()) if len(PUT_OFF) > 1 else ():
        if trace is not mine:
            trace.flush()


def flush_readers(t: Tensor) -> None:
    """`t` is about to be changed: calls that were put off, and read it or what shares its memory, are made now."""
    if not PUT_OFF:
        return
    changed = {id(x) for x in sharing(t)} | {id(t)}
    for trace in list(PUT_OFF.values()):
        if not trace.is_busy and not changed.isdisjoint(trace.external.numbers):
            trace.flush()


class _ThreadTrace(local):
    """`trace`: of this thread."""

    def __init__(self) -> None:
        self.is_inside = False  # of a call that is being made
        self.trace = Trace(TraceTree())


THREAD = _ThreadTrace()
before_change.append(flush_readers)

__all__ = ["PUT_OFF", "THREAD", "WRITING", "Trace", "flush_others", "flush_readers", "flush_writers"]
