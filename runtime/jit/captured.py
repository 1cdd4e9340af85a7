"""Captured: the calls that a recording became, made again with other arguments."""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from manygrad.errors import JitError
from manygrad.native.replay import STOPPED
from manygrad.runtime.buffer import Buffer, copy_buffer
from manygrad.runtime.current import current
from manygrad.runtime.engine.garbage import Unasked
from manygrad.runtime.executors.items import ExecItem, run_items
from manygrad.runtime.jit.arguments import (
    Input,
    binds,
    check_constants,
    check_inputs,
    check_numbers,
    refuse_shared_memory,
    unbound,
)
from manygrad.runtime.jit.batch import batch_kernels, beside_each_other, joined_calls
from manygrad.runtime.jit.following import Following, described
from manygrad.runtime.jit.memory import address, stored, united, whole
from manygrad.runtime.jit.native_replay import NativeReplay, native_call
from manygrad.runtime.jit.recording import Named, Recorded, overwrites, tensors_of
from manygrad.runtime.jit.results import ResultMemory, Results
from manygrad.runtime.jit.sources import ResultSources
from manygrad.runtime.storage import STORAGE, buffers_of
from manygrad.tensor.engine import engine
from manygrad.tensor.environment import DEBUG, JIT, JIT_CHECK
from manygrad.tensor.guards import Guards
from manygrad.tensor.storage import LIVE, TensorSet, is_stored, keep_copy
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp, toposort
from manygrad.tensor.uop.views import memory

T = TypeVar("T")
Constants = list[tuple[str, Any]]  # arguments that are neither tensors nor variables, each with the path to it
Numbers = list[tuple[str, UOp]]  # arguments made of variables, each with the path to it


