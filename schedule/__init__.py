"""From the SINK of all tensors to realize, to a LINEAR: an ordered list of CALLs with planned memory.

`create_linear_with_vars` reads top to bottom as the pipeline: variables and buffers are taken out, so that the graph is
its own cache key; what is left is lowered once and kept, in memory and on disk (`schedule/cache.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from manygrad.multi.lower import lower_shards
from manygrad.multi.world import World, world
from manygrad.schedule import cache, trace
from manygrad.schedule.chain import chain_kernels
from manygrad.schedule.desugar import Temps, lower_storage
from manygrad.schedule.kernels import Item, insert_stores, split_kernels
from manygrad.schedule.memory import plan_memory
from manygrad.schedule.order import order_items
from manygrad.schedule.parts import pass_parts
from manygrad.schedule.simplify import clean, simplify
from manygrad.schedule.trace import traced
from manygrad.schedule.updates import split_updates
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import SCACHE, SPEC
from manygrad.tensor.source import forget_inherited
from manygrad.tensor.uop import BufferSpec, Ops, UOp
from manygrad.tensor.uop import symbolic as sym
from manygrad.tensor.uop.spec import verify

CACHE_LIMIT = 4096
SHAPED = frozenset({Ops.BUFFER, Ops.RESHAPE, Ops.EXPAND, Ops.SHRINK})  # a symbolic dim may stand in their arg
_SCHEDULES: dict[Any, UOp] = {}
stats = {"hits": 0, "misses": 0, "loaded": 0}  # found in memory; not found there; of those, found on disk


class Scheduled(NamedTuple):
    """`linear` over PARAMs; `var_vals` by name; `buffers` by PARAM slot."""

    linear: UOp
    var_vals: dict[str, int]
    buffers: list[UOp]


def create_linear_with_vars(sink: UOp, me: World = world) -> Scheduled:
    """The LINEAR of a SINK of STOREs and AFTERs, from the cache where the same graph was scheduled before."""
    unbound, var_vals = strip_binds(sink)
    normal, buffers = number_buffers(unbound)
    return Scheduled(create_linear(normal, me), var_vals, buffers)


def create_linear(normal: UOp, me: World = world) -> UOp:
    """The LINEAR of a graph over numbered PARAMs, from the cache where it was scheduled before."""
    key = (normal, me.rank, me.size)
    linear = _SCHEDULES.get(key) if SCACHE else None
    if linear is None:
        stats["misses"] += 1
        linear = _load_or_lower(normal, me) if SCACHE else lower_sink_to_linear(normal, me)
        if SCACHE:
            if len(_SCHEDULES) >= CACHE_LIMIT:
                _SCHEDULES.pop(next(iter(_SCHEDULES)))
            _SCHEDULES[key] = linear
    else:
        stats["hits"] += 1
    return linear


def _load_or_lower(normal: UOp, me: World) -> UOp:
    key = cache.entry_key(normal, me)
    if key is None:
        return lower_sink_to_linear(normal, me)
    start = trace.begin()
    linear = cache.load(key)
    if linear is not None:
        trace.timed("load schedule", start, calls=len(linear.src))
    if linear is None:
        linear = lower_sink_to_linear(normal, me)
        cache.save(key, linear)
    else:
        stats["loaded"] += 1
    return linear


def lower_sink_to_linear(sink: UOp, me: World = world) -> UOp:
    start = trace.begin()
    try:
        calls = [call_of(item) for item in create_schedule(sink, me)]
    finally:
        forget_inherited()
    begun = trace.begin()
    linear = UOp(Ops.LINEAR, dtypes.void, tuple(calls), plan_memory(calls))
    trace.timed("plan_memory", begun, pools=linear.arg.pools)
    trace.timed("schedule", start, calls=len(calls))
    if SPEC:
        verify(linear, "linear")
    return linear


def create_schedule(sink: UOp, me: World = world) -> list[Item]:
    """The stage's pipeline."""
    temps = Temps()
    trace.begin()
    sink = traced("clean", clean(sink), sink)
    sink = traced("lower_shards", lower_shards(sink, me), sink)
    sink = traced("simplify", simplify(sink), sink)
    sink = traced("lower_storage", split_updates(lower_storage(sink, temps)), sink)
    sink = traced("insert_stores", insert_stores(sink, temps), sink)
    start = trace.begin()
    items = split_kernels(sink, temps)
    trace.timed("split_kernels", start, calls=len(items))
    start = trace.begin()
    items = order_items(items)
    trace.timed("order_items", start)
    start = trace.begin()
    items = chain_kernels(items)
    trace.timed("chain_kernels", start, calls=len(items))
    start = trace.begin()
    items = pass_parts(items)
    trace.timed("pass_parts", start)
    return items


