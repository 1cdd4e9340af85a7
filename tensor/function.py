"""`@function`: a graph that is traced once and scheduled once, however often it is called.

    @function
    def block(x, w):
        return (x @ w).relu() + x

The first call with arguments of given shapes, types and places records the graph of the results over PARAMs, the body. Each call
is then one FUNCTION node over the actual arguments, with a RESULT node for each result:

    FUNCTION(args; body = SINK(results over PARAMs));  RESULT(FUNCTION; i)

Its gradient is a FUNCTION too. When the graph is run, each body is lowered once (`runtime/functions.py`), and the arguments and
results are stored: a call is a fusion boundary. Where an argument requires a gradient the body has more results than the user
sees: the reductions (matmuls, sums) that its gradient reads, so that they are not computed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from manygrad.tensor import grad_mode
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.engine import engine
from manygrad.tensor.gradient import flow_back
from manygrad.tensor.tensor import LIVE, PENDING, Tensor
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import unviewed

Spec = tuple[Any, ...]
COMPUTED = frozenset({Ops.REDUCE, Ops.SCATTER, Ops.RESULT, Ops.CONTIGUOUS})  # what a gradient reads rather than computes again


class function:
    """As a decorator of functions or methods. Tensors are found in arguments, also inside lists, tuples, dicts and objects (a layer and
    its weights), and in what the function refers to from outside; everything else is part of the trace, and a change of it makes
    a new one. What the function assigns to a tensor is assigned at every call."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.traces: dict[Any, list[_Trace]] = {}

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        return self if obj is None else lambda *args, **kwargs: self(obj, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _Arguments((args, kwargs))
        if found.symbolic:  # a symbolic dim may have another value next time: traced as it stands
            return self.fn(*args, **kwargs)
        key = (tuple(found.key), Tensor.training, grad_mode.enabled, Tensor.initial_seed())
        traces = self.traces.setdefault(key, [])
        for trace in traces:
            if trace.fits():
                return trace.call(found.tensors)
        trace = _Trace(self.fn, args, kwargs, found.tensors)
        if trace.body is None:
            return self.fn(*args, **kwargs)
        traces[:] = [t for t in traces if t.alive()] + [trace]
        return trace.call(found.tensors)


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
            raise TypeError(f"@function: an argument of type {type(x).__name__} can change without notice; pass its values as a Tensor")


def _spec(u: UOp) -> Spec | None:
    """(shape, dtype, device, axis, bounds) of a PARAM for `u`; None of a value without a device, which stays in the body."""
    device = u.device
    if device is None:
        return None
    axis, bounds = engine().store_spec(u) if isinstance(device, tuple) else (None, ())
    return (u.shape, u.dtype, device, axis, bounds)


def _param(slot: int, spec: Spec) -> UOp:
    shape, dtype, device, axis, bounds = spec
    return UOp(Ops.PARAM, dtype, (), BufferSpec(slot, shape, dtype, device, axis, bounds))


class _Outside:
    """A tensor that the function refers to from outside: a parameter of the body, or, once computed inside, a constant."""

    def __init__(self, uop: UOp, tensor: Tensor | None):
        self.constant = uop if tensor is None else None
        self.ref = weakref.ref(tensor) if tensor is not None else None
        self.spec = _spec(uop)

    def uop(self) -> UOp | None:
        if self.constant is not None:
            return self.constant
        t = self.ref() if self.ref is not None else None
        return t.uop if t is not None else None


class _Trace:
    """One body, and how a call's arguments become its sources and its results the function's."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Tensor]):
        given = [i for i, t in enumerate(tensors) if _spec(t.uop) is not None]
        before = {id(t): t.uop for t in LIVE}
        pending = {id(t) for t in PENDING}
        params = {i: _param(slot, _spec(tensors[i].uop) or ()) for slot, i in enumerate(given)}
        known = list(LIVE)  # held, so that none of them dies and leaves its id to another
        for i, p in params.items():
            tensors[i].uop = p
        try:
            self.result = fn(*args, **kwargs)
            outs: list[Tensor] = []
            self.shape_of_result = _structure(self.result, outs)
            values = [t.uop for t in outs]
            self.given = given
            self.written_args, self.written = [], []
            for i, p in params.items():
                if tensors[i].uop is not p:
                    self.written_args.append(i)
                    values.append(tensors[i].uop)
            mine = {id(tensors[i]) for i in params}
            made = [t for t in LIVE if id(t) not in before and unviewed(t.uop).op is Ops.AFTER and not any(t is o for o in outs)]
            for t in made:  # state that was made inside and is kept outside: the random generator's counter
                before[id(t)] = _before_assignments(t.uop)
                known.append(t)
            for t in known:
                if id(t) not in mine and t.uop is not before[id(t)] and unviewed(t.uop).op is Ops.AFTER and unviewed(before[id(t)]) is before[id(t)]:
                    self.written.append(weakref.ref(t))
                    values.append(t.uop)
        finally:
            for t in known:
                if id(t) in before:
                    t.uop = before[id(t)]
            for t in list(PENDING):
                if id(t) not in pending:
                    PENDING.discard(t)
        del self.result
        self.count = len(outs)
        self.outside: list[_Outside] = []
        self.body: UOp | None = None
        if not any(u.op is Ops.BIND for u in UOp(Ops.SINK, dtypes.void, tuple(values)).toposort()):
            self._close(values, {before[id(t)]: t for t in known if id(t) not in {id(tensors[i]) for i in params}}, tensors)

    def _close(self, values: list[UOp], live: dict[UOp, Tensor], tensors: list[Tensor]) -> None:
        """The body: assignments as values, what comes from outside as further PARAMs."""
        done: dict[UOp, UOp] = {}

        def known(u: UOp) -> bool:
            return (u in live and _spec(u) is not None and u.op is not Ops.CONST) or u.op is Ops.BUFFER

        for u in UOp(Ops.SINK, dtypes.void, tuple(values)).toposort(lambda u: not known(u)):
            if known(u):
                outside = _Outside(u, live.get(u))
                self.outside.append(outside)
                done[u] = _param(len(self.given) + len(self.outside) - 1, outside.spec or ())
            elif u.op is Ops.AFTER:
                store = u.src[1]
                if len(u.src) != 2 or store.op is not Ops.STORE or unviewed(store.src[0]) is not store.src[0]:
                    raise NotImplementedError("@function: only whole tensors can be assigned inside; assign the part outside, or build the whole with where(...)")
                done[u] = done[store.src[1]]
            else:
                src = tuple(done[s] for s in u.src)
                done[u] = u if src == u.src else u.replace(src=src)
        results = tuple(done[v] for v in values)
        trained = grad_mode.enabled and (any(t.requires_grad for t in tensors) or any((t := o.ref()) is not None and t.requires_grad for o in self.outside if o.ref))
        saved = _read_by_gradient(results) if trained else ()
        self.body = UOp(Ops.SINK, dtypes.void, (*results, *saved))
        self.body._cache["saved"] = saved

    def alive(self) -> bool:
        return all(o.uop() is not None for o in self.outside)

    def fits(self) -> bool:
        return all((u := o.uop()) is not None and _spec(u) == o.spec for o in self.outside)

    def call(self, tensors: list[Tensor]) -> Any:
        assert self.body is not None
        like = tensors[(*self.given, 0)[0]] if tensors else Tensor(0.0)
        src = (*(tensors[i].uop for i in self.given), *(u for o in self.outside if (u := o.uop()) is not None))
        call = UOp(Ops.FUNCTION, dtypes.void, src, self.body)
        results = [UOp(Ops.RESULT, u.dtype, (call,), i) if u.device is not None else u for i, u in enumerate(self.body.src)]
        outs = [like._new(u) for u in results[: self.count]]
        state = iter(results[self.count :])
        for i in self.written_args:
            tensors[i].assign(like._new(next(state)))
        for ref in self.written:
            t, value = ref(), next(state)
            if t is not None:
                t.assign(t._new(value))
        return _filled(self.shape_of_result, outs)


def _before_assignments(u: UOp) -> UOp:
    while u.op is Ops.AFTER:
        u = u.src[0]
    return u


def _structure(x: Any, found: list[Tensor]) -> Any:
    """`x` with its tensors taken out, in order."""
    if isinstance(x, Tensor):
        found.append(x)
        return _Hole(len(found) - 1)
    if isinstance(x, (list, tuple)):
        items = [_structure(y, found) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return {k: _structure(y, found) for k, y in x.items()} if isinstance(x, dict) else x


class _Hole:
    def __init__(self, i: int):
        self.i = i


def _filled(x: Any, outs: list[Tensor]) -> Any:
    if isinstance(x, _Hole):
        return outs[x.i]
    if isinstance(x, (list, tuple)):
        items = [_filled(y, outs) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return {k: _filled(y, outs) for k, y in x.items()} if isinstance(x, dict) else x


# *** the gradient of a call ***


def _read_by_gradient(results: tuple[UOp, ...]) -> tuple[UOp, ...]:
    """The reductions inside a body that its gradient reads."""
    inside = UOp(Ops.SINK, dtypes.void, results).toposort()
    params = {u for u in inside if u.op is Ops.PARAM and u.dtype.is_float}
    starts = [(r, _param(-1 - i, s)) for i, r in enumerate(results) if r.dtype.is_float and (s := _spec(r)) is not None]
    backward = UOp(Ops.SINK, dtypes.void, tuple(flow_back(starts, params).values()))
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


def gradients_of_call(call: UOp, grads: dict[int, Tensor]) -> list[Tensor | None]:
    """What reaches each source of a FUNCTION, given what reached its results: another FUNCTION, of the same sources, the results that
    the gradient reads, and the gradients that arrived."""
    body: UOp = call.arg
    n, results = len(call.src), body.src
    key = f"gradient of {tuple(grads)}"
    found = body._cache.get(key)
    if found is None:
        arrived = {i: _param(n + len(results) + k, (g.shape, g.dtype, *(_spec(results[i]) or ())[2:])) for k, (i, g) in enumerate(grads.items())}
        params = {u.arg.uid: u for u in body.toposort() if u.op is Ops.PARAM}
        flows = flow_back([(results[i], p) for i, p in arrived.items()], {p for p in params.values() if p.dtype.is_float})
        wanted = [slot for slot, p in sorted(params.items()) if p in flows]
        read = {r: _param(n + i, s) for i, r in enumerate(results) if (s := _spec(r)) is not None}
        sink = substitute(UOp(Ops.SINK, dtypes.void, tuple(flows[params[slot]] for slot in wanted)), read)
        inner = {u.arg.uid for u in sink.toposort() if u.op is Ops.PARAM}
        slots = sorted(inner)
        renumbered = {u: _renumbered(u, slots.index(u.arg.uid)) for u in sink.toposort() if u.op is Ops.PARAM}
        found = body._cache[key] = (substitute(sink, renumbered), slots, wanted)
    sink, slots, wanted = found
    every = (*call.src, *(UOp(Ops.RESULT, r.dtype, (call,), i) for i, r in enumerate(results)), *(g.uop for g in grads.values()))
    backward = UOp(Ops.FUNCTION, dtypes.void, tuple(every[s] for s in slots), sink)
    any_grad = next(iter(grads.values()))
    out: list[Tensor | None] = [None] * n
    for i, slot in enumerate(wanted):
        u = sink.src[i]
        out[slot] = any_grad._new(UOp(Ops.RESULT, u.dtype, (backward,), i) if u.device is not None else u)
    return out


def _renumbered(u: UOp, slot: int) -> UOp:
    b = u.arg
    return UOp(Ops.PARAM, u.dtype, (), BufferSpec(slot, b.shape, b.dtype, b.device, b.axis, b.bounds))


__all__ = ["function", "gradients_of_call"]