class Captured(Generic[T]):
    """A capture: the calls, what they read and write, and what the function returns. Large: all that a replay looks
    at is kept beside them."""

    guards: Guards

    def __init__(
        self,
        recorded: Recorded,
        tensors: Named,
        constants: Constants,
        numbers: Numbers,
        bound: Mapping[UOp, int],
        donate: bool,
    ) -> None:
        """`tensors`, `constants`, `numbers`: the arguments of the call that was recorded; `bound`: its variables."""
        self.inputs, self.constants = recorded.inputs, constants
        self.variables = frozenset(bound)
        self.numbers = [(path, unbound(u)) for path, u in numbers]
        out = replaced(recorded.out, {id(t): i.own for i, (_, t) in zip(self.inputs, tensors)})
        calls = beside_each_other([(i, v) for items, v in recorded.calls for i in items])
        if not calls:
            raise JitError("the function computed nothing that could be captured; realize or return what it makes")
        names = [v.arg.name for v in bound]
        self.items = joined_calls(batch_kernels(calls, names)) if JIT.value == 1 else [i for i, _ in calls]
        if DEBUG >= 1:
            print(f"JIT captured {len(calls)} calls as {len(self.items)}")
        results = [t for _, t in tensors_of(out)]
        written = set() if donate else recorded.overwritten
        self.results = Results(out, self.inputs, self.items, written, recorded)
        self.symbolic = any(binds(i.own) for i in self.inputs)  # inputs have symbolic dims
        followed = not (bound or recorded.has_computed or self.symbolic or current().communication.endpoint)
        self.following = Following(described(recorded.calls, recorded.there), bool(JIT_CHECK and followed))
        self.overwritten = recorded.overwritten - self.results.buffers
        self.sources = ResultSources(self.inputs, self.results.slots, recorded.known)
        self.state = [weakref.ref(u) for u in recorded.known if overwrites(self.overwritten, u)]  # that it writes
        owns = {id(i.own) for i in self.inputs}
        read = set(toposort([t.uop for t in (*results, *(t for t in LIVE if id(t) not in owns))]))
        for i in self.inputs:
            i.moves = moves_of(i, self.items, read)
        self.writes = any(i.written for i in self.inputs)  # the function assigns inputs
        self.vars = {k: x for _, v in recorded.calls for k, x in v.items()}
        occupied = [b for i, _ in calls for b in i.written if address(b) and b not in self.results.buffers]
        self.occupied = united((address(b), address(b) + b.nbytes) for b in occupied)
        own = {id(b): b for item in self.items for b in map(whole, item.buffers) if id(b) not in recorded.there}
        self.nbytes = sum(b.nbytes for b in own.values())  # memory of its own
        # what the last replay read in place, if its arguments were tensors, all of them read so, and nothing else
        self.last: list[weakref.ref[UOp]] | None = None
        self.unasked = Unasked()
        self.native: NativeReplay | None = None  # the replay without Python, once there was one
        current().devices.trim()  # a replay needs none of what the calls before it left

    def __del__(self, live: TensorSet = LIVE) -> None:
        live.forget(self)

    def holds(self) -> bool:
        """Whether what it depends on besides its arguments is as it was."""
        return self.guards.hold() and self.results.gradients.fit()

    def replay(self, tensors: Named, constants: Constants, numbers: Numbers, bound: Mapping[UOp, int]) -> T:
        """The calls, for these arguments."""
        var_vals = {v.arg.name: value for v, value in bound.items()}
        check_inputs(self.inputs, tensors)
        if constants or self.constants:
            check_constants(self.constants, constants)
        if numbers or self.numbers:
            check_numbers(self.numbers, numbers, var_vals)
        return self.make([t for _, t in tensors], var_vals)

    def make(self, tensors: list[Tensor], var_vals: dict[str, int]) -> T:
        """The calls, for arguments of the kinds that were captured, and values of the variables."""
        if self.writes:
            self._refuse_results(tensors)
        self.results.renew(self)
        passed = [(i, t, stored(t)) for i, t in zip(self.inputs, tensors) if i.twin is None]
        for i, t, plain in passed:
            self._pass(i, plain)
            i.in_place &= plain is t
        self.keep_old_values()
        run_items(self.items, {**self.vars, **var_vals} if var_vals else self.vars)
        for i, t in zip(self.inputs, tensors) if self.writes else ():
            if i.written:
                t.assign(i.own).realize()
        self.sources.note([memory(t.uop) for t in tensors])
        given = {id(i.own): t for i, t in zip(self.inputs, tensors)}
        return cast(T, self.results.build(given, var_vals))

    def remember(self, tensors: Named) -> None:
        """After a replay whose arguments were these tensors and nothing else: whether it read them in place."""
        plain = not (self.variables or self.writes or self.symbolic)
        in_place = plain and all(i.twin is None and i.in_place for i in self.inputs)
        self.last = [weakref.ref(t.uop) for _, t in tensors] if in_place else None

    def replay_in_place(self) -> T:
        """The calls, for what the last replay read."""
        self.items[0].wake()
        self.results.renew(self)
        self.keep_old_values()
        run_items(self.items, self.vars)
        return self.result(True)

    def result(self, is_new: bool) -> T:
        """What the last replay, of what the one before it read, gives. `is_new`: there is something that the sources of
        the last result do not tell."""
        if is_new:
            self.sources.note([ref() for ref in self.last or ()])
        return cast(T, self.results.build({}, {}))

    def prepare(self) -> NativeReplay | None:
        """The native replay of what the last one read, None where that needs Python."""
        assert self.last is not None
        results, call = self.results, native_call(self.items, self.vars)
        if call is None or results.need_python():
            return None
        self.native = self.native or NativeReplay(results, id(self))
        self.native.prepare(self.guards, self.last, *call)
        return self.native

    def replay_natively(self, native: NativeReplay, args: tuple[Any, ...]) -> tuple[bool, T | None]:
        """Whether native code made the calls for these arguments, and what they give. Nothing was done where it did
        not, but that the calls read other arguments where they lie, and that results which the caller holds are left,
        which the next replay does not write."""
        moved, was_last = list[ResultMemory](), next(reversed(LIVE.keys), None) == id(self)
        is_looked_at = False  # whatever else native code does not look at
        while not (done := native.replay.call(*args)):
            left = native.leave_what_is_held()
            if left is not None:
                if was_last:  # (what was made for that is not new)
                    LIVE.newer(self)
                moved.append(left)
            elif is_looked_at or native.replay.changed >= 0 or not self._point_to(native, args):
                self.results.note(moved)
                return False, None
            else:
                self.keep_old_values()
                is_looked_at = was_last = True
        self.results.note(moved)
        if done == STOPPED:
            self._go_on()
        return True, self.result(is_looked_at or bool(moved))

    def _point_to(self, native: NativeReplay, args: tuple[Any, ...]) -> bool:
        """Has the calls read these arguments where they lie, if all are of the kinds that were captured."""
        last = self.last
        if last is None or len(args) != len(last):
            return False
        places: list[tuple[Input, Buffer]] = []
        now = [weakref.ref(t.uop) if isinstance(t, Tensor) else None for t in args]
        for i, ref, seen in zip(self.inputs, now, last):
            u = None if ref is None else ref()
            if u is None or ref is seen:
                continue
            spec, src = u.arg, STORAGE.get(u)
            if u.op is not Ops.BUFFER or not isinstance(src, Buffer):
                return False
            if (spec.shape, spec.dtype, spec.device, None) != i.kind:
                return False
            if address(src) != i.at:
                (own,) = buffers_of(i.own.uop)
                if i.moves is None or not i.at or src.device is not own.device or self._writes(src):
                    return False
                places.append((i, src))
        refs = [ref for ref in now if ref is not None]
        if len(refs) != len(last):
            return False
        for i, src in places:
            for move in i.moves or ():
                move(src.handle)
            i.at = address(src)
        self.last = refs
        native.replay.point_to(refs)
        return True

    def _go_on(self) -> None:
        """Makes the rest of the calls in Python after a native replay that stopped before its end."""
        (item,) = self.items
        try:
            item.go_on(self.vars)
        except BaseException:
            current().communication.drain()
            raise

    def _refuse_results(self, tensors: list[Tensor]) -> None:
        refuse_shared_memory(self.inputs, tensors)
        for i, t in zip(self.inputs, tensors):
            if i.written and overwrites(self.overwritten, memory(t.uop)):
                raise JitError(
                    f"{i.path} is assigned by the function, and lies where the function writes something else, a "
                    "result perhaps; pass a clone()"
                )

    def keep_old_values(self) -> None:
        """What was made lazily of the state or of a result (`total = total + step(x)`), and is not computed yet,
        must not see what is written now, nor backward() from what is."""
        made = LIVE.newer(self)
        if not made:
            return
        lazy = [t for t in made if not is_stored(t.uop)]
        reads = lambda t: any(u.op is Ops.BUFFER and overwrites(self.overwritten, u) for u in t.uop.toposort())  # noqa: E731
        early = [t for t in lazy if reads(t)]
        made.clear()
        lazy.clear()  # (which hold them)
        for t in self.unasked.left(early):
            try:
                keep_copy(t)
                t.realize()
            except Exception as e:  # it must not fail the step: whoever reads it gets the error
                engine().lose(
                    t,
                    f"a value of shape {t.shape} could not be computed when a TinyJit overwrote what it reads "
                    f"({type(e).__name__}: {e}), and is lost",
                )
        engine().note_written(u for ref in self.state if (u := ref()) is not None)

    def _writes(self, b: Buffer) -> bool:
        """Whether the calls write where `b` lies."""
        begin = address(b)
        if not begin:
            return True  # (not known where it lies)
        for s in self.results.slots:
            if s.overlaps(begin, begin + b.nbytes):
                return True
        i = bisect(self.occupied, (begin + b.nbytes, 0))  # those before begin before `b` ends
        return i > 0 and self.occupied[i - 1][1] > begin

    def _pass(self, i: Input, t: Tensor) -> None:
        """Has the calls read `t`."""
        i.in_place = True
        for dst, src in zip(buffers_of(i.own.uop), buffers_of(t.uop)):
            if i.moves is not None:
                if i.at and address(src) == i.at and dst is not src:  # it lies where the last one did
                    continue
                free = src.device is dst.device and not self._writes(src)
                for move in i.moves:
                    move((src if free else dst).handle)
                i.at = address(src) if free else 0
                if free:
                    continue
            if dst is not src:
                i.in_place = False
                copy_buffer(dst, src)


def replaced(x: Any, by: dict[int, Tensor]) -> Any:
    """A result with tensors replaced by identity."""
    if isinstance(x, Tensor):
        return by.get(id(x), x)
    if isinstance(x, (list, tuple)):
        items = [replaced(y, by) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return {k: replaced(y, by) for k, y in x.items()} if isinstance(x, dict) else x


def moves_of(i: Input, items: list[ExecItem], read: set[UOp]) -> list[Callable[[Any], None]] | None:
    """Functions that have each item read other memory in place of the input's own; None where one cannot, or where the
    input is a result, or a tensor that is still alive was made of it: these stand on the nodes in `read`."""
    buffers = buffers_of(i.own.uop)
    if i.twin is not None or i.written or len(buffers) != 1 or i.own.uop in read:
        return None
    readers = [item for item in items if any((b.base or b) is buffers[0] for b in item.buffers)]
    found = [item.mover(buffers[0]) for item in readers]
    return None if None in found else [move for move in found if move is not None]