def call_of(item: Item) -> UOp:
    call = UOp(Ops.CALL, dtypes.void, (item.what, *item.args))
    call._cache.setdefault("line", item.line)
    return call


def strip_binds(sink: UOp) -> tuple[UOp, dict[str, int]]:
    """Bound variables become their definitions; their values by name."""
    if not any(u.op is Ops.BIND or (u.op in SHAPED and _has_uop(u.arg.shape if u.op is Ops.BUFFER else u.arg)) for u in sink.toposort()):
        return sink, {}
    unbinding = _Unbinding()
    return unbinding.walk(sink), unbinding.values


class _Unbinding:
    """(A class, not nested functions that call each other: those would keep the graph until a garbage collection.)"""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.done: dict[UOp, UOp] = {}

    def unbind(self, u: UOp) -> UOp:
        name, n = u.src[0].arg[0], u.src[1].arg
        if self.values.setdefault(name, n) != n:
            raise ValueError(f"bind mismatch: variable {name!r} is bound to {self.values[name]} and to {n} in one graph; realize one of the tensors first")
        return u.src[0]

    def of_arg(self, x: Any) -> Any:
        if isinstance(x, UOp):
            return sym.to_sint(self.walk(x))
        return tuple(self.of_arg(y) for y in x) if isinstance(x, tuple) else x

    def walk(self, root: UOp) -> UOp:
        done = self.done
        for u in root.toposort(lambda u: u not in done):
            if u in done:
                continue
            if u.op is Ops.BIND:
                done[u] = self.unbind(u)
                continue
            src = tuple(done[s] for s in u.src)
            arg = u.arg
            if u.op in SHAPED and u.op is not Ops.BUFFER and _has_uop(arg):
                arg = self.of_arg(arg)
            elif u.op is Ops.BUFFER and _has_uop(arg.shape):
                arg = BufferSpec(arg.uid, self.of_arg(arg.shape), arg.dtype, arg.device, arg.axis, arg.bounds)
            done[u] = u if src == u.src and arg is u.arg else (sym.rebuild(u, src) if arg is u.arg else _same_buffer(u.replace(src=src, arg=arg), u))
            if "line" in u._cache:
                done[u]._cache.setdefault("line", u._cache["line"])
        return done[root]


def _same_buffer(new: UOp, old: UOp) -> UOp:
    """A BUFFER whose symbolic shape lost its bound values is still that storage."""
    if old.op is Ops.BUFFER and "buffer" in old._cache:
        new._cache["buffer"] = old._cache["buffer"]
    return new


def _has_uop(arg: Any) -> bool:
    if type(arg) is tuple:
        return not {*map(type, arg)} <= {int} and True in map(_has_uop, arg)
    return isinstance(arg, UOp)


def as_param(buffer: UOp, slot: int) -> UOp:
    b = buffer.arg
    return UOp(Ops.PARAM, buffer.dtype, (), BufferSpec(slot, b.shape, b.dtype, b.device, b.axis, b.bounds))


def number_buffers(sink: UOp) -> tuple[UOp, list[UOp]]:
    """Buffers become PARAMs numbered in graph order: equal programs on other data are then equal graphs."""
    buffers: list[UOp] = []
    done: dict[UOp, UOp] = {}
    for u in sink.toposort():
        if u.op is Ops.BUFFER:
            done[u] = as_param(u, len(buffers))
            buffers.append(u)
            continue
        src = tuple([done[s] for s in u.src])
        if u.op in (Ops.DETACH, Ops.CUSTOM):  # as a leaf's number, these matter to gradients only
            done[u] = src[0]
            continue
        arg = None if u.op is Ops.CONTIGUOUS else u.arg
        done[u] = u if src == u.src and arg is u.arg else u.replace(src=src, arg=arg)
        if "line" in u._cache:
            done[u]._cache.setdefault("line", u._cache["line"])
    return done[sink], buffers
