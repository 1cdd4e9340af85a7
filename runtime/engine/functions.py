"""run_functions: the calls of traced functions in a graph, run by schedules that are made once for each body.

Precondition: a SINK of STOREs and AFTERs with FUNCTION nodes in it. Postcondition: those calls have run; a SINK without
them, that reads their results from buffers. The graph is cut in layers: what the arguments of the first calls need is
run, then these calls, then what the next ones need, and so on.

    y = RESULT(FUNCTION(x + 1; body)); STORE(out, y * 2)
    ==>  run STORE(a, x + 1);  run body with its PARAMs a, b;  STORE(out, b * 2)

What later layers read is stored when it holds a reduction, or computed again. What is overwritten in one layer and read
as it was before in a later one (memory, or what an earlier assignment left there) is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from manygrad.runtime.buffer import Buffer
from manygrad.runtime.storage import STORAGE, storage
from manygrad.schedule.facts.index import contiguous_offset
from manygrad.tensor.dtype import dtypes
from manygrad.tensor.uop import BufferSpec, GroupOp, Ops, UOp, standing_on, toposort
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import attached, numel, unviewed
from manygrad.tensor.uop.table import Table

NewBuffer = Callable[[UOp], UOp]
Run = Callable[[UOp], None]
RunBody = Callable[[UOp, list[UOp]], None]
HEAVY = frozenset({Ops.REDUCE, Ops.SCATTER, Ops.GATHER, Ops.CONTIGUOUS, Ops.RESULT, Ops.COPY, Ops.CAT})


def has_functions(sink: UOp) -> bool:
    return any(u.op is Ops.FUNCTION for u in sink.toposort())


def run_functions(sink: UOp, new_buffer: NewBuffer, run: Run, run_body: RunBody) -> UOp:
    """`run(SINK of effects)` and `run_body(normal SINK, buffers by slot)` carry out what can be."""
    order = sink.toposort()
    calls = [u for u in order if u.op is Ops.FUNCTION]
    if not any(u.op is Ops.AFTER for u in toposort(calls)):
        return _run_in_order(sink, order, calls, new_buffer, run, run_body)
    while True:
        order = sink.toposort()
        calls = [u for u in order if u.op is Ops.FUNCTION]
        if not calls:
            return sink
        on_call = standing_on([sink], lambda u: u.op is Ops.FUNCTION)
        first = [c for c in calls if not any(s in on_call for s in c.src)]
        layer = _CallLayer(order, first, on_call)
        effects: list[UOp] = []
        becomes: dict[UOp, UOp] = {}
        for b in layer.read_before_written:
            becomes[b] = new_buffer(b)
            effects.append(UOp(Ops.STORE, dtypes.void, (becomes[b], UOp(Ops.CONTIGUOUS, b.dtype, (b,)))))
        for u in layer.stored:
            becomes[u] = new_buffer(u)
            effects.append(UOp(Ops.STORE, dtypes.void, (becomes[u], u)))
        for u in layer.assigned:
            effects.append(u)
            becomes[u] = _storage_of(u)
        if effects:
            run(UOp(Ops.SINK, dtypes.void, tuple(effects)))
        placed = _placed(sink)
        for c in first:
            _call(c, placed, becomes, new_buffer, run_body)
        sink = _rest(sink, becomes)


def _run_in_order(
    sink: UOp, order: list[UOp], calls: list[UOp], new_buffer: NewBuffer, run: Run, run_body: RunBody
) -> UOp:
    """Where nothing is assigned below the calls: one after the other, in time proportional to the graph."""
    number = {c: i for i, c in enumerate(calls)}
    part: dict[UOp, int] = {}  # how many calls have run when a value can be computed
    heavy = standing_on([sink], lambda u: u.op in HEAVY)
    shared: set[UOp] = set()  # heavy values that several parts read
    for u in order:
        part[u] = number[u] + 1 if u.op is Ops.FUNCTION else max((part[s] for s in u.src), default=0)
        reader = number[u] if u.op is Ops.FUNCTION else part[u]
        shared.update(
            s for s in u.src if s in heavy and part[s] != reader and unviewed(s).op not in (Ops.RESULT, Ops.BUFFER)
        )
    becomes: dict[UOp, UOp] = {}
    placed = _placed(sink)

    def outside(u: UOp) -> bool:
        return u not in becomes

    for c in calls:
        stored = [
            u
            for u in toposort(c.src, outside)
            if u not in becomes and (u in shared or (u in c.src and _needs_storage(u, becomes)))
        ]
        if stored:
            buffers = [new_buffer(u) for u in stored]
            run(
                UOp(
                    Ops.SINK,
                    dtypes.void,
                    tuple(UOp(Ops.STORE, dtypes.void, (b, substitute(u, becomes))) for u, b in zip(stored, buffers)),
                )
            )
            becomes |= dict(zip(stored, buffers))
        _call(c, placed, becomes, new_buffer, run_body)
    return _rest(sink, becomes)


def _needs_storage(u: UOp, becomes: dict[UOp, UOp]) -> bool:
    found = substitute(u, becomes)
    base = unviewed(found)
    return base.op is not Ops.BUFFER or not _lies_in_one_piece(found, base)


def _placed(sink: UOp) -> dict[UOp, UOp]:
    """RESULT -> the buffer that it shall be stored in."""
    return {
        s.src[1]: s.src[0]
        for s in sink.src
        if s.op is Ops.STORE and s.src[0].op is Ops.BUFFER and s.src[1].op is Ops.RESULT
    }


def _call(c: UOp, placed: dict[UOp, UOp], becomes: dict[UOp, UOp], new_buffer: NewBuffer, run_body: RunBody) -> None:
    """Runs one call, whose arguments are in memory; its results join `becomes`."""
    outs = [UOp(Ops.RESULT, u.dtype, (c,), i) for i, u in enumerate(c.arg.src)]
    made = [placed.get(r) or new_buffer(r) for r in outs]
    run_body(c.arg, [*(_as_buffer(substitute(a, becomes), new_buffer) for a in c.src), *made])
    becomes |= dict(zip(outs, made))


def _rest(sink: UOp, becomes: dict[UOp, UOp]) -> UOp:
    """The graph of what has yet to be done. Where a STORE writes a view, that is memory, also where a copy of it was an
    argument."""
    written = {v for u in sink.toposort() if u.op is Ops.STORE for v in _views(u.src[0])}
    rest = substitute(sink, {u: b for u, b in becomes.items() if u not in written})
    return UOp(
        Ops.SINK,
        dtypes.void,
        tuple(s for s in rest.src if not (s.op is Ops.STORE and s.src[0] is s.src[1]) and s.op is not Ops.BUFFER),
    )


class _CallLayer:
    """Values that must be computed before the calls `first`: the arguments, and the values that later parts read
    too."""

    def __init__(self, order: list[UOp], first: list[UOp], on_call: set[UOp]):
        arguments = list(dict.fromkeys(a for c in first for a in c.src))
        below = set(toposort(arguments))
        heavy = standing_on(order[-1:], lambda u: u.op in HEAVY)
        later = [u for u in order if u not in below and u not in first]
        shared = [s for u in later for s in u.src if s in below and s in heavy]
        self.stored: list[UOp] = []
        self.assigned: list[UOp] = []
        for u in dict.fromkeys((*arguments, *shared)):
            base = unviewed(u)
            if base.op is Ops.AFTER:
                self.assigned.append(base)
            if base.op not in (Ops.BUFFER, Ops.AFTER) or (u in arguments and not _lies_in_one_piece(u, base)):
                self.stored.append(u)
        self.assigned = list(
            dict.fromkeys([*self.assigned, *(u for u in below if u.op is Ops.AFTER and any(u in x.src for x in later))])
        )
        # memory, and what an earlier assignment left there
        overwritten = dict.fromkeys(u.src[0] for u in order if u in below and u.op is Ops.AFTER)
        kept = {*self.stored, *self.assigned, *first}
        again = toposort(
            (s for u in later for s in u.src if s in below), lambda u: u not in kept and u.op is not Ops.AFTER
        )  # computed again later
        readers = [
            *later,
            *(u for u in again if u not in kept and u.op is not Ops.AFTER),
            *first,
            *(v for a in arguments for v in _views(a)),
        ]
        self.read_before_written = [v for v in overwritten if any(v in u.src for u in readers)]
        self.assigned = [u for u in self.assigned if u not in overwritten]


def _views(u: UOp) -> Iterator[UOp]:
    """The views between an argument and its memory."""
    while u.op in GroupOp.VIEW or u.op is Ops.DETACH:
        yield u
        u = u.src[0]


def _storage_of(u: UOp) -> UOp:
    while u.op is Ops.AFTER or u.op in GroupOp.VIEW or u.op is Ops.DETACH:
        u = u.src[0]
    return u


def _offset(u: UOp, base: UOp) -> int | None:
    if (
        any(not isinstance(d, int) for d in (*u.shape, *base.shape))
        or _storage_of(base).arg.axis is not None
        or numel(u.shape) == 0
    ):
        return None
    return contiguous_offset(attached(u), base)


def _lies_in_one_piece(u: UOp, base: UOp) -> bool:
    return u is base or _offset(u, base) is not None


_AS_BUFFER: Table[UOp] = Table("as buffer")


def _as_buffer(u: UOp, new_buffer: NewBuffer) -> UOp:
    """A BUFFER for a view that lies in one piece: the same memory."""
    base = unviewed(u)
    if u is base:
        return u
    cached = _AS_BUFFER.get(u)
    if cached is not None:
        return cached
    offset = _offset(u, base)
    assert offset is not None
    out, memory = new_buffer(u), storage(base)
    out = UOp(Ops.BUFFER, u.dtype, (), BufferSpec(out.arg.uid, u.shape, u.dtype, out.arg.device))
    count, at = numel(u.shape), offset * u.dtype.itemsize
    STORAGE[out] = (
        memory.view(count, u.dtype, at)
        if isinstance(memory, Buffer)
        else [None if b is None else b.view(count, u.dtype, at) for b in memory]
    )
    _AS_BUFFER[u] = out
    return out
