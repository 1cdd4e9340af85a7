"""The local realize engine: what `Tensor.realize` calls. The package's root registers it with `tensor/engine.py`."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import prod

import numpy as np

from manygrad.errors import CollectiveError, JitError
from manygrad.multi.rules import store_spec
from manygrad.multi.world import World
from manygrad.runtime.agreement.agreement import begin
from manygrad.runtime.agreement.loops import agree, is_followed
from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.devices import canonical as local_canonical
from manygrad.runtime.devices import get_device
from manygrad.runtime.engine.computed import kept_on_the_way, remember, replace_lazy, see_computed
from manygrad.runtime.engine.functions import has_functions, run_functions
from manygrad.runtime.engine.garbage import Unasked
from manygrad.runtime.engine.linear import capture, compile_linear
from manygrad.runtime.engine.recovery import RealizeProgress, assigned, drop, lost, settle
from manygrad.runtime.executors.items import ExecItem, Vars
from manygrad.runtime.profile.counters import GlobalCounters, end_after_last_step
from manygrad.runtime.storage import STORAGE, buffers_of, spoil, storage
from manygrad.schedule import as_param, create_linear_with_vars, create_schedule
from manygrad.schedule.cache import Schedule
from manygrad.schedule.facts.buffers import unmoved
from manygrad.schedule.facts.index import contiguous_offset
from manygrad.schedule.plan import is_shared, shared_first
from manygrad.tensor.deferred.thread import flush_trace
from manygrad.tensor.dtype import DType, dtypes
from manygrad.tensor.engine import MadeCalls, default_device
from manygrad.tensor.environment import FAILED_STEPS
from manygrad.tensor.function import TRACING, refuse_traced
from manygrad.tensor.lock import locked
from manygrad.tensor.source import LINE, line_of, mark, user_line
from manygrad.tensor.storage import LIVE, MEMORY, MOVES, PENDING, Storage, rebased_views
from manygrad.tensor.stored import HISTORY, WRITTEN
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import BufferSpec, Ops, UOp, standing_on, toposort
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.shape import unviewed
from manygrad.tensor.uop.views import memory

_uids = itertools.count(1)  # the process's, as nodes are


def new_buffer(uop: UOp, device: str | tuple[str, ...]) -> UOp:
    """A BUFFER node for the value of `uop`."""
    axis, bounds = store_spec(uop) if isinstance(device, tuple) else (None, ())
    return UOp(Ops.BUFFER, uop.dtype, (), BufferSpec(next(_uids), tuple(uop.shape), uop.dtype, device, axis, bounds))


def _with_views(tensors: list[Tensor]) -> dict[int, list[Tensor]]:
    """By the id of each tensor that has yet to be computed and has live views, or is one of several: all those of its
    storage. They are computed as one, so that they stay one storage."""
    wanted = [
        (t, (s.own(), memory(t.uop)))
        for t in tensors
        if (s := t._storage) is not None and memory(t.uop).op not in MEMORY
    ]
    if not wanted:
        return {}
    found: dict[tuple[Storage, UOp], list[Tensor]] = {key: [] for _, key in wanted}
    for t in LIVE:
        if t._storage is not None and (same := found.get((t._storage.own(), memory(t.uop)))) is not None:
            same.append(t)
    return {id(t): found[key] for t, key in wanted if len(found[key]) > 1}


def _compiled(sink: UOp, agree: bool) -> tuple[list[ExecItem], Vars]:
    runtime = current()
    scheduled = create_linear_with_vars(sink, runtime.world, runtime.schedules, bool(capture))
    return _executors(Schedule(scheduled.linear, scheduled.plan), scheduled.buffers, agree), scheduled.var_vals


def _executors(schedule: Schedule, buffers: list[UOp], agree: bool) -> list[ExecItem]:
    """Executors of a schedule, on whose plan (with `agree`) all ranks have agreed."""
    agreement = begin(schedule.plan, schedule.linear, buffers) if agree else None
    items = compile_linear(schedule.linear, buffers, schedule.plan.key if schedule.plan else 0)
    if agreement is not None:
        agreement.end()
    if FAILED_STEPS.value:
        from manygrad.runtime.engine.failed_step import RECORDER  # (it loads the executors of collectives)

        return RECORDER.recorded(items, schedule.linear, buffers)
    return items


def _compiled_body(body: UOp, buffers: list[UOp], agree: bool) -> list[ExecItem]:
    """A traced body: PARAMs are numbered already, its results take the slots after the arguments'."""
    n, runtime = len(buffers) - len(body.src), current()
    kept = runtime.schedules.bodies.setdefault(body, {})
    schedule = kept.get(n)  # (a body need not read all of its arguments)
    if schedule is None:
        stores = tuple(
            UOp(Ops.STORE, dtypes.void, (as_param(b, n + i), u)) for i, (b, u) in enumerate(zip(buffers[n:], body.src))
        )
        sink, shared = shared_first(UOp(Ops.SINK, dtypes.void, stores), runtime.world)
        schedule = kept[n] = create_schedule(sink, runtime.world, runtime.schedules, shared)
    return _executors(schedule, buffers, agree)


