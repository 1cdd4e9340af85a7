"""`@function`: a graph that is traced once and scheduled once, however often it is called.

    @function
    def block(x, w):
        return (x @ w).relu() + x

The first call with arguments of given shapes, types and places records the graph of the results over PARAMs, the body.
Each call is then one FUNCTION node over the actual arguments, with a RESULT node for each result:

    FUNCTION(args; body = SINK(results over PARAMs));  RESULT(FUNCTION; i)

Its gradient is a FUNCTION too. When the graph is run, each body is lowered once (`runtime/engine/functions.py`), and
the arguments and results are stored: a call is a fusion boundary. Where an argument requires a gradient the body has
more results than the user sees: the reductions (matmuls, sums) that its gradient reads, so that they are not computed
again.

A body takes its arguments for apart from each other and from what is outside. Where the function writes to one of which
another argument, or a tensor that it refers to, is a view (`w` and `w[0]`), that call runs as it is written.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from manygrad.errors import JitError
from manygrad.tensor import grad_mode
from manygrad.tensor.autocast import autocast_dtype
from manygrad.tensor.deferred.thread import at_once
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.gradient import NoGradient, flow_back
from manygrad.tensor.guards import NUMBERS, Guards
from manygrad.tensor.lock import locked
from manygrad.tensor.source import user_line
from manygrad.tensor.standin import part
from manygrad.tensor.storage import LIVE, MEMORY, PENDING, assignments, is_stored, memory, place, start
from manygrad.tensor.stored import LOST, ORIGIN
from manygrad.tensor.structure import tensors_in, tensors_out
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import BufferSpec, Ops, UOp, standing_on
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import attached
from manygrad.tensor.uop.table import Table
from manygrad.tensor.uop.views import rebased

Spec = tuple[Any, ...]
_traced = itertools.count(1)  # what is a PARAM in any trace
TRACING: list[str] = []  # names of the functions that are being traced, the innermost one last
# what a gradient reads rather than computes again
COMPUTED = frozenset({Ops.REDUCE, Ops.SCATTER, Ops.RESULT, Ops.CONTIGUOUS})


class function:
    """As a decorator of functions or methods. Tensors are found in arguments, also inside lists, tuples, dicts and
    objects (a layer and its weights), and in what the function refers to from outside; everything else is part of the
    trace, and a change of it (a number in an argument, the closure, a global, an attribute) makes a new one. What the
    function assigns to a tensor is assigned at every call. Values are not there while it is traced: `item()` and `if`
    of a tensor inside raise JitError."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.traces: dict[Any, list[_Trace]] = {}
        self.guards: Guards | None = None
        self.numbers: tuple[Any, ...] = ()  # that the function reads besides its arguments
        self.changing: set[str] = set()  # and those that it changes itself

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else lambda *args, **kwargs: self(obj, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with at_once():
            return self._call(args, kwargs)

    @locked
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = _Arguments((args, kwargs))
        if found.symbolic:  # a symbolic dim may have another value next time: traced as it stands
            return self.fn(*args, **kwargs)
        if self.guards is None or not self.guards.hold():
            self._read()
        for trace in self._known(found):
            if trace.fits():
                if trace.overlaps(found.tensors):
                    return self.fn(*args, **kwargs)
                if not trace.overlapping:
                    return trace.call(found.tensors)
        before = self.guards
        trace = _Trace(self.fn, args, kwargs, found.tensors)
        if trace.body is None:
            return self.fn(*args, **kwargs)
        self._read(before)
        traces = self._known(found)
        traces[:] = [t for t in traces if t.alive()] + [trace]
        trace.overlapping = trace.overlaps(found.tensors)
        return self.fn(*args, **kwargs) if trace.overlapping else trace.call(found.tensors)

    def _read(self, before: Guards | None = None) -> None:
        """What the function reads now. `before` it was traced: the numbers that it has changed itself are left out."""
        self.guards = now = Guards(self.fn)
        if before is not None:
            self.changing.update(p for p in now.differences(before) if isinstance(now.values.get(p), NUMBERS))
        self.numbers = now.numbers(self.changing)

    def _known(self, found: _Arguments) -> list[_Trace]:
        """The traces for such arguments, and for what the function reads besides them."""
        key = (tuple(found.key), self.numbers, Tensor.training, grad_mode.is_grad_enabled(), autocast_dtype())
        return self.traces.setdefault(key, [])


class _Arguments:
    """The tensors below a call's arguments, each once, and a key of all the rest."""

    def __init__(self, arguments: Any):
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}
        self.key: list[Any] = []
        self.symbolic = False
        self.objects: set[int] = set()
        self.walk(arguments)

    def walk(self, x: Any) -> None:
        if isinstance(x, Tensor):
            if id(x) not in self.numbers:
                self.numbers[id(x)] = len(self.tensors)
                self.tensors.append(x)
            self.key.append((self.numbers[id(x)], _spec(x.uop) or x.uop))
            self.symbolic = self.symbolic or any(not isinstance(d, int) for d in x.shape)
        elif isinstance(x, UOp):
            self.symbolic = True
        elif isinstance(x, (list, tuple)):
            self.key.append((type(x), len(x)))
            for y in x:
                self.walk(y)
        elif isinstance(x, dict):
            self.key.append(tuple(x))
            for y in x.values():
                self.walk(y)
        elif isinstance(x, (bool, int, float, str, bytes, type(None))):
            self.key.append((type(x), x))
        elif hasattr(x, "__dict__") and not isinstance(x, type) and not callable(getattr(x, "__code__", None)):
            self.key.append(type(x))
            if id(x) not in self.objects:
                self.objects.add(id(x))
                self.walk(vars(x))
        elif getattr(x, "__hash__", None) is not None:
            self.key.append(x)
        else:
            raise TypeError(
                f"@function: an argument of type {type(x).__name__} can change without notice; "
                "pass its values as a Tensor"
            )


