"""TinyJit: capture the calls of a step once, then replay them with next to no Python.

The first call runs as it is (and lets state such as optimiser buffers come to be), the second is recorded, later ones
are replayed: inputs are read where they lie, or copied into the captured input buffers, runs of kernels go out as one
native call, and what the function returned is returned again, holding the new values. Arguments that do not fit what
was captured raise (`arguments.py`). With `warmup=0` the first call is recorded already, unless it makes state.

The captured input buffers are the capture's own, so that the caller may free or overwrite what it passed; an input that
the function writes is written back. A replay reads an input in place (`Input.moves`) where only native calls read it,
nothing that they write lies in its memory, and nothing that outlives the call was made of it. Assignments from outside
that are still pending run before the step, not as a part of it (those of another thread are that thread's to realize).
Recording holds the front end's lock: other threads wait until it ends.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from manygrad.native.replay import STOPPED, Replay
from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.current import current
from manygrad.runtime.devices.numbers import Variables
from manygrad.runtime.engine.linear import Recording, capture
from manygrad.runtime.executors.items import ExecItem, GraphItem, KernelItem, Vars, run_items
from manygrad.runtime.jit.arguments import (
    Input,
    JitError,
    binds,
    binds_of,
    bound_values,
    check_constants,
    check_inputs,
    check_numbers,
    cut_of,
    listed,
    refuse_shared_memory,
    signature,
    unbound,
    walk,
    with_dims,
)
from manygrad.runtime.jit.native_replay import prepared
from manygrad.runtime.profile import profile
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.runtime.storage import STORAGE, storage
from manygrad.tensor.engine import engine
from manygrad.tensor.environment import DEBUG, JIT, VALIDATE_WITH_CPU
from manygrad.tensor.lock import LOCK
from manygrad.tensor.standin import part
from manygrad.tensor.storage import LIVE, PENDING, TensorSet, assignments, is_stored
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp, standing_on
from manygrad.tensor.uop.views import memory

T = TypeVar("T")
_made: weakref.WeakSet[TinyJit[Any]] = weakref.WeakSet()


def forget_captures() -> None:
    """Of all TinyJits: what they have captured cannot be replayed any more."""
    for jit in list(_made):
        jit.reset()


def _buffers(t: Tensor) -> list[Buffer]:
    return _buffers_of(t.uop)


def _buffers_of(u: UOp) -> list[Buffer]:
    found = storage(u)
    return [found] if isinstance(found, Buffer) else [b for b in found if b is not None]


def _memory(b: Buffer) -> Buffer:
    return b if b.base is None else b.base


def _stored(t: Tensor) -> Tensor:
    """`t` computed, as a whole buffer: itself, or a copy of a view."""
    if t.uop.op is not Ops.BUFFER:
        t.realize()
    return t if t.uop.op is Ops.BUFFER else t.clone().realize()


def _replaced(x: Any, by: dict[int, Tensor]) -> Any:
    """A result with tensors replaced by identity."""
    if isinstance(x, Tensor):
        return by.get(id(x), x)
    if isinstance(x, (list, tuple)):
        items = [_replaced(y, by) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return {k: _replaced(y, by) for k, y in x.items()} if isinstance(x, dict) else x


class TinyJit(Generic[T]):
    """`step = TinyJit(step)`, or as a decorator. Positional and keyword Tensors (also nested in lists, tuples, dicts)
    are inputs; bound variables may change their value from call to call; other arguments must stay as they were.

    Everything the function changes must be realized by it or be returned; returned tensors are realized. A tensor that
    is an argument of the call that is captured is that argument wherever the function uses it: state that the
    function has without being given it is not to be passed.

    `warmup`: how many calls run as they are before one is captured, 1 or 0. With 0 the first one is captured, for
    functions whose state is in memory already; where it turns out that the call made state (a tensor that it wrote,
    that is no result and lives on), it was a call that ran as it is, and the second one is captured.
    """

    def __init__(self, fn: Callable[..., T], warmup: int = 1):
        if warmup not in (0, 1):
            raise ValueError(f"TinyJit: warmup is 1 or 0, the calls that run as they are, not {warmup!r}")
        _made.add(self)
        self.fn, self.warmup = fn, warmup
        self.calls = 1 - warmup
        self.items: list[ExecItem] = []
        self.inputs: list[Input] = []
        self.writes = False  # the function assigns inputs
        self.symbolic = False  # inputs have symbolic dims
        self.rebound: list[Tensor] = []  # results that have
        self.assigned: TensorSet | None = TensorSet() if warmup else None  # by the first call, if there was one
        self.constants: list[tuple[str, Any]] = []
        self.variables: frozenset[UOp] = frozenset()
        self.numbers: list[tuple[str, UOp]] = []  # arguments made of them
        self.result: Any = None
        # what the last replay read in place, if its arguments were tensors, all of them read so, and nothing else
        self.last: list[weakref.ref[UOp]] | None = None
        self.replay: Replay | None = None
        self.again: Replay | None = None  # the same, where it is prepared for what `last` says

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        """As a decorator of methods: one capture per instance."""
        if obj is None:
            return self
        name = f"_jit_{self.fn.__name__}"
        if name not in obj.__dict__:
            obj.__dict__[name] = TinyJit(self.fn.__get__(obj), self.warmup)
        return obj.__dict__[name]

    def __del__(self, live: TensorSet = LIVE) -> None:
        live.forget(self)

    def reset(self) -> None:
        """Forget the capture."""
        LIVE.forget(self)
        self.__init__(self.fn, self.warmup)  # type: ignore[misc]

    @property
    def captured(self) -> bool:
        return self.calls >= 2

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        again = self.again
        if again is not None and not kwargs:
            with LOCK:
                if done := again.call(*args):
                    if done == STOPPED:
                        self._go_on()
                    return cast(T, self.result)
        GlobalCounters.steps += 1
        if not profile.active:
            if not self.calls:
                return self._call(args, kwargs)  # runs as it is
            with LOCK:
                return self._run_again() if self._repeats(args, kwargs) else self._call(args, kwargs)
        start = time.perf_counter()
        try:
            with LOCK:
                return self._call(args, kwargs)
        finally:
            profile.record(
                "steps", f"{getattr(self.fn, '__name__', 'step')} {GlobalCounters.steps}", start, time.perf_counter()
            )

    def _repeats(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are the memory that the last replay read: then what a replay checks is as it was."""
        last = self.last
        if last is None or len(args) != len(last) or kwargs or len(PENDING) or capture or not JIT:
            return False
        for a, seen in zip(args, last):
            if not isinstance(a, Tensor) or a.uop is not seen():
                return False
        return True

    def _run_again(self) -> T:
        self.items[0].wake()
        self._keep_old_values()
        run_items(self.items, self.vars)
        if self.again is None or not self.again.holds():
            assert self.last is not None
            self.again = self.replay = prepared(self, self.last)
        return cast(T, self.result)

    def _go_on(self) -> None:
        """After a native call that stopped before its end."""
        (item,) = self.items
        try:
            item.go_on(self.vars)
        except BaseException:
            current().communication.drain()
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        if not JIT:
            return self._run_plain(args, kwargs)
        if capture and self.calls:
            raise JitError(
                "a TinyJit is called while another one is recording; call it outside, or leave the inner one out"
            )
        if self.items:
            self.items[0].wake()
        tensors: list[tuple[str, Tensor]] = []
        variables: list[tuple[str, UOp]] = []
        constants: list[tuple[str, Any]] = []
        walk(args, "argument", tensors, variables, constants)
        if kwargs:
            walk(kwargs, "argument", tensors, variables, constants)
        given = [b for _, v in variables for b in binds_of(v)]
        if self.symbolic or self.calls < 2:
            given += [b for _, t in tensors for b in binds(t)]
        bound = bound_values(given) if given else {}
        var_vals = {v.arg.name: value for v, value in bound.items()}
        outside = [*PENDING.mine(), *[t for _, t in tensors if t.uop.op is not Ops.BUFFER]]
        if outside:
            outside[0].realize(*outside[1:])
        if self.calls == 0:
            self.calls = 1
            current().devices.trim()  # here preparations end: it needs none of what they left
            state = {id(t): (t, t.uop) for t in LIVE if not is_stored(t.uop)}
            with assignments() as assigned:
                out = self._run_plain(args, kwargs)
            self.assigned = assigned
            again = {id(t) for t in assigned}
            written = [t for t, before in state.values() if t.uop is not before or id(t) in again]
            changed = [t for t in written if not is_stored(t.uop)]
            if changed:  # state that was not in memory yet: from now on a write to it is a part of the step
                changed[0].realize(*changed[1:])
            return out
        if self.calls == 1:
            is_first = self.assigned is None
            self._compute_what_reads_state()
            out = self._capture(args, kwargs, tensors, constants, var_vals, is_first)
            self.variables = frozenset(bound)
            self.numbers = [(path, unbound(u)) for path, u in variables]
            return out
        self.last = self.again = None  # (also where it fails)
        if bound.keys() != self.variables:
            raise JitError(
                f"captured with the variables {listed(self.variables)}, called with {listed(bound)}; "
                "pass the same ones, or make a second TinyJit"
            )
        out = self._replay(tensors, constants, variables, var_vals)
        plain = len(tensors) == len(args) and not (kwargs or self.variables or self.writes or self.symbolic)
        in_place = plain and all(i.twin is None and i.in_place for i in self.inputs)
        self.last = [weakref.ref(t.uop) for _, t in tensors] if in_place else None
        return out

    def _compute_what_reads_state(self) -> None:
        """Lazy values from before, of what the function overwrites, are computed before it is recorded: they keep the
        value of their time, while what the function itself computes of its state, by an equal graph perhaps, is
        computed in each replay."""
        is_known = self.assigned is not None  # without a call before it is not
        state = set() if self.assigned is None else {memory(t.uop) for t in self.assigned}
        if is_known:
            self.assigned = TensorSet()
        lazy = [t for t in LIVE if not is_stored(t.uop)]
        readers = standing_on([t.uop for t in lazy], lambda u: u in state if is_known else u.op is Ops.BUFFER)
        early = [t for t in lazy if t.uop in readers]
        if early:
            with suppress(Exception):  # (what cannot be computed is lost where it is overwritten)
                early[0].realize(*early[1:])

    def _run_plain(self, args: Any, kwargs: Any) -> T:
        out = self.fn(*args, **kwargs)
        self._realize(out)
        return out

    def _realize(self, out: Any) -> None:
        found: list[tuple[str, Tensor]] = []
        walk(out, "result", found, [], [])
        pending = PENDING.mine()
        tensors = [t for _, t in found] + pending
        if tensors:
            tensors[0].realize(*tensors[1:])

    def _capture(
        self,
        args: Any,
        kwargs: Any,
        tensors: list[tuple[str, Tensor]],
        constants: list[tuple[str, Any]],
        var_vals: dict[str, int],
        is_first: bool,
    ) -> T:
        known = {memory(t.uop) for t in LIVE if is_stored(t.uop)} if is_first else set()
        recording = Recording(t for t in LIVE if not is_stored(t.uop))
        recorded = recording.taken
        inputs: list[Input] = []
        join = part(t for _, t in tensors)
        before = {id(t): t.uop for _, t in tensors}
        first: dict[int, int] = {}
        try:
            for path, t in tensors:
                twin = first.get(id(t))
                own = inputs[twin].own if twin is not None else _stored(t).clone().realize()
                kind = None if binds(t) else (t.shape, t.dtype, t.device, cut_of(t))
                inputs.append(Input(path, signature(t), own, kind, twin))
                first.setdefault(id(t), len(inputs) - 1)
                t.uop = own.uop
            capture.append(recording)
            with assignments() as assigned:
                out = self.fn(*args, **kwargs)
                self._realize(out)
        finally:
            capture.clear()
            for _, t in tensors:
                t.uop = before[id(t)]
            join()
        self.overwritten = {_memory(b) for items, _ in recorded for item in items for b in item.written}
        written = {id(b) for b in self.overwritten}
        for i in inputs:
            i.written = i.twin is None and any(id(b) in written for b in _buffers(i.own))
        refuse_shared_memory(inputs, tensors)
        for i, (_, t) in zip(inputs, tensors):
            if i.written:
                t.assign(i.own).realize()
        if is_first and self._made_state(known, assigned, out, inputs):
            self.assigned = assigned
            lazy = [t for t in assigned if not is_stored(t.uop)]
            if lazy:
                lazy[0].realize(*lazy[1:])
            return out
        out = _replaced(out, {id(t): i.own for i, (_, t) in zip(inputs, tensors)})
        flat = _beside_each_other([(i, v) for items, v in recorded for i in items])
        if not flat:
            raise JitError("the function computed nothing that could be captured; realize or return what it makes")
        items = _joined(batch_kernels(flat, var_vals)) if JIT.value == 1 else [i for i, _ in flat]
        if DEBUG >= 1:
            print(f"JIT captured {len(flat)} calls as {len(items)}")
        results: list[tuple[str, Tensor]] = []
        walk(out, "result", results, [], [])
        for i in inputs:
            i.moves = _moves(i, items, [t for _, t in results])
        current().devices.trim()  # a replay needs none of what the calls before it left
        self.items, self.inputs, self.constants, self.result = items, inputs, constants, out
        self.writes = any(i.written for i in inputs)
        self.symbolic = any(binds(i.own) for i in inputs)
        self.rebound = [t for _, t in results if binds(t)]
        self.vars = {k: x for _, v in recorded for k, x in v.items()}
        self.occupied = _united(
            (_address(b), _address(b) + b.nbytes) for item, _ in flat for b in item.written if _address(b)
        )
        self.calls = 2  # (last: what fails before leaves no half of a capture)
        return out

    def _made_state(self, known: set[UOp], assigned: TensorSet, out: Any, inputs: list[Input]) -> bool:
        """Whether a tensor lives on in memory that is not `known` from before, and that a replay would write again, or
        was assigned: an optimiser's buffer, say, which a replay would begin with zeros each time."""
        if any(memory(t.uop) not in known for t in assigned if all(t is not i.own for i in inputs)):
            return True
        results: list[tuple[str, Tensor]] = []
        walk(out, "result", results, [], [])
        expected = {id(t) for _, t in results} | {id(i.own) for i in inputs}
        made = [t for t in LIVE if id(t) not in expected and is_stored(t.uop) and memory(t.uop) not in known]
        return any(self._overwrites(memory(t.uop)) for t in made)

    def _keep_old_values(self) -> None:
        """What was made lazily of the state or of a result (`total = total + step(x)`), and is not computed yet,
        must not see what is written now."""
        made = LIVE.newer(self)
        if not made:
            return
        lazy = [t for t in made if not is_stored(t.uop)]
        for t in [t for t in lazy if any(u.op is Ops.BUFFER and self._overwrites(u) for u in t.uop.toposort())]:
            try:
                t.realize()
            except Exception as e:  # it must not fail the step: whoever reads it gets the error
                engine().lose(
                    t,
                    f"a value of shape {t.shape} could not be computed when a TinyJit overwrote what it reads "
                    f"({type(e).__name__}: {e}), and is lost",
                )

    def _overwrites(self, u: UOp) -> bool:
        """Whether a replay writes to the memory of a BUFFER, if it has any (that of a lost value has not)."""
        return u in STORAGE and not self.overwritten.isdisjoint(map(_memory, _buffers_of(u)))

    def _replay(
        self,
        tensors: list[tuple[str, Tensor]],
        constants: list[tuple[str, Any]],
        numbers: list[tuple[str, UOp]],
        var_vals: dict[str, int],
    ) -> T:
        check_inputs(self.inputs, tensors)
        if constants or self.constants:
            check_constants(self.constants, constants)
        if numbers or self.numbers:
            check_numbers(self.numbers, numbers, var_vals)
        if self.writes:
            refuse_shared_memory(self.inputs, tensors)
            for i, (path, t) in zip(self.inputs, tensors):
                if i.written and self._overwrites(memory(t.uop)):
                    raise JitError(
                        f"{path} is assigned by the function, and lies where the function writes something else, a "
                        "result perhaps; pass a clone()"
                    )
        passed = [(i, t, _stored(t)) for i, (_, t) in zip(self.inputs, tensors) if i.twin is None]
        for i, t, stored in passed:
            self._pass(i, stored)
            i.in_place &= stored is t
        vars = {**self.vars, **var_vals} if var_vals else self.vars
        self._keep_old_values()
        run_items(self.items, vars)
        del passed  # (a copy of a view is read where it lies)
        for i, (_, t) in zip(self.inputs, tensors):
            if i.written:
                t.assign(i.own).realize()
        return (
            _replaced(self.result, {id(t): with_dims(t, var_vals) for t in self.rebound})
            if self.rebound
            else self.result
        )

    def _writes(self, b: Buffer) -> bool:
        """Whether the captured calls write where `b` lies."""
        begin = _address(b)
        if not begin:
            return True  # (not known where it lies)
        i = bisect(self.occupied, (begin + b.nbytes, 0))  # those before begin before `b` ends
        return i > 0 and self.occupied[i - 1][1] > begin

    def _pass(self, i: Input, t: Tensor) -> None:
        """Has the captured calls read `t`."""
        i.in_place = True
        for dst, src in zip(_buffers(i.own), _buffers(t)):
            if i.moves is not None:
                if i.at and _address(src) == i.at and dst is not src:  # it lies where the last one did
                    continue
                free = src.device is dst.device and not self._writes(src)
                for move in i.moves:
                    move((src if free else dst).handle)
                i.at = _address(src) if free else 0
                if free:
                    continue
            if dst is not src:
                i.in_place = False
                copy_buffer(dst, src)