def _applied(body: UOp, buffers: list[UOp]) -> UOp:
    """A body that calls other functions, on its arguments and the buffers of its results: a SINK as a user's."""
    n = len(buffers) - len(body.src)
    values = substitute(body, {u: buffers[u.arg.uid] for u in body.toposort() if u.op is Ops.PARAM}).src
    return UOp(Ops.SINK, dtypes.void, tuple(UOp(Ops.STORE, dtypes.void, (b, v)) for b, v in zip(buffers[n:], values)))


def _carry_out(
    sink: UOp, run: Callable[[list[ExecItem], Vars, bool], None], last: bool = True, agree: bool = True
) -> None:
    """Schedules and compiles a SINK; `run(executors, variables, whether nothing follows)` for each part of it.

    With `agree` all ranks come to the same plan before each part runs.
    """

    def run_body(body: UOp, buffers: list[UOp]) -> None:
        if has_functions(body):
            _carry_out(_applied(body, buffers), run, False, agree)
        else:
            run(_compiled_body(body, buffers, agree), {}, False)

    if has_functions(sink):
        sink = run_functions(
            sink,
            lambda u: new_buffer(u, u.device or default_device()),
            lambda s: run(*_compiled(s, agree), False),
            run_body,
        )
    items, var_vals = _compiled(sink, agree)
    run(items, var_vals, last)


def _stored(u: UOp, t: Tensor) -> UOp:
    """The STORE of `u`, the value of a tensor or what it is a view of, in a buffer of its own."""
    store = UOp(Ops.STORE, dtypes.void, (new_buffer(u, u.device or t._device), u))
    LINE[store] = LINE[store.src[0]] = line_of(u)
    return store


def _read_at(u: UOp) -> UOp:
    """The memory that `u` is a view of, or whose elements it has in another order;
    what it is a view of, where that is not in memory."""
    base = memory(u)
    return base if base.op in MEMORY else unviewed(u)


def _assignments(u: UOp) -> Iterator[UOp]:
    """The assignments to a tensor that wait, the first one first."""
    chain = [memory(u)]
    while chain[-1].op is Ops.AFTER:
        chain.append(chain[-1].src[0])
    return reversed(chain[:-1])


def _failure(effect: UOp) -> Exception | None:
    """Why an effect cannot be carried out; None where it could be scheduled and compiled on its own. Nothing is run."""
    try:
        _carry_out(UOp(Ops.SINK, dtypes.void, (effect,)), lambda items, vars, last: None, agree=False)
    except Exception as error:
        return error
    return None


def _failing(waiting: list[Tensor]) -> tuple[dict[UOp, str], list[Exception]]:
    """First assignment of each tensor that cannot be carried out, and why; the errors to raise."""
    failed: dict[UOp, str] = {}
    errors: list[Exception] = []
    for t in waiting:
        at = next(((u, e) for u in _assignments(t.uop) if (e := _failure(u)) is not None), None)
        if at is not None:
            failed[at[0]] = f"{type(at[1]).__name__}: {at[1]}"
            errors.append(_noted(at[1], t))
    return failed, errors


def _noted(error: Exception, t: Tensor) -> Exception:
    error.add_note(
        f"raised by an assignment to a tensor of shape {t.shape} that was waiting (line {line_of(t.uop)}); "
        "it is dropped, the tensor keeps the value it had"
    )
    return error


