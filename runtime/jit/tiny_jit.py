"""TinyJit: capture the calls of a step once, then replay them with next to no Python.

The first call runs as it is (and lets state such as optimiser buffers come to be), the second is recorded, later ones
are replayed: inputs are read where they lie, or copied into the captured input buffers, runs of kernels go out as one
native call, and what the function returned is returned again, holding the new values. Arguments that do not fit what
was captured raise (`arguments.py`), but for other shapes, which run as they are once and are captured, too. With
`warmup=0` the first call is recorded already, unless it makes state.

The captured input buffers are the capture's own, so that the caller may free or overwrite what it passed; an input that
the function writes is written back. A replay reads an input in place (`Input.moves`) where only native calls read it,
nothing that they write lies in its memory, and nothing that outlives the call was made of it. Assignments from outside
that are still pending run before the step, not as a part of it (those of another thread are that thread's to realize).
Recording holds the front end's lock: other threads wait until it ends.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from manygrad.errors import JitError
from manygrad.runtime.current import current
from manygrad.runtime.engine.linear import capture
from manygrad.runtime.jit.arguments import (
    Shapes,
    binds,
    binds_of,
    bound_values,
    has_other_shapes,
    listed,
    shapes_of,
    walk,
)
from manygrad.runtime.jit.captured import Captured, Constants, Numbers, replaced
from manygrad.runtime.jit.native_replay import NativeReplay
from manygrad.runtime.jit.recording import Named, lazy_readers, read_from, realize_all, record, tensors_of
from manygrad.runtime.profile import profile
from manygrad.runtime.profile.counters import GlobalCounters, end_after_last_step
from manygrad.tensor.deferred.thread import at_once, end_trace, forget_traces
from manygrad.tensor.environment import JIT, LAST_STEP
from manygrad.tensor.guards import NUMBERS, Guards
from manygrad.tensor.lock import LOCK
from manygrad.tensor.storage import LIVE, PENDING, TensorSet, assignments, is_stored
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp
from manygrad.tensor.uop.views import memory

T = TypeVar("T")
MOST_CAPTURES = 16  # of one function, the last used ones, each for what it read and for shapes of its arguments
MOST_BYTES = 1 << 30  # of memory that these hold; the last used one may hold more
MOST_SHAPES = 1024  # of arguments, of calls that ran as they are
MANY_CHANGES = 8  # after so many new captures a warning says why
_made: weakref.WeakSet[TinyJit[Any]] = weakref.WeakSet()


def forget_captures() -> None:
    """Forgets the captures of all TinyJits and plain loops, which cannot be replayed any more."""
    forget_traces()
    for jit in list(_made):
        jit.reset()


class TinyJit(Generic[T]):
    """`step = TinyJit(step)`, or as a decorator. Positional and keyword Tensors (also nested in lists, tuples, dicts)
    are inputs, of which each set of shapes is captured on its own; bound variables may change their value from call to
    call; other arguments must stay as they were.

    Everything the function changes must be realized by it or be returned; returned tensors are realized. A tensor that
    is an argument of the call that is captured is that argument wherever the function uses it: state that the
    function has without being given it is not to be passed.

    `warmup`: how many calls run as they are before one is captured, 1 or 0. With 0 the first one is captured, for
    functions whose state is in memory already; where it turns out that the call made state (a tensor that it wrote,
    that is no result and lives on), it was a call that ran as it is, and the second one is captured.

    What it returns is the caller's: a later call writes elsewhere as long as something refers to it. `donate`: results
    lie where they lay before, and show what the last call gave.
    """

    def __init__(self, fn: Callable[..., T], warmup: int = 1, donate: bool = False):
        if warmup not in (0, 1):
            raise ValueError(f"TinyJit: warmup is 1 or 0, the calls that run as they are, not {warmup!r}")
        _made.add(self)
        self.fn, self.warmup, self.donate = fn, warmup, donate
        self.reset()

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        """As a decorator of methods: one capture per instance."""
        if obj is None:
            return self
        name = f"_jit_{self.fn.__name__}"
        if name not in obj.__dict__:
            obj.__dict__[name] = TinyJit(self.fn.__get__(obj), self.warmup, self.donate)
        return obj.__dict__[name]

    def reset(self) -> None:
        """Forget the capture."""
        self.is_warm = not self.warmup  # the next call is captured
        self.assigned: TensorSet | None = TensorSet() if self.warmup else None  # by the first call, if there was one
        self.captured: Captured[T] | None = None
        self.captures: list[Captured[T]] = []  # for what the function read when each was made
        self.warm: list[Guards] = []  # what it read in calls that ran as they are
        self.warm_shapes: dict[Shapes, None] = {}  # of the arguments of such calls, the newest one last
        self.changes = 0
        self.crowded_out = 0  # captures that went because there were others
        self.ignored: set[str] = set()  # numbers that the function itself changes
        self.again: NativeReplay | None = None  # the native replay, where it is prepared for what the last one read

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        end_trace()
        native, captured = self.again, self.captured
        if native is not None and captured is not None and not kwargs and captured.following.left != 1:
            with LOCK:
                try:
                    is_made, out = captured.replay_natively(native, args)
                except BaseException:
                    self.again = None
                    raise
            if is_made:
                captured.following.is_due()  # (which counts it)
                return cast(T, out)
            if native.replay.changed >= 0:
                self.again = None  # (it is prepared for what there is now)
        if captured is None or not captured.holds():
            if self.captures:
                with LOCK:
                    self._choose()
        captured = self.captured
        is_due = captured is not None and captured.following.is_due()
        end_after_last_step()
        GlobalCounters.steps += 1
        if not profile.active:
            if not self.is_warm:
                return self._call(args, kwargs)  # runs as it is
            with LOCK:
                if not is_due and self._repeats(args, kwargs):
                    return self._run_again()
                return self._call(args, kwargs, is_due)
        start = time.perf_counter()
        try:
            with LOCK:
                return self._call(args, kwargs, is_due)
        finally:
            profile.record(
                "steps", f"{getattr(self.fn, '__name__', 'step')} {GlobalCounters.steps}", start, time.perf_counter()
            )

    def _choose(self, tensors: Named | None = None) -> None:
        """Something that the function may read has changed, or the shapes of its arguments (`tensors`): the capture for
        what it reads now, or none yet, and then whether it has run so before."""
        now, before = Guards(self.fn), self.captured
        found = next(
            (
                c
                for c in reversed(self.captures)
                if (tensors is None or not has_other_shapes(c.inputs, tensors))
                and c.results.gradients.fit()
                and not now.differences(c.guards, self.ignored)
            ),
            None,
        )
        if found is not None:
            found.guards = now
            self.captures.remove(found)
            self.captures.append(found)
        if found is not None and found is before:
            return
        self.captured, self.again = found, None
        if found is not None:
            return
        self.is_warm = not self.warmup or any(not now.differences(g, self.ignored) for g in self.warm)
        if not self.warmup:
            self.assigned = None  # (the call may make state)
        if tensors is None and (before is not None or not self.is_warm):
            self._tell_of_changes(before.guards if before is not None else self.warm[-1], now)

    def _choose_by_shapes(self, tensors: Named) -> None:
        """The arguments have other shapes: the capture for these."""
        fits = (c for c in reversed(self.captures) if not has_other_shapes(c.inputs, tensors) and c.holds())
        found = next(fits, None)
        if found is None:
            self._choose(tensors)
            return
        self.captured, self.again = found, None
        self.captures.remove(found)
        self.captures.append(found)

    def _tell_of_changes(self, before: Guards, now: Guards) -> None:
        """One line, once, where a step is captured again and again."""
        self.changes += 1
        if self.changes == MANY_CHANGES:
            paths = now.differences(before, self.ignored)[:3]
            told = "; ".join(f"{p} was {before.told(p)}, now it is {now.told(p)}" for p in paths)
            told = told or "gradients that backward() adds to, which are others now; call zero_grad() in the step"
            warnings.warn(
                f"what the TinyJit of {getattr(self.fn, '__qualname__', 'a step')} reads has changed {MANY_CHANGES} "
                f"times, and each time the step ran in Python and was captured anew; last: {told}. Pass what changes "
                "often as a Tensor or a bound Variable, or make a TinyJit for each",
                stacklevel=4,
            )

    def _repeats(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments are the memory that the last replay read: then what a replay checks is as it was."""
        last = None if self.captured is None else self.captured.last
        if last is None or len(args) != len(last) or kwargs or len(PENDING) or capture or not JIT:
            return False
        for a, seen in zip(args, last):
            if not isinstance(a, Tensor) or a.uop is not seen():
                return False
        return True

    def _run_again(self) -> T:
        captured, again = self.captured, self.again
        assert captured is not None
        self.again = None  # (also where it fails: its rows may be of results that were left)
        result = captured.replay_in_place()
        self._prepare(captured, again)
        return result

    def _prepare(self, captured: Captured[T], again: NativeReplay | None) -> None:
        """After a replay in Python, the native one of what that read. `again`: what was prepared before."""
        if captured.last is None:
            self.again = None
        elif again is not None and again is captured.native and again.replay.holds():
            again.look_at_slots()
            again.replay.point_to(captured.last)
            self.again = again
        else:
            self.again = captured.prepare()
        if LAST_STEP:  # (which counts no steps in Python, but is made, for a cache that is to have all)
            self.again = None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_due: bool = False) -> T:
        with at_once():
            return self._call_at_once(args, kwargs, is_due)

    def _call_at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_due: bool) -> T:
        if not JIT:
            return self._run_plain(args, kwargs)
        if capture and self.is_warm:
            raise JitError(
                "a TinyJit is called while another one is recording; call it outside, or leave the inner one out"
            )
        captured = self.captured
        if captured is not None:
            captured.items[0].wake()
        tensors: Named = []
        numbers: Numbers = []
        constants: Constants = []
        walk(args, "argument", tensors, numbers, constants)
        if kwargs:
            walk(kwargs, "argument", tensors, numbers, constants)
        given = [b for _, v in numbers for b in binds_of(v)]
        if captured is None or captured.symbolic:
            given += [b for _, t in tensors for b in binds(t)]
        bound = bound_values(given) if given else {}
        outside = [*PENDING.mine(), *[t for _, t in tensors if t.uop.op is not Ops.BUFFER]]
        if outside:
            outside[0].realize(*outside[1:])
        if captured is not None and has_other_shapes(captured.inputs, tensors):
            if is_due:
                captured.following.left, is_due = 1, False  # (it is followed the next time that it is replayed)
            self._choose_by_shapes(tensors)
            captured = self.captured
        if captured is None and self.warmup:
            shapes = shapes_of(tensors)
            self.is_warm &= shapes in self.warm_shapes
            self.warm_shapes.pop(shapes, None)
            self.warm_shapes[shapes] = None
            while len(self.warm_shapes) > MOST_SHAPES:
                del self.warm_shapes[next(iter(self.warm_shapes))]
        if not self.is_warm:
            self.is_warm = True
            return self._run_first(args, kwargs)
        if captured is None:
            self._compute_what_reads_state()
            return self._capture(args, kwargs, tensors, constants, numbers, bound)
        again, captured.last, self.again = self.again, None, None  # (also where it fails)
        if bound.keys() != captured.variables:
            raise JitError(
                f"captured with the variables {listed(captured.variables)}, called with {listed(bound)}; "
                "pass the same ones, or make a second TinyJit"
            )
        if is_due:
            self._follow(captured, args, kwargs, tensors)
        out = captured.replay(tensors, constants, numbers, bound)
        if len(tensors) == len(args) and not kwargs:
            captured.remember(tensors)
            self._prepare(captured, again)
        return out

    def _follow(self, captured: Captured[T], args: Any, kwargs: Any, tensors: Named) -> None:
        captured.keep_old_values()  # (else the function would, where it writes what they read)
        if found := captured.following.follow(self.fn, args, kwargs, tensors, captured.inputs):
            changed = f" The step itself changes {', '.join(sorted(self.ignored))}." if self.ignored else ""
            raise JitError(
                f"the step is not what was captured: {found}.{changed} A capture keeps what Python decided; pass what "
                "changes as a Tensor, keep it in one that the step assigns, or do it outside of the step "
                "(JIT_CHECK=0 looks no more)"
            ) from captured.following.raised

    def _run_plain(self, args: Any, kwargs: Any) -> T:
        out = self.fn(*args, **kwargs)
        realize_all(out)
        return out

    def _run_first(self, args: Any, kwargs: Any) -> T:
        """The call before the capture, which brings state into memory."""
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
        self.warm = [*self.warm, Guards(self.fn)][-MOST_CAPTURES:]
        return out

    def _compute_what_reads_state(self) -> None:
        """Lazy values from before, of what the function overwrites, are computed before it is recorded: they keep the
        value of their time, while what the function itself computes of its state, by an equal graph perhaps, is
        computed in each replay."""
        is_known = self.assigned is not None  # without a call before it is not
        state = set() if self.assigned is None else {memory(t.uop) for t in self.assigned}
        if is_known:
            self.assigned = TensorSet()
        early = lazy_readers(lambda u: u in state if is_known else u.op is Ops.BUFFER)
        if early:
            with suppress(Exception):  # (what cannot be computed is lost where it is overwritten)
                early[0].realize(*early[1:])

    def _capture(
        self,
        args: Any,
        kwargs: Any,
        tensors: Named,
        constants: Constants,
        numbers: Numbers,
        bound: dict[UOp, int],
    ) -> T:
        is_first = self.assigned is None
        known = {memory(t.uop) for t in LIVE if is_stored(t.uop)} if is_first else set()
        before = Guards(self.fn)
        recorded = record(self.fn, args, kwargs, tensors)
        guards = Guards(self.fn)
        self.ignored |= {p for p in guards.differences(before) if isinstance(guards.values.get(p), NUMBERS)}
        given = recorded.given([t for _, t in tensors])
        others = {id(t): now for _, t in tensors_of(recorded.out) if (now := read_from(t, given)) is not t}
        out: T = replaced(recorded.out, others) if others else recorded.out
        if is_first and recorded.made_state(known):
            self.assigned = recorded.assigned
            lazy = [t for t in self.assigned if not is_stored(t.uop)]
            if lazy:
                lazy[0].realize(*lazy[1:])
            return out
        if recorded.is_empty():
            return out
        self.captured = Captured(recorded, tensors, constants, numbers, bound, self.donate)
        self.captured.guards = guards
        self.captured.results.end_histories()
        self._keep(self.captured)
        return out

    def _keep(self, captured: Captured[T]) -> None:
        """It is the last used one; others used longer ago go where they are many or hold too much memory."""
        self.captures.append(captured)
        while len(self.captures) > 1 and (
            len(self.captures) > MOST_CAPTURES or sum(c.nbytes for c in self.captures) > MOST_BYTES
        ):
            gone = self.captures.pop(0)
            self.crowded_out += 1
            if self.crowded_out == MANY_CHANGES and not captured.guards.differences(gone.guards, self.ignored):
                self._tell_of_shapes(gone, captured)

    def _tell_of_shapes(self, gone: Captured[T], captured: Captured[T]) -> None:
        """One line, once, where a step is captured again and again for other shapes."""
        pairs = zip(gone.inputs, captured.inputs)
        path, was, now = next(((a.path, a.own, b.own) for a, b in pairs if a.own.shape != b.own.shape))
        warnings.warn(
            f"the TinyJit of {getattr(self.fn, '__qualname__', 'a step')} is called with more shapes than the "
            f"{len(self.captures)} that are kept, and captured again for those that come back: {path} was {was.shape}, "
            f"now it is {now.shape}. Pad to a few sizes, or give its size as a bound Variable",
            stacklevel=6,
        )


__all__ = ["JitError", "TinyJit"]