def _spec(u: UOp) -> Spec | None:
    """(shape, dtype, device, axis, bounds) of a PARAM for `u`;
    None of a value without a device, which stays in the body."""
    device = u.device
    if device is None:
        return None
    axis, bounds = engine().store_spec(u) if isinstance(device, tuple) else (None, ())
    return (u.shape, u.dtype, device, axis, bounds)


def _lies_in(u: UOp) -> UOp:
    """The memory of `u` before anything that waits to be written there; of a value that is not stored, what it is a
    view of."""
    base = memory(u)
    return start(base).src[0] if base.op is Ops.AFTER else base


def _storage(u: UOp, t: Tensor | None) -> Any:
    """Storage that tensors which share memory have in common."""
    base = _lies_in(u)
    return base if base.op in MEMORY else (base, id(t if t is None or t._storage is None else t._storage.own()))


def _param(slot: int, spec: Spec) -> UOp:
    shape, dtype, device, axis, bounds = spec
    return UOp(Ops.PARAM, dtype, (), BufferSpec(slot, shape, dtype, device, axis, bounds))


class _Outside:
    """A tensor that the function refers to from outside: a parameter of the body, or,
    once computed inside, a constant."""

    def __init__(self, uop: UOp, tensor: Tensor | None):
        self.constant = uop if tensor is None else None
        self.ref = weakref.ref(tensor) if tensor is not None else None
        self.spec = _spec(uop)

    def uop(self) -> UOp | None:
        if self.constant is not None:
            over = self.constant.op is Ops.PARAM and not any(_lies_in(t.uop) is self.constant for t in LIVE)
            return None if over else _latest(self.constant)  # (an argument of an outer trace goes with that)
        t = self.ref() if self.ref is not None else None
        return t.uop if t is not None else None


def _latest(buffer: UOp) -> UOp:
    """Memory that only views lie in, or an argument while it was traced, with what waits to be written there."""
    waiting = (memory(t.uop) for t in PENDING)
    return next((u for u in waiting if u.op is Ops.AFTER and start(u).src[0] is buffer), buffer)