class RealizeEngine:
    """Implements `tensor.engine.Engine` on the local devices. Large: what tensors ask of an engine."""

    def __init__(self) -> None:
        self.clock = 0  # counts realizes, to tell what was written after a value was computed
        self.unasked = Unasked()

    @locked
    def realize(self, tensors: list[Tensor], pending: bool = True) -> None:
        waiting = self._waiting(tensors) if pending else []
        if all(t.uop.op is Ops.BUFFER for t in (*waiting, *tensors)):
            return
        # (a step that is followed without being run computes nothing: what others have put off stays so)
        if not any(r.is_dry for r in capture) and flush_trace() and pending:
            waiting = self._waiting(tensors)
        MOVES.computed += 1
        refuse_traced(tensors)
        self._keep_out_of_capture([*waiting, *tensors])
        if current().world.size > 1 and self.unasked.may_be_garbage(self._not_asked_for(waiting, tensors)):
            waiting.clear()  # (which holds them)
            gc.collect()
            waiting = self._waiting(tensors) if pending else []
            self.unasked.note_left(self._not_asked_for(waiting, tensors))
        progress = RealizeProgress()
        try:
            self._realize([*waiting, *tensors], progress)
        except Exception as error:
            # a part has run, or other ranks did not come, and to try again would be to go on without them:
            # what waits and was the reason must not fail the next realize, too
            if progress.final or isinstance(error, CollectiveError):
                drop(_failing([t for t in waiting if memory(t.uop).op is Ops.AFTER])[0], new_buffer)
                raise
            self._go_on_without(waiting, tensors, error)

    def carry_out(self, tensors: list[Tensor]) -> None:
        if not TRACING:
            self.realize(tensors, pending=False)

    def _not_asked_for(self, waiting: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """Assignments that wait, and lazy values which they overwrite."""
        asked = {id(t) for t in tensors}
        return [t for t in self._needed([*waiting, *tensors])[0] if id(t) not in asked]

    def _keep_out_of_capture(self, wanted: list[Tensor]) -> None:
        """Values from before a JIT began to record, which read what is about to be overwritten, are computed now,
        unrecorded: a replay must not compute them again."""
        for recording in capture:
            if not recording.is_paused:
                asked = {id(t) for t in wanted}
                early = [
                    t
                    for t in self._needed(wanted)[0]
                    if recording.holds(t) and id(t) not in asked and _read_at(t.uop).op not in MEMORY
                ]
                if early:
                    # (what cannot be computed is lost where it is overwritten)
                    with recording.paused(), suppress(Exception):
                        self.realize(early, pending=False)

    def _realize(self, wanted: list[Tensor], progress: RealizeProgress) -> None:
        todo, overwritten = self._needed(wanted)
        effects: list[UOp] = []
        becomes: dict[UOp, UOp] = {}
        own: dict[
            int, UOp
        ] = {}  # equal graphs are one node, but every tensor gets storage of its own: one may be assigned
        views = _with_views(todo)
        for t in todo:
            u = t.uop
            base = _read_at(u)
            if base.op is Ops.BUFFER or id(t) in own or any(isinstance(d, int) and d == 0 for d in u.shape):
                continue
            if base.op is Ops.AFTER:
                effects.append(base)
                continue
            together = views.get(id(t), [t])
            u = u if len(together) == 1 else memory(u)
            effects.append(store := _stored(u, t))
            buffer = store.src[0]
            becomes.setdefault(u, buffer)
            own |= {id(s): now for s, now in rebased_views(together, u, buffer)}
        if not effects:
            for t in todo:
                PENDING.discard(t)
            return
        for u in kept_on_the_way(effects, overwritten):
            if u in becomes:  # (stored as it is)
                continue
            becomes[u] = new_buffer(u, u.device or default_device())
            effects.append(UOp(Ops.STORE, dtypes.void, (becomes[u], u)))
        sink = UOp(Ops.SINK, dtypes.void, tuple(dict.fromkeys(effects)))
        try:
            _carry_out(sink, progress.run)
            progress.complete = progress.final = True
            self._commit(todo, sink, becomes, own, overwritten)
        except BaseException:
            if progress.complete:  # an interrupt in between: what ran has run
                self._commit(todo, sink, becomes, own, overwritten)
            elif progress.begun:
                self.clock += 1
                progress.final |= settle(sink, own, overwritten, progress, self.clock, new_buffer)
            raise

    def _commit(
        self, todo: list[Tensor], sink: UOp, becomes: dict[UOp, UOp], own: dict[int, UOp], overwritten: set[UOp]
    ) -> None:
        """Makes what has been computed storage from now on."""
        computed = {u: b for u, b in becomes.items() if u.op is not Ops.AFTER}
        for u in sink.toposort():
            if u.op is Ops.AFTER:
                becomes[u] = assigned(u)
        current().faults.note(sink)
        self.clock += 1
        remember(computed, becomes, overwritten, self.clock)
        replace_lazy(becomes, own)
        for t in todo:
            PENDING.discard(t)

    # *** failures of what was to run next ***

    def _go_on_without(self, waiting: list[Tensor], tensors: list[Tensor], error: Exception) -> None:
        """`error` came of what is asked for, or of what else had to be done: assignments that wait, lazy values they
        overwrite. These must not fail all that is asked for from now on: those that cannot be carried out are dropped,
        the others are carried out.
        """
        asked = {id(t) for t in tensors}
        also = [
            t for t in self._needed([*waiting, *tensors])[0] if id(t) not in asked and not any(t is w for w in waiting)
        ]
        if not waiting and not also:
            raise error
        failed, errors = _failing(waiting)
        broken = [
            (t, e)
            for t in also
            if _read_at(t.uop).op is not Ops.AFTER and (e := _failure(_stored(t.uop, t))) is not None
        ]
        for t, e in broken:
            lost(
                t,
                f"a value of shape {t.shape} (line {line_of(t.uop)}) could not be computed when what it reads was "
                f"overwritten ({type(e).__name__}: {e}), and is lost",
                new_buffer,
            )
        drop(failed, new_buffer)
        if failed or broken:
            try:
                self.realize(tensors)
            except Exception as later:
                raise errors[0] if errors else later from later.__cause__
            if errors:
                raise errors[0]
            return
        if any(
            _failure(_stored(t.uop, t)) is not None
            for t in tensors
            if _read_at(t.uop).op not in (Ops.BUFFER, Ops.AFTER)
        ):
            raise error
        for t in (*also, *waiting):  # each can be done, not all at once: a variable with two values, too little memory
            together = self._needed([t])[0]
            try:
                self._realize([t], RealizeProgress())
            except Exception as e:
                after = {u for x in together if (u := _read_at(x.uop)).op is Ops.AFTER}
                if after:
                    drop(dict.fromkeys(after, f"{type(e).__name__}: {e}"), new_buffer)
                    errors.append(_noted(e, t))
        self._realize(tensors, RealizeProgress())
        if errors:
            raise errors[0]

    def _waiting(self, tensors: list[Tensor]) -> list[Tensor]:
        """The assignments that a realize of `tensors` carries out besides.

        On several workers one that needs no communication is carried out at once, by itself, and one that does waits
        for a realize in which all ranks take part: so ranks come to the same plans although one of them reads a value
        of its own in between.
        """
        waiting, world = PENDING.mine(), current().world
        if world.size == 1 or not waiting:
            return waiting
        asked = {id(t) for t in tensors}
        rest = [t for t in waiting if id(t) not in asked]
        alone = [t for t in rest if not is_shared(t.uop, world)]
        if alone:
            lazy = [t.uop for t in LIVE if t.uop.op is not Ops.BUFFER and is_shared(t.uop, world)]
            read = set(toposort(lazy, lambda u: u.op is not Ops.AFTER))  # before assignments that wait
            alone = [t for t in alone if read.isdisjoint(a.src[0] for a in _assignments(t.uop))]
        if alone:
            self.realize(alone, pending=False)
            rest = [t for t in rest if memory(t.uop).op is Ops.AFTER]
        return rest if any(is_shared(t.uop, world) for t in tensors) else []

    def new_buffer(self, uop: UOp, device: str | tuple[str, ...]) -> UOp:
        return new_buffer(uop, device)

    def _needed(self, tensors: list[Tensor]) -> tuple[list[Tensor], set[UOp]]:
        """The tensors, and all others that still need a value about to be overwritten, lazy ones and assigned ones;
        those values."""
        todo = {id(t): t for t in tensors}
        writes: set[UOp] = set()
        added = tensors
        while found := {u for u in toposort(t.uop for t in added) if u.op is Ops.AFTER} - writes:
            writes |= found
            written = {u.src[0] for u in writes}  # buffers, and assigned values that a later assignment overwrites
            computed = {t.uop for t in todo.values()}
            lazy = [t for t in LIVE if id(t) not in todo and _read_at(t.uop).op is not Ops.BUFFER]
            readers = standing_on([t.uop for t in lazy], written.__contains__, writes.__contains__)
            added = [t for t in lazy if t.uop in readers and (u := _read_at(t.uop)) not in computed and u not in writes]
            todo |= {id(t): t for t in added}
        # collectives are numbered as they are met: what reads a value from before an
        # assignment comes before what reads it after
        several = bool(writes) and any(isinstance(t.uop.device, tuple) for t in todo.values())
        return [t for t in LIVE if id(t) in todo] if several else list(todo.values()), {u.src[0] for u in writes}

    def from_numpy(self, array: np.ndarray, dtype: DType, device: str | tuple[str, ...], share: bool = False) -> UOp:
        if array.size == 0:
            flat = UOp(Ops.RESHAPE, dtype, (UOp.const(dtype, 0),), (1,) * array.ndim)
            return UOp(Ops.EXPAND, dtype, (flat,), array.shape)
        u = UOp(Ops.BUFFER, dtype, (), BufferSpec(next(_uids), tuple(array.shape), dtype, device))
        if current().world.size > 1:
            mark(u)  # errors about values that ranks hold name the line where they come from
        if isinstance(device, str):
            shared = Buffer.over(device, array, dtype) if share else None
            STORAGE[u] = shared or Buffer(device, array.size, dtype).copyin(array)
        else:
            for b in buffers_of(u):
                b.copyin(array)
        return u

    def map_file(self, path: str, parts: list[tuple[DType, tuple[int, ...], int]]) -> list[UOp]:
        """BUFFERs on `DISK:path`, one for each (dtype, shape, offset in bytes);
        the file is mapped once, nothing is read yet."""
        device = f"DISK:{path}"
        ends = [offset + prod(shape) * dtype.itemsize for dtype, shape, offset in parts]
        whole = Buffer(device, max([os.path.getsize(path) if os.path.exists(path) else 0, *ends]), dtypes.uint8)
        out = []
        for dtype, shape, offset in parts:
            u = UOp(Ops.BUFFER, dtype, (), BufferSpec(next(_uids), shape, dtype, device))
            STORAGE[u] = whole.view(prod(shape), dtype, offset)
            out.append(u)
        return out

    def part_of_file(self, uop: UOp, dtype: DType, shape: tuple[int, ...]) -> UOp | None:
        base, device = unmoved(uop), uop.device
        assert device is not None
        if (
            not isinstance(device, str)
            or base.op is not Ops.BUFFER
            or not uop.shape
            or not all(isinstance(d, int) and d for d in (*uop.shape, *base.shape))
        ):
            return None
        offset = 0 if uop is base else contiguous_offset(uop, base)
        if offset is None:
            return None
        u = UOp(Ops.BUFFER, dtype, (), BufferSpec(next(_uids), shape, dtype, device))
        found = storage(base)
        assert isinstance(found, Buffer)
        STORAGE[u] = found.view(prod(shape), dtype, offset * uop.dtype.itemsize)
        return u

    @locked
    def to_numpy(self, buffer: UOp) -> np.ndarray:
        if capture:
            raise RuntimeError(
                "a value is read (numpy(), item(), tolist()) while a TinyJit records: "
                "a replay would not read it again; return the tensor and read it outside"
            )
        current().faults.look()
        found = storage(buffer)
        whole = found if isinstance(found, Buffer) else next(b for b in found if b is not None)
        return whole.copyout().reshape(buffer.shape)

    def has_copy(self, buffer: UOp) -> bool:
        """Whether this worker has one of several copies of a stored value."""
        found = STORAGE.get(buffer)
        return isinstance(found, list) and buffer.arg.axis is None and any(b is not None for b in found)

    def share(self, buffer: UOp) -> np.ndarray | None:
        current().faults.look()
        found = storage(buffer)
        assert isinstance(found, Buffer), "share of a buffer on several devices"
        array = found.as_numpy()
        return None if array is None else array.reshape(buffer.shape)

    def canonical(self, device: str) -> str:
        """`cpu:1` -> `CPU:1`; the node is kept where there are several: `CPU:0@2`."""
        local = local_canonical(device)
        if "@" not in device or (world := current().world).size == 1:
            return local
        node = device.partition("@")[2]
        if not node.isdecimal() or int(node) >= world.size:
            raise ValueError(
                f"device {device!r}: node {node} does not exist, the world has {world.size} (0..{world.size - 1})"
            )
        return f"{local}@{int(node)}"

    def follows(self, device: str | tuple[str, ...] | None) -> bool:
        return is_followed(device, current().world.size)

    def is_read_by_all(self, uop: UOp) -> bool:
        world = current().world
        return world.size == 1 or is_shared(uop, world)

    def communicated(self) -> int:
        runtime = current()
        return runtime.communication.entered_count if runtime.world.size > 1 else 0

    def note_loop(self) -> None:
        current().communication.has_loops = True

    def agree(self, place: int, how: int) -> int:
        return agree(place, how)

    def workers(self) -> tuple[int, int]:
        return current().world.rank, current().world.size

    def world(self) -> World:
        return current().world

    def on_host(self, device: str) -> bool:
        found = get_device(device)
        return found.allocator.host is not None or found.kind == "NULL"  # (which has none)

    def sharding_axis(self, uop: UOp) -> int | None:
        return store_spec(uop)[0] if isinstance(uop.device, tuple) else None

    def store_spec(self, uop: UOp) -> tuple[int | None, tuple[int, ...]]:
        return store_spec(uop)

    def differs_by_rank(self, buffer: UOp) -> None:
        found = storage(buffer)
        assert isinstance(found, Buffer), "a tensor that is on several devices differs by nature"
        found.agreed = True

    def refuse_in_capture(self, what: str) -> None:
        if capture:
            raise JitError(f"{user_line()}: {what}")

    def capture_calls(
        self,
        fn: Callable[..., list[Tensor]],
        inputs: list[Tensor],
        state: list[Tensor],
        writes: bool,
        kept: list[Tensor],
    ) -> MadeCalls:
        from manygrad.runtime.jit.calls import capture_calls  # (which stands on this module)

        return capture_calls(fn, inputs, state, writes, kept)

    @locked
    def take_stored(self, values: list[tuple[Tensor, UOp]], others: list[Tensor]) -> None:
        becomes: dict[UOp, UOp] = {}
        for t, u in values:
            if u.op is Ops.BUFFER:
                becomes.setdefault(t.uop, u)
            elif memory(t.uop).op not in MEMORY and memory(u).op is Ops.BUFFER:
                becomes.setdefault(memory(t.uop), memory(u))
        becomes = {u: b for u, b in becomes.items() if u is not b}
        self.clock += 1
        remember(becomes, becomes, set(), self.clock)
        taken = {id(t) for t, _ in values}
        for t, u in values:
            t.uop, t._storage = u, None
        see_computed([t for t in others if id(t) not in taken], becomes)

    def begin_update(self) -> None:
        end_after_last_step()

    @locked
    def note_written(self, buffers: Iterable[UOp]) -> None:
        self.clock += 1
        for u in buffers:
            WRITTEN[u] = self.clock
            if u in HISTORY:  # (of what was there)
                HISTORY[u] = (None, self.clock)

    def count_update(self) -> None:
        GlobalCounters.updates += 1

    def is_realized(self, buffer: UOp) -> bool:
        return buffer in STORAGE

    def word_of(self, what: str, low: int, size: int, line: str, device: str | tuple[str, ...]) -> UOp:
        return current().faults.word_of(what, low, size, line, device)

    @locked
    def lose(self, t: Tensor, why: str) -> None:
        lost(t, why, new_buffer)

    @locked
    def spoil(self, buffer: UOp, why: str) -> None:
        spoil(buffer, why)


def synchronize(device: str | None = None) -> None:
    """Waits until everything started on `device` has ended."""
    get_device(device or default_device()).synchronize()
