"""TinyJit: capture the calls of a step once, then replay them with next to no Python.

The first call runs as it is (and lets state such as optimiser buffers come to be), the second is recorded, later ones
are replayed: inputs are read where they lie, or copied into the captured input buffers, runs of kernels go out as one
native call, and what the function returned is returned again, holding the new values. Guards raise when inputs change
shape, dtype, device or where they are cut.

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
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

from manygrad.native.replay import STOPPED, Replay
from manygrad.runtime import profile
from manygrad.runtime.again import prepared
from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.counters import GlobalCounters
from manygrad.runtime.current import current
from manygrad.runtime.devices.numbers import Variables
from manygrad.runtime.items import ExecItem, GraphItem, KernelItem, Vars, run_items
from manygrad.runtime.linear import Recording, capture
from manygrad.runtime.storage import STORAGE, storage
from manygrad.tensor.engine import engine
from manygrad.tensor.environment import DEBUG, JIT, VALIDATE_WITH_CPU
from manygrad.tensor.lock import LOCK
from manygrad.tensor.standin import part
from manygrad.tensor.storage import LIVE, PENDING, TensorSet, assignments, is_stored
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import BufferSpec, Ops, UOp, standing_on
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.show import text_of_index
from manygrad.tensor.uop.symbolic import evaluate
from manygrad.tensor.uop.views import memory

T = TypeVar("T")


class JitError(RuntimeError):
    """Inputs that do not fit what was captured."""


def _walk(
    x: Any,
    path: str,
    found: list[tuple[str, Tensor]],
    variables: list[tuple[str, UOp]],
    constants: list[tuple[str, Any]],
) -> None:
    if isinstance(x, Tensor):
        found.append((path, x))
    elif isinstance(x, UOp):
        variables.append((path, x))
    elif isinstance(x, (list, tuple)):
        for i, y in enumerate(x):
            _walk(y, f"{path}[{i}]", found, variables, constants)
    elif isinstance(x, dict):
        for k in sorted(x, key=str):  # (in whichever order they are given)
            _walk(x[k], f"{path}[{k!r}]", found, variables, constants)
    elif isinstance(x, np.ndarray):
        raise JitError(f"{path} is a NumPy array: its values would become a part of the capture; pass a Tensor")
    else:
        constants.append((path, x))


def _same(a: Any, b: Any) -> bool:
    """Whether a captured argument that is no tensor is still what it was: an equal number or text,
    or the same object."""
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bytes, np.generic)) and bool(a == b))


def _signature(t: Tensor) -> tuple[Any, ...]:
    return (tuple(d if isinstance(d, int) else str(d) for d in t.shape), t.dtype.name, t.device, _cut(t))


def _cut(t: Tensor) -> tuple[int | None, tuple[int, ...]] | None:
    """Of a tensor on several devices: the dim that is cut, and where."""
    if not isinstance(t.device, tuple):
        return None
    spec = t.uop.arg
    return (spec.axis, spec.bounds) if isinstance(spec, BufferSpec) else engine().store_spec(t.uop)


def _text(shape: Any, dtype: str, device: Any, cut: tuple[int | None, tuple[int, ...]] | None) -> str:
    axis, bounds = cut or (None, ())
    if axis is not None:
        where = f", cut along axis {axis} at {', '.join(map(str, bounds[1:-1]))}"
    else:
        where = "" if cut is None else ", a copy on each"
    return f"{shape} {dtype} on {device}{where}"


def _binds(t: Tensor) -> list[UOp]:
    """The variables with their values in the shape of `t`."""
    return [u for d in t.shape if isinstance(d, UOp) for u in _binds_of(d)]


def _binds_of(u: UOp) -> list[UOp]:
    """The variables with their values in a size or an index."""
    return [u] if u.op is Ops.BIND else [x for x in u.toposort() if x.op is Ops.BIND]


def _unbound(u: UOp) -> UOp:
    return u.src[0] if u.op is Ops.BIND else substitute(u, {b: b.src[0] for b in _binds_of(u)})


def _bound_values(binds: Iterable[UOp]) -> dict[UOp, int]:
    """The value of each variable."""
    found: dict[UOp, int] = {}
    for b in binds:
        variable, value = b.src[0], b.src[1].arg
        if found.setdefault(variable, value) != value:
            raise JitError(
                f"the variable {variable.arg.name!r} is bound to {found[variable]} and to {value} in one call; "
                "give them two names"
            )
    return found


def _listed(variables: Iterable[UOp]) -> str:
    return ", ".join(sorted(f"{v.arg.name} ({v.arg.min} to {v.arg.max})" for v in variables)) or "none"


def _with_dims(t: Tensor, values: dict[str, int]) -> Tensor:
    """A stored tensor, its symbolic dims at other values."""
    old = t.uop.arg
    now = {
        u: UOp(Ops.BIND, u.dtype, (u.src[0], u.src[1].replace(arg=values.get(u.src[0].arg.name, u.src[1].arg))))
        for u in _binds(t)
    }
    shape = tuple(substitute(d, now) if isinstance(d, UOp) else d for d in old.shape)
    u = UOp(Ops.BUFFER, t.dtype, (), BufferSpec(old.uid, shape, old.dtype, old.device, old.axis, old.bounds))
    STORAGE[u] = storage(t.uop)
    return t._new(u)


def _refuse_shared_memory(inputs: list[Input], tensors: list[tuple[str, Tensor]]) -> None:
    """An input that is written must not be another one's memory, too: each is captured on its own."""
    for i, (_, t) in zip(inputs, tensors):
        for j, (_, x) in zip(inputs, tensors) if i.written else ():
            if j is not i and (j.twin is None or inputs[j.twin] is not i) and memory(x.uop) is memory(t.uop):
                raise JitError(
                    f"{i.path} is assigned by the function, and {j.path} is the same memory; "
                    "pass a clone() of one of them"
                )


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