def _address(b: Buffer) -> int:
    return getattr(b.handle, "address", 0) or 0


def _united(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same addresses as disjoint intervals, ascending."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _moves(i: Input, items: list[ExecItem], results: list[Tensor]) -> list[Callable[[Any], None]] | None:
    """What has each item read other memory in place of the input's own; None where one cannot, or where the input is a
    result, or a tensor was made of it that is still alive."""
    buffers = _buffers(i.own)
    kept = [*results, *(t for t in LIVE if t is not i.own)]
    if i.twin is not None or i.written or len(buffers) != 1 or any(i.own.uop in t.uop.toposort() for t in kept):
        return None
    readers = [item for item in items if any((b.base or b) is buffers[0] for b in item.buffers)]
    found = [item.mover(buffers[0]) for item in readers]
    return None if None in found else [move for move in found if move is not None]


def _beside_each_other(flat: list[tuple[ExecItem, Vars]]) -> list[tuple[ExecItem, Vars]]:
    """A step may have been recorded in several realizes, each of which waits for its collectives at its end; a replay
    need not."""
    if current().communication.endpoint is None:
        return flat
    from manygrad.runtime.executors.lanes import StartItem, in_order, overlapped

    of = {id(i.item if isinstance(i, StartItem) else i): v for i, v in flat}
    items = overlapped(in_order([i for i, _ in flat]))
    return [(i, of.get(id(i.item if isinstance(i, StartItem) else i), {})) for i in items]


def _joined(items: list[ExecItem]) -> list[ExecItem]:
    """With graphs and collectives as native calls, where there are other workers."""
    if current().communication.endpoint is None:
        return items
    from manygrad.runtime.executors.joined import joined

    return joined(items)


def batch_kernels(flat: list[tuple[ExecItem, Vars]], asked: Collection[str] = ()) -> list[ExecItem]:
    """Runs of kernels on one kind of device become graphs, a single one too: a graph reads inputs where they lie.
    `asked`: the variables whose values each replay gives."""
    out: list[ExecItem] = []
    run: list[KernelItem] = []
    vars: Vars = {}
    variables: dict[frozenset[tuple[str, int]], Variables] = {}

    def close() -> None:
        nonlocal run
        if run and not VALIDATE_WITH_CPU:
            known = variables.setdefault(frozenset(vars.items()), Variables(vars, asked))
            out.append(GraphItem(run, known))
        else:
            out.extend(run)
        run = []

    def fits(item: ExecItem) -> bool:
        return isinstance(item, KernelItem) and (
            item.buffers[0].device.queue.binds or set(item.names).isdisjoint(asked)
        )

    for item, v in flat:
        if not fits(item):
            close()
            out.append(item)
            continue
        assert isinstance(item, KernelItem)
        if run and not (item.buffers[0].device.kind == run[0].buffers[0].device.kind and dict(v) == dict(vars)):
            close()
        vars = v
        run.append(item)
    close()
    return out


__all__ = ["JitError", "TinyJit"]