def refuse_traced(tensors: Iterable[Tensor]) -> None:
    """Raises JitError where a value is asked for that stands on what is being traced, and has none yet."""
    for t in tensors if TRACING else ():
        if any(u.op is Ops.PARAM and u.arg.uid < 0 for u in t.uop.toposort()):
            raise JitError(
                f"{user_line()}: the value of a tensor of shape {t.shape} is asked for while @function {TRACING[-1]} "
                "is traced: it depends on an argument, and is not there yet. Choose with Tensor.where, return the "
                "tensor, or take @function off where Python decides by values"
            )


class _Trace:
    """One body, and how a call's arguments become its sources and its results the function's.

    While the function runs, its arguments are PARAMs with numbers of their own: what an outer trace, or one that
    failed, has made of PARAMs are other nodes.
    """

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]):
        given = [i for i, t in enumerate(tensors) if _spec(t.uop) is not None]
        _realize_parts()
        known = list(LIVE)  # held, so that none of them dies and leaves its id to another
        before = {id(t): t.uop for t in known}
        leaves_and_storage = [(t, t._leaf, t._storage) for t in known]
        pending = {id(t) for t in PENDING.mine()}
        params = {i: _param(-next(_traced), _spec(tensors[i].uop) or ()) for i in given}
        self.own = {p: slot for slot, p in enumerate(params.values())}
        lazy = _lazy([t for t in known if not any(t is tensors[i] for i in given)])
        join = part([*(tensors[i] for i in given), *lazy])
        outs: list[Tensor] = []
        made: list[Tensor] = []
        entered, stand_ins = before, {}
        TRACING.append(getattr(fn, "__qualname__", "fn"))
        try:
            for i, p in params.items():
                tensors[i].uop = p
            stand_ins = _stand_ins(lazy)
            entered = {id(t): t.uop for t in known}
            with assignments() as assigned:
                self.shape_of_result = tensors_out(fn(*args, **kwargs), outs)
            values = [t.uop for t in outs]
            self.given = given
            self.written_args, self.written = [], []
            for i, p in params.items():
                if tensors[i].uop is not p:
                    self.written_args.append(i)
                    values.append(tensors[i].uop)
            mine = {id(tensors[i]) for i in params}
            # state that is made inside and kept outside: the random generator's counter
            made = [
                t
                for t in LIVE
                if id(t) not in before and memory(t.uop).op is Ops.AFTER and not any(t is o for o in outs)
            ]
            same = {id(t) for t in assigned if t.uop.device is None}
            changed = [
                *(t for t in known if id(t) not in mine and (t.uop is not entered[id(t)] or id(t) in same)),
                *made,
            ]
            whole = {memory(t.uop) for t in changed if memory(t.uop) is t.uop}
            for t in changed:  # of several views of one storage the whole
                if t.uop in whole or memory(t.uop) not in whole:
                    self.written.append(weakref.ref(t))
                    values.append(t.uop)
        finally:
            TRACING.pop()
            undone = {u for t in known if t.uop is not entered[id(t)] for u in _assignments(t.uop, entered[id(t)])}
            for t, leaf, identity in leaves_and_storage:
                t.uop, t._leaf, t._storage = before[id(t)], leaf, identity
            join()
            for t in PENDING.mine():
                if id(t) not in pending:
                    PENDING.discard(t)
            finals = {id(t): t.uop for t in made}
            started = self._forget(
                [t for t in LIVE if id(t) not in before], undone, stand_ins, getattr(fn, "__qualname__", "fn")
            )
        self.count = len(outs)
        self.outside: list[_Outside] = []
        self.overlapping = False  # traced with arguments that overlap: no body for others
        self.baked: list[tuple[weakref.ref[Tensor], UOp]] = []
        self.body: UOp | None = None
        if not any(u.op is Ops.BIND for u in UOp(Ops.SINK, dtypes.void, tuple(values)).toposort()):
            self._close(values, [*((entered[id(t)], t) for t in known if id(t) not in mine), *started], tensors)
            for t in made:
                if t.uop in LOST:  # made of what the function changes, and kept: of use from the first call on
                    base = memory(finals[id(t)])
                    buffer = start(base).src[0]
                    ORIGIN[buffer], t.uop = t.uop, rebased(finals[id(t)], base, buffer)

    def _forget(
        self, made: list[Tensor], undone: set[UOp], stand_ins: dict[UOp, UOp], name: str
    ) -> list[tuple[UOp, Tensor]]:
        """What was made of the arguments, or of what is `undone` for now, has no values: it is over with the trace.
        What was made of other things from outside goes on: state with what it was before the first assignment (inside
        the trace, the tensor).
        """

        def traced(u: UOp) -> bool:
            return u in self.own or u in undone

        inside = standing_on([t.uop for t in made], traced)
        started: list[tuple[UOp, Tensor]] = []
        for t in made:
            base = memory(t.uop)
            if base.op is Ops.AFTER:
                before = start(base)
                before = before if before.src[0] in ORIGIN else before.src[0]
                t.uop = rebased(t.uop, base, before)
                if t.uop not in inside:
                    started.append((t.uop, t))
                    if before.op is Ops.AFTER:
                        PENDING.add(t)
            if t.uop in inside:
                engine().lose(
                    t,
                    f"a tensor of shape {t.shape} was made while @function {name} was traced and kept: "
                    "it has no value; have the function return it",
                )
            else:
                t.uop = substitute(t.uop, stand_ins)
        return started

    def _close(self, values: list[UOp], was: list[tuple[UOp, Tensor]], tensors: list[Tensor]) -> None:
        """The body: assignments as values, what comes from outside as further PARAMs, or, where it lives nowhere, as it
        is: as long as such a tensor keeps its value the trace fits."""
        done: dict[UOp, UOp] = {}
        live = dict(was)

        def known(u: UOp) -> bool:
            return u not in self.own and (u.op in (Ops.BUFFER, Ops.PARAM) or (u in live and u.op in MEMORY))

        for u in UOp(Ops.SINK, dtypes.void, tuple(values)).toposort(lambda u: not known(u)):
            if u in self.own:
                done[u] = _param(self.own[u], _spec(u) or ())
            elif u.op is Ops.BUFFER and u in ORIGIN:
                done[u] = (
                    u  # memory that a value made inside was to be stored in (`storage.store`): only that store names it
                )
            elif known(u):
                outside = _Outside(u, live.get(u))
                self.outside.append(outside)
                done[u] = _param(len(self.given) + len(self.outside) - 1, outside.spec or ())
            elif u.op is Ops.AFTER:
                done[u] = _written(u, done)
            elif u.op is Ops.STORE:
                done[u] = u
            else:
                src = tuple(done[s] for s in u.src)
                done[u] = u if src == u.src else u.replace(src=src)
        self.baked = [(weakref.ref(t), u) for u, t in was if u.device is None and memory(u) in done]
        results = tuple(done[v] for v in values)
        trained = grad_mode.is_grad_enabled() and (
            any(t.requires_grad for t in tensors)
            or any((t := o.ref()) is not None and t.requires_grad for o in self.outside if o.ref)
        )
        saved = _read_by_gradient(results) if trained else ()
        self.body = UOp(Ops.SINK, dtypes.void, (*results, *saved))
        self.apart = self._apart()

    def _apart(self) -> list[int]:
        """Which of the tensors from outside share memory: of each the first one that it shares it with.
        It matters where one is written."""
        if not (self.written_args or self.written):
            return []
        storages = [
            _storage(u, o.ref() if o.ref is not None else None) for o in self.outside if (u := o.uop()) is not None
        ]
        return [storages.index(s) for s in storages]

    def alive(self) -> bool:
        return all(o.uop() is not None for o in self.outside)

    def fits(self) -> bool:
        same = all((t := ref()) is None or t.uop is u for ref, u in self.baked)
        return (
            same
            and all((u := o.uop()) is not None and _spec(u) == o.spec for o in self.outside)
            and self._apart() == self.apart
        )

    def overlaps(self, tensors: list[Tensor]) -> bool:
        """Whether an argument shares memory with another, or with a tensor from outside, and that is written; or two
        tensors from outside do, which are not in memory and of which none is the whole."""
        if not self.written_args and not self.written:
            return False
        given = [_storage(tensors[i].uop, tensors[i]) for i in self.given]
        written = {_storage(tensors[i].uop, tensors[i]) for i in self.written_args} | {
            _storage(t.uop, t) for ref in self.written if (t := ref()) is not None
        }
        referred = [
            _storage(u, o.ref() if o.ref is not None else None) for o in self.outside if (u := o.uop()) is not None
        ]
        if any(type(s) is tuple and s in written and referred.count(s) > 1 for s in referred):
            return True
        outside = {*referred} | {_storage(t.uop, t) for ref in self.written if (t := ref()) is not None}
        return any(s in written and (s in outside or given.count(s) > 1) for s in given)

    def call(self, tensors: list[Tensor]) -> Any:
        assert self.body is not None
        like = tensors[(*self.given, 0)[0]] if tensors else Tensor(0.0)
        src = (*(tensors[i].uop for i in self.given), *(u for o in self.outside if (u := o.uop()) is not None))
        call = UOp(Ops.FUNCTION, dtypes.void, src, self.body)
        results = [
            UOp(Ops.RESULT, u.dtype, (call,), i) if u.device is not None else u for i, u in enumerate(self.body.src)
        ]
        outs = [like._new(u) for u in results[: self.count]]
        state = iter(results[self.count :])
        for i in self.written_args:
            tensors[i].assign(like._new(next(state)))
        for ref in self.written:
            t, value = ref(), next(state)
            if t is not None:
                t.assign(t._new(value))
        return tensors_in(self.shape_of_result, outs)


