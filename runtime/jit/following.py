"""A captured function followed again, without running: whether it would make the calls that were captured.

Guards see what Python can read and compare; numbers of `random`, a counter in a list, a schedule inside of the step
they do not. So now and then (`JIT_CHECK`) the function is called as for a recording, with nothing carried out, and its
calls are compared with the capture's one by one: the kernel, its memory, its variables.

    captured  call 3: kernel a, reads A, writes t1     now  call 3: kernel a, reads A, writes u1     t1 <-> u1
              call 4: kernel b, reads t1, writes W          call 4: kernel c, ...                     differs

Memory from before must be the same, memory that the step makes the same throughout. Afterwards everything is as it was:
tensors, gradients, optimisers, and what can be reached of the program's objects, random generators too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.engine.linear import Recording, capture
from manygrad.runtime.executors.items import ExecItem, Vars
from manygrad.runtime.jit.arguments import Input, check_inputs
from manygrad.runtime.jit.memory import whole
from manygrad.runtime.jit.recording import Gradients, Named, gradients_now, realize_all
from manygrad.runtime.profile.counters import GlobalCounters
from manygrad.runtime.storage import STORAGE, buffers_of
from manygrad.tensor.engine import engine
from manygrad.tensor.guards import Reader
from manygrad.tensor.standin import part
from manygrad.tensor.storage import LIVE, PENDING, TRAINED, assignments, is_stored, unrealized
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp, toposort
from manygrad.tensor.uop.views import memory

FOLLOWED = (1, 8, 98, 998)  # that is in the calls 3, 10, 100 and 1000, if one came before the capture


@dataclass(frozen=True)
class Call:
    """One call of a step: what it calls, on which memory, and which of that there was before."""

    item: ExecItem
    vars: Vars
    is_known: tuple[bool, ...]

    def told(self) -> str:
        kind = type(self.item).__name__.removesuffix("Item").lower()
        return f"the {kind} of line {self.item.line}"


class Following:
    """When a capture's function is followed again: in the replays FOLLOWED, and then after ten times as many."""

    def __init__(self, calls: list[Call], is_on: bool) -> None:
        self.calls = calls
        self.due = FOLLOWED[0]  # the replay before which it is followed next
        self.left = self.due if is_on else 0  # replays until then; 0: never
        self.raised: Exception | None = None  # by the function when it was followed

    def is_due(self) -> bool:
        """Counts a replay; whether the function is to be followed before it."""
        is_due = self.left == 1
        self.left -= self.left > 0
        return is_due

    def follow(self, fn: Callable[..., Any], args: Any, kwargs: Any, tensors: Named, inputs: list[Input]) -> str:
        """The first difference between what the function would do and what was captured, in words; or nothing."""
        check_inputs(inputs, tensors)
        given = {id(t) for _, t in tensors}
        if len(given) < sum(i.twin is None for i in inputs):  # (one tensor cannot stand for two of them)
            self.left = 1
            return ""
        try:
            found = difference(self.calls, follow(fn, args, kwargs, tensors, [i.own for i in inputs]))
        except Exception as e:  # the user's code may raise anything: `raised` is the cause of the JitError
            found, self.raised = f"it raised {type(e).__name__}: {e}", e
        if found:
            self.left = 1  # (the next call finds it, too)
            return found
        now, self.due = self.due, next((n for n in FOLLOWED if n > self.due), self.due * 10)
        self.left = self.due - now
        return ""


def described(calls: Iterable[tuple[list[ExecItem], Vars]], known: set[int]) -> list[Call]:
    """`known`: ids of the memory that there was before."""
    return [
        Call(item, vars, tuple(id(whole(b)) in known for b in item.buffers)) for items, vars in calls for item in items
    ]


def difference(was: list[Call], now: list[Call]) -> str:
    """The first one, in words; nothing where there is none."""
    pairs: dict[int, Buffer] = {}
    back: dict[int, Buffer] = {}
    for i, (a, b) in enumerate(zip(was, now)):
        if why := _differs(a, b, pairs, back):
            return f"call {i + 1} of {len(was)} was {a.told()}, now it is {b.told()}: {why}"
    if len(was) != len(now):
        more = (now if len(now) > len(was) else was)[min(len(was), len(now))]
        side = "now" if len(now) > len(was) else "then"
        return f"it made {len(was)} calls, now it makes {len(now)}; the first that only {side} there is: {more.told()}"
    return ""


def _differs(a: Call, b: Call, pairs: dict[int, Buffer], back: dict[int, Buffer]) -> str:
    x, y = getattr(a.item, "ast", None), getattr(b.item, "ast", None)
    if type(a.item) is not type(b.item) or len(a.item.buffers) != len(b.item.buffers):
        return "another kind of call"
    if x is not y:
        return _of_kernels(x, y)
    faults = {id(words.buffer) for words in current().faults.words.values()}
    if dict(a.vars) != dict(b.vars):
        return f"variables were {dict(a.vars)}, now {dict(b.vars)}"
    for k, (p, q, known) in enumerate(zip(a.item.buffers, b.item.buffers, a.is_known)):
        v, w = whole(p), whole(q)
        if id(v) in faults and id(w) in faults:  # (words for indices out of range are of the line that calls the step)
            continue
        same = v is w if known else pairs.setdefault(id(v), w) is w and back.setdefault(id(w), v) is v
        if not same or (p.offset, p.nbytes) != (q.offset, q.nbytes):
            return f"argument {k} of {p.count} {p.dtype.name} lies elsewhere: another tensor takes its place"
    return ""