@dataclass
class Input:
    """One tensor argument of a capture. `twin`: the earlier argument that was the same tensor;
    `written`: the function assigns it."""

    path: str
    signature: tuple[Any, ...]
    own: Tensor
    kind: tuple[Any, ...] | None = None  # shape, dtype, device and cut, where no dim is symbolic
    twin: int | None = None
    written: bool = False
    moves: list[Callable[[Any], None]] | None = None  # of the graphs that read it; None: it has to be copied
    at: int = 0  # the address that these read; 0: not known
    in_place: bool = False  # the last call's was read where it lies, and was no copy of a view


class TinyJit(Generic[T]):
    """`step = TinyJit(step)`, or as a decorator. Positional and keyword Tensors (also nested in lists, tuples, dicts)
    are inputs; bound variables may change their value from call to call; other arguments must stay as they were.

    Everything the function changes must be realized by it or be returned; returned tensors are realized. A tensor that
    is an argument of the second call, which is captured, is that argument wherever the function uses it: state that the
    function has without being given it is not to be passed.
    """

    def __init__(self, fn: Callable[..., T]):
        self.fn = fn
        self.calls = 0
        self.items: list[ExecItem] = []
        self.inputs: list[Input] = []
        self.writes = False  # the function assigns inputs
        self.symbolic = False  # inputs have symbolic dims
        self.rebound: list[Tensor] = []  # results that have
        self.assigned = TensorSet()  # by the first call
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
            obj.__dict__[name] = TinyJit(self.fn.__get__(obj))
        return obj.__dict__[name]

    def __del__(self, live: TensorSet = LIVE) -> None:
        live.forget(self)

    def reset(self) -> None:
        """Forget the capture."""
        LIVE.forget(self)
        self.__init__(self.fn)  # type: ignore[misc]

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
        _walk(args, "argument", tensors, variables, constants)
        if kwargs:
            _walk(kwargs, "argument", tensors, variables, constants)
        binds = [b for _, v in variables for b in _binds_of(v)]
        if self.symbolic or self.calls < 2:
            binds += [b for _, t in tensors for b in _binds(t)]
        bound = _bound_values(binds) if binds else {}
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
            self._compute_what_reads_state()
            out = self._capture(args, kwargs, tensors, constants, var_vals)
            self.variables = frozenset(bound)
            self.numbers = [(path, _unbound(u)) for path, u in variables]
            return out
        self.last = self.again = None  # (also where it fails)
        if bound.keys() != self.variables:
            raise JitError(
                f"captured with the variables {_listed(self.variables)}, called with {_listed(bound)}; "
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
        state = {memory(t.uop) for t in self.assigned}
        self.assigned = TensorSet()
        lazy = [t for t in LIVE if not is_stored(t.uop)]
        readers = standing_on([t.uop for t in lazy], state.__contains__)
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
        _walk(out, "result", found, [], [])
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
    ) -> T:
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
                kind = None if _binds(t) else (t.shape, t.dtype, t.device, _cut(t))
                inputs.append(Input(path, _signature(t), own, kind, twin))
                first.setdefault(id(t), len(inputs) - 1)
                t.uop = own.uop
            capture.append(recording)
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
        _refuse_shared_memory(inputs, tensors)
        for i, (_, t) in zip(inputs, tensors):
            if i.written:
                t.assign(i.own).realize()
        out = _replaced(out, {id(t): i.own for i, (_, t) in zip(inputs, tensors)})
        flat = _beside_each_other([(i, v) for items, v in recorded for i in items])
        if not flat:
            raise JitError("the function computed nothing that could be captured; realize or return what it makes")
        items = _joined(batch_kernels(flat, var_vals)) if JIT.value == 1 else [i for i, _ in flat]
        if DEBUG >= 1:
            print(f"JIT captured {len(flat)} calls as {len(items)}")
        results: list[tuple[str, Tensor]] = []
        _walk(out, "result", results, [], [])
        for i in inputs:
            i.moves = _moves(i, items, [t for _, t in results])
        current().devices.trim()  # a replay needs none of what the calls before it left
        self.items, self.inputs, self.constants, self.result = items, inputs, constants, out
        self.writes = any(i.written for i in inputs)
        self.symbolic = any(_binds(i.own) for i in inputs)
        self.rebound = [t for _, t in results if _binds(t)]
        self.vars = {k: x for _, v in recorded for k, x in v.items()}
        self.occupied = _united(
            (_address(b), _address(b) + b.nbytes) for item, _ in flat for b in item.written if _address(b)
        )
        self.calls = 2  # (last: what fails before leaves no half of a capture)
        return out

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
        if len(tensors) != len(self.inputs):
            raise JitError(
                f"captured with {len(self.inputs)} input tensors, called with {len(tensors)}; "
                "make a second TinyJit for it"
            )
        if constants or self.constants:
            self._check_constants(constants)
        if numbers or self.numbers:
            self._check_numbers(numbers, var_vals)
        for i, (path, t) in zip(self.inputs, tensors):
            if path != i.path:
                raise JitError(
                    f"captured with a tensor as {i.path}, called with one as {path}; "
                    "pass the arguments in the same way, or make a second TinyJit"
                )
            if (t.shape, t.dtype, t.device, _cut(t)) != i.kind and _signature(t) != i.signature:
                was, now = _text(*i.signature), _text(*_signature(t))
                raise JitError(
                    f"{i.path} was captured as shape {was}, now it is {now}; pass the same kind of input, "
                    "or make a second TinyJit"
                )
            if i.twin is not None and t.uop is not tensors[i.twin][1].uop:
                raise JitError(
                    f"{i.path} and {self.inputs[i.twin].path} were one tensor at capture, now they are two; "
                    "make a second TinyJit for it"
                )
        if self.writes:
            _refuse_shared_memory(self.inputs, tensors)
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
            _replaced(self.result, {id(t): _with_dims(t, var_vals) for t in self.rebound})
            if self.rebound
            else self.result
        )

    def _check_constants(self, constants: list[tuple[str, Any]]) -> None:
        changed = [
            f"{p} from {a!r} to {b!r}" for (p, a), (q, b) in zip(self.constants, constants) if p != q or not _same(a, b)
        ]
        if changed or len(constants) != len(self.constants):
            raise JitError(
                f"an argument that is not a tensor changed since capture: {', '.join(changed) or constants}; "
                "its value is part of the capture: pass a Tensor or a bound Variable, or reset()"
            )

    def _check_numbers(self, now: list[tuple[str, UOp]], values: dict[str, int]) -> None:
        """A replay has the variables' new values, and what was captured makes its arguments of them."""
        if len(now) != len(self.numbers):
            raise JitError(
                f"captured with {len(self.numbers)} arguments made of variables, called with {len(now)}; "
                "make a second TinyJit for it"
            )
        for (p, a), (q, b) in zip(self.numbers, now):
            same = (b.op is Ops.BIND and b.src[0] is a) or evaluate(a, values) == evaluate(b, {})
            if p != q or not same:
                raise JitError(
                    f"{p} was captured as {text_of_index(a)}, now {q} is {text_of_index(b)}: "
                    "make it of the same variables in the same way, or make a second TinyJit"
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
    from manygrad.runtime.lanes import StartItem, in_order, overlapped

    of = {id(i.item if isinstance(i, StartItem) else i): v for i, v in flat}
    items = overlapped(in_order([i for i, _ in flat]))
    return [(i, of.get(id(i.item if isinstance(i, StartItem) else i), {})) for i in items]


def _joined(items: list[ExecItem]) -> list[ExecItem]:
    """With graphs and collectives as native calls, where there are other workers."""
    if current().communication.endpoint is None:
        return items
    from manygrad.runtime.joined import joined

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