def _realize_parts() -> None:
    """What waits to be written where only views lie is no tensor's value, and could not come in as one."""
    wholes = {t.uop for t in LIVE}
    for t in LIVE:
        base = memory(t.uop)
        if base.op is Ops.AFTER and base not in wholes and not any(u.op is Ops.PARAM for u in base.toposort()):
            t.realize()


def _lazy(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors that are not in memory, or, inside another trace, parts of what is none's value."""
    wholes = {t.uop for t in tensors}
    return [
        t
        for t in tensors
        if _spec(t.uop) is not None
        and (not is_stored(t.uop) or (memory(t.uop).op is Ops.AFTER and memory(t.uop) not in wholes))
    ]


def _stand_ins(lazy: list[Tensor]) -> dict[UOp, UOp]:
    """What is not computed yet is memory inside a trace, a PARAM for each storage: a value that the function makes is
    never taken for one from outside with the same graph, and of equal ones each is itself. Returns what the PARAMs
    stand for."""
    together: dict[tuple[UOp, int], list[Tensor]] = {}
    stand_ins: dict[UOp, UOp] = {}
    for t in lazy:
        together.setdefault((memory(t.uop), id(t if t._storage is None else t._storage.own())), []).append(t)
    for (base, _), views in together.items():
        if len(views) > 1 and any(attached(rebased(t.uop, base, base)) is base for t in views):
            p = _param(-next(_traced), _spec(base) or ())
            stand_ins[p] = base
            for t in views:
                view = rebased(t.uop, base, p)
                t.uop = p if attached(view) is p else view
        else:  # what it is a view of is no tensor's value
            for t in views:
                p = _param(-next(_traced), _spec(t.uop) or ())
                stand_ins[p], t.uop = t.uop, p
    return stand_ins


def _written(u: UOp, done: dict[UOp, UOp]) -> UOp:
    """Value that an assignment leaves in memory."""
    before, store = u.src
    target, value = store.src
    if target is before:
        return done[value]
    moves = []
    while target is not before:
        moves.append(target)
        target = target.src[0]
    return place(Tensor(done[before]), moves, Tensor(done[value])).uop


def _assignments(u: UOp, before: UOp) -> list[UOp]:
    """Assignments to the memory of `u` that were made since it was `before`."""
    found, base, end = [], memory(u), memory(before)
    while base.op is Ops.AFTER and base is not end:
        found.append(base)
        base = base.src[0]
    return found


# *** the gradient of a call ***


def _read_by_gradient(results: tuple[UOp, ...]) -> tuple[UOp, ...]:
    """The reductions inside a body that its gradient reads."""
    inside = UOp(Ops.SINK, dtypes.void, results).toposort()
    params = {u for u in inside if u.op is Ops.PARAM and u.dtype.is_float}
    starts = [(r, _param(-1 - i, s)) for i, r in enumerate(results) if r.dtype.is_float and (s := _spec(r)) is not None]
    backward = UOp(Ops.SINK, dtypes.void, tuple(flow_back(starts, params, unknown={}).values()))
    forward, stack = set(inside), [backward]
    out: dict[UOp, None] = {}
    seen: set[UOp] = set()
    while stack:
        u = stack.pop()
        if u in seen:
            continue
        seen.add(u)
        if u in forward and u.op in COMPUTED and u not in results:
            out[u] = None
        elif u not in results or u not in forward:
            stack += u.src
    return tuple(out)


# of a body: for the gradients that arrive, the graph of those that leave, the slots it reads, the slots of its
# arguments that it gives, and the arguments whose gradients are unknown
_GRADIENTS: Table[dict[str, tuple[UOp, list[int], list[int], dict[int, NoGradient]]]] = Table("gradients")


def gradients_of_call(call: UOp, grads: dict[int, Tensor]) -> list[Tensor | NoGradient | None]:
    """Gradients of the sources of a FUNCTION, given what reached its results: another FUNCTION, of the same sources,
    the results that the gradient reads, and the gradients that arrived."""
    body: UOp = call.arg
    n, results = len(call.src), body.src
    specs = {i: _spec(g.uop) for i, g in grads.items()}
    key = f"gradient of {n}, {[(i, s or g.uop.key) for (i, g), s in zip(grads.items(), specs.values())]}"
    known = _GRADIENTS.setdefault(body, {})
    found = known.get(key)
    # (a gradient without a device, such as the ones that a sum sends back, stands in the body as it is)
    if found is None:
        arrived = {
            i: grads[i].uop if s is None else _param(n + len(results) + k, s) for k, (i, s) in enumerate(specs.items())
        }
        params = {u.arg.uid: u for u in body.toposort() if u.op is Ops.PARAM}
        unknown: dict[UOp, NoGradient] = {}
        flows = flow_back(
            [(results[i], p) for i, p in arrived.items()],
            {p for p in params.values() if p.dtype.is_float},
            unknown=unknown,
        )
        wanted = [slot for slot, p in sorted(params.items()) if p in flows]
        read = {r: _param(n + i, s) for i, r in enumerate(results) if (s := _spec(r)) is not None}
        sink = substitute(UOp(Ops.SINK, dtypes.void, tuple(flows[params[slot]] for slot in wanted)), read)
        inner = {u.arg.uid for u in sink.toposort() if u.op is Ops.PARAM}
        slots = sorted(inner)
        renumbered = {u: _renumbered(u, slots.index(u.arg.uid)) for u in sink.toposort() if u.op is Ops.PARAM}
        found = known[key] = (
            substitute(sink, renumbered),
            slots,
            wanted,
            {slot: unknown[p] for slot, p in params.items() if p in unknown},
        )
    sink, slots, wanted, lost = found
    every = (
        *call.src,
        *(UOp(Ops.RESULT, r.dtype, (call,), i) for i, r in enumerate(results)),
        *(g.uop for g in grads.values()),
    )
    backward = UOp(Ops.FUNCTION, dtypes.void, tuple(every[s] for s in slots), sink)
    any_grad = next(iter(grads.values()))
    out: list[Tensor | NoGradient | None] = [lost.get(slot) for slot in range(n)]
    for i, slot in enumerate(wanted):
        u = sink.src[i]
        out[slot] = any_grad._new(UOp(Ops.RESULT, u.dtype, (backward,), i) if u.device is not None else u)
    return out


def _renumbered(u: UOp, slot: int) -> UOp:
    b = u.arg
    return UOp(Ops.PARAM, u.dtype, (), BufferSpec(slot, b.shape, b.dtype, b.device, b.axis, b.bounds))


__all__ = ["function", "gradients_of_call", "refuse_traced"]