def _of_kernels(x: UOp | None, y: UOp | None) -> str:
    if x is None or y is None:
        return "another call"
    a, b = x.toposort(), y.toposort()
    for u, v in zip(a, b):
        if u.op is v.op is Ops.CONST and u.arg != v.arg:
            return f"the number {u.arg!r} in it is {v.arg!r} now"
        if u.op is not v.op:
            return f"{u.op.name} in it is {v.op.name} now"
    return "another kernel"


def follow(fn: Callable[..., Any], args: Any, kwargs: Any, tensors: Named, own: list[Tensor]) -> list[Call]:
    """The calls that `fn` would make, whose argument `tensors` are `own`. What it raises is raised."""
    gradients = gradients_now()
    undo = [_undo_program(fn), _undo_tensors(), _undo_counts()]
    known = known_memory()
    recording = Recording((t for t in LIVE if not is_stored(t.uop)), is_dry=True)
    join = part(t for _, t in tensors)
    before = {id(t): t.uop for _, t in tensors}
    try:
        for (_, t), o in reversed(list(zip(tensors, own))):
            t.uop = o.uop
        capture.append(recording)
        with assignments() as assigned:
            out = fn(*args, **kwargs)
            realize_all([out, [g for _, g in Gradients(gradients, assigned).made]])
    finally:
        capture.clear()
        for _, t in tensors:
            t.uop = before[id(t)]
        join()
        for back in undo:
            back()
    return described(recording.taken, known)


def known_memory() -> set[int]:
    """Ids of the memory that live tensors have."""
    nodes = {memory(t.uop) for t in LIVE if is_stored(t.uop)}
    return {id(whole(b)) for u in nodes if u in STORAGE for b in buffers_of(u)}


def _undo_tensors() -> Callable[[], None]:
    before = {id(t): (t, t.uop, t._leaf, t._storage, t._grad, t._requires_grad) for t in LIVE}
    pending = {id(t) for t in PENDING}
    earlier = {u for u in toposort(t.uop for t in unrealized()) if u.op is Ops.AFTER}

    def back() -> None:
        for t, uop, leaf, identity, grad, trained in before.values():
            t.uop, t._leaf, t._storage, t._grad = uop, leaf, identity, grad
            if t._requires_grad is not trained:
                t._requires_grad = trained
                (TRAINED.add if trained else TRAINED.discard)(t)
        for t in PENDING.mine():
            if id(t) not in pending:
                PENDING.discard(t)
        for t in LIVE:
            if id(t) not in before and any(u not in earlier and _is_empty(u) for u in t.uop.toposort()):
                why = f"a tensor of shape {t.shape} was made while a TinyJit followed its function, without running it"
                engine().lose(t, f"{why}: it has no value; have the function return it")

    return back


def _is_empty(u: UOp) -> bool:
    """Whether a value stands for memory that nothing was written to. (What other threads make meanwhile is written.)"""
    if u.op is not Ops.BUFFER:
        return u.op is Ops.AFTER
    found = STORAGE.get(u)
    return not any(b is not None and b.is_allocated for b in (found if isinstance(found, list) else [found]))


def _undo_counts() -> Callable[[], None]:
    updates, python, numpy = GlobalCounters.updates, random.getstate(), np.random.get_state()

    def back() -> None:
        GlobalCounters.updates = updates
        random.setstate(python)
        np.random.set_state(numpy)

    return back


def _undo_program(fn: Callable[..., Any]) -> Callable[[], None]:
    """What the function can reach, one level each."""
    reader = Reader()
    reader.visit("", fn)
    reader.read_objects()
    undo: list[Callable[[], None]] = []
    for x in [*reader.seen.values(), *reader.below]:
        if isinstance(x, (Tensor, type)):
            continue
        if isinstance(x, dict):
            undo.append(_dict_back(x))
        elif isinstance(x, (list, set)):
            undo.append(_items_back(x))
        elif isinstance(x, np.random.Generator):
            undo.append(_generator_back(x))
        for cell in getattr(x, "__closure__", None) or ():
            undo.append(_cell_back(cell))
        if isinstance(d := getattr(x, "__dict__", None), dict):
            undo.append(_dict_back(d))
    undo += [_names_back(d, names) for d, names in reader.globals]

    def all_back() -> None:
        for back in undo:
            back()

    return all_back


def _dict_back(d: dict[Any, Any]) -> Callable[[], None]:
    before = dict(d)

    def back() -> None:
        if list(d) != list(before) or any(d[k] is not v for k, v in before.items()):
            dict.clear(d)
            dict.update(d, before)

    return back


def _names_back(d: dict[str, Any], names: Iterable[str]) -> Callable[[], None]:
    before = {n: d[n] for n in names if n in d}
    return lambda: d.update(before)


def _items_back(x: Any) -> Callable[[], None]:
    before = x.copy()

    def back() -> None:
        x.clear()
        (x.extend if isinstance(x, list) else x.update)(before)

    return back


def _generator_back(rng: np.random.Generator) -> Callable[[], None]:
    state: Mapping[str, Any] = rng.bit_generator.state

    def back() -> None:
        rng.bit_generator.state = state

    return back


def _cell_back(cell: Any) -> Callable[[], None]:
    with suppress(ValueError):
        value = cell.cell_contents

        def back() -> None:
            cell.cell_contents = value

        return back
    return lambda: None
