"""Recording: one call of a function, with inputs of the capture's own in place of its arguments."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manygrad.runtime.buffer import Buffer
from manygrad.runtime.current import current
from manygrad.runtime.engine.linear import Recording, capture
from manygrad.runtime.executors.items import ExecItem, Vars
from manygrad.runtime.jit.arguments import Input, JitError, binds, cut_of, refuse_shared_memory, signature, walk
from manygrad.runtime.jit.memory import stored, whole
from manygrad.runtime.storage import STORAGE, buffers_of
from manygrad.tensor.grad_mode import set_grad_enabled
from manygrad.tensor.standin import part
from manygrad.tensor.storage import LIVE, PENDING, TensorSet, assignments, is_stored, keep_copy
from manygrad.tensor.stored import ENDED, HISTORY, SOURCES, Sources, was_written
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import UOp, standing_on
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.views import memory, rebased

Named = list[tuple[str, Tensor]]  # tensors, each with the path to it


def realize_all(out: Any) -> None:
    """Computes the tensors of a result, and this thread's assignments."""
    found = tensors_of(out)
    tensors = [t for _, t in found] + PENDING.mine()
    if tensors:
        tensors[0].realize(*tensors[1:])


def tensors_of(out: Any) -> Named:
    """The tensors of a result, each with the path to it."""
    found: Named = []
    walk(out, "result", found, [], [])
    return found


class Gradients:
    """What a function does to `.grad` of tensors from outside: `made` are those that it sets, each with its tensor;
    `absent`: tensors that had none before, which it may add to; `added`: what was there and was written, and where."""

    def __init__(self, before: dict[int, tuple[Tensor, Tensor | None]], assigned: TensorSet) -> None:
        now = [(t, t._grad, grad) for t, grad in before.values()]
        self.made = [(t, g) for t, g, grad in now if g is not None and g is not grad]
        self.absent = [weakref.ref(t) for t, g, grad in now if grad is None and g is not None]
        written = {id(t) for t in assigned}
        self.added = [
            (weakref.ref(t), g, memory(g.uop)) for t, g, grad in now if g is not None and g is grad and id(g) in written
        ]
        self.touched = [t for t, g, grad in now if g is not grad or (g is not None and id(g) in written)]

    def forget_tensors(self) -> None:
        """A capture does not keep the tensors whose gradients it makes."""
        self.made, self.touched = [], []

    def fit(self) -> bool:
        """Whether they are as they were before the call that was recorded."""
        if not self.absent and not self.added:
            return True
        absent = [t for ref in self.absent if (t := ref()) is not None]
        added = [(t, g, node) for ref, g, node in self.added if (t := ref()) is not None]
        return all(t._grad is None for t in absent) and all(
            t._grad is g and memory(g.uop) is node for t, g, node in added
        )


def gradients_now() -> dict[int, tuple[Tensor, Tensor | None]]:
    """All tensors that may have one, each with it; those there are lie in memory from now on."""
    found = [t for t in LIVE if t._grad is not None or t._requires_grad]
    lazy = [t._grad for t in found if t._grad is not None and not is_stored(t._grad.uop)]
    if lazy:
        lazy[0].realize(*lazy[1:])
    return {id(t): (t, t._grad) for t in found}


def lazy_readers(is_read: Callable[[UOp], bool]) -> list[Tensor]:
    """Live values that are not computed, and stand on what `is_read` tells, to be computed now. On several workers
    garbage is collected before, where there are some (`runtime/engine/garbage.py`; recordings are few)."""
    found = _lazy_readers(is_read)
    if found and current().world.size > 1:
        found.clear()  # (which holds them)
        gc.collect()
        found = _lazy_readers(is_read)
    for t in found:
        keep_copy(t)
    return found


def _lazy_readers(is_read: Callable[[UOp], bool]) -> list[Tensor]:
    lazy = [t for t in LIVE if not is_stored(t.uop)]
    readers = standing_on([t.uop for t in lazy], is_read)
    return [t for t in lazy if t.uop in readers]


@dataclass
class Recorded:
    """Effects and result of one call of the function."""

    out: Any
    inputs: list[Input]
    calls: list[tuple[list[ExecItem], Vars]]
    assigned: TensorSet  # by the function
    overwritten: set[Buffer]
    known: set[UOp]  # memory that there was before
    gradients: Gradients
    there: set[int]  # ids of memory that there was before, and of the inputs' own
    has_computed: bool  # something lazy from outside, which it finds computed the next time

    def given(self, tensors: list[Tensor]) -> dict[UOp, UOp]:
        """The memory of each input's own, and that of the argument which it stands for."""
        return {i.own.uop: t.uop for i, t in zip(self.inputs, tensors)}

    def is_empty(self) -> bool:
        """Whether it gives tensors without elements alone, for which nothing is computed or replayed."""
        results = tensors_of(self.out)
        return bool(results) and not self.calls and all(0 in t.shape for _, t in results)

    def made_state(self, known: set[UOp]) -> bool:
        """Whether a tensor lives on in memory that is not `known` from before, and that a replay would write again, or
        was assigned: an optimiser's buffer, say, which a replay would begin with zeros each time."""
        if any(memory(t.uop) not in known for t in self.assigned if all(t is not i.own for i in self.inputs)):
            return True
        expected = {id(t) for _, t in tensors_of(self.out)} | {id(i.own) for i in self.inputs}
        expected |= {id(g) for _, g in self.gradients.made}
        made = [t for t in LIVE if id(t) not in expected and is_stored(t.uop) and memory(t.uop) not in known]
        return any(overwrites(self.overwritten, memory(t.uop)) for t in made)


def read_from(t: Tensor, given: dict[UOp, UOp]) -> Tensor:
    """What is a view, or a lazy copy, of an input's own, as that of the argument."""
    base = memory(t.uop)
    now = rebased(t.uop, base, given[base]) if base in given else t.uop
    if not is_stored(now):
        now = substitute(now, given)
    if now is t.uop:
        return t
    with set_grad_enabled(True):
        return t._new(now)


def refuse_gradients_of_arguments(gradients: Gradients, tensors: Named) -> None:
    paths = {id(t): path for path, t in tensors}
    if found := [paths[id(t)] for t in gradients.touched if t._grad is not None and id(t) in paths]:
        raise JitError(
            f"backward() inside of a TinyJit sets the gradient of {', '.join(found)}, which is another tensor in each "
            "call; return it: autograd.grad(loss, x), or have the function use the tensor without being given it"
        )


def overwrites(overwritten: set[Buffer], u: UOp) -> bool:
    """Whether what is overwritten is the memory of a BUFFER, if it has any (that of a lost value has not)."""
    return u in STORAGE and not overwritten.isdisjoint(map(whole, buffers_of(u)))


def record(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Named) -> Recorded:
    """Calls the function. `tensors` are those of its arguments."""
    before_gradients = gradients_now()
    recording = Recording(t for t in LIVE if not is_stored(t.uop))
    known = {memory(t.uop) for t in LIVE if is_stored(t.uop)}
    inputs: list[Input] = []
    join = part(t for _, t in tensors)
    before = {id(t): t.uop for _, t in tensors}
    first: dict[int, int] = {}
    try:
        for path, t in tensors:
            twin = first.get(id(t))
            own = inputs[twin].own if twin is not None else stored(t).clone().realize()
            kind = None if binds(t) else (t.shape, t.dtype, t.device, cut_of(t))
            SOURCES[own.uop] = Sources.of(memory(t.uop))  # (what is made of the one is made of the other)
            if t._requires_grad:  # (its gradient ends here)
                HISTORY.pop(own.uop)
            if was_written(memory(t.uop)):  # (state, as the function may write it again)
                HISTORY.pop(own.uop)
                ENDED[own.uop] = "was written with what has a gradient before this call of a captured function"
            if all(b.agreed for b in buffers_of(memory(t.uop))):  # (and differs by rank where that may)
                for b in buffers_of(own.uop):
                    b.agreed = True
            inputs.append(Input(path, signature(t), own, kind, twin))
            first.setdefault(id(t), len(inputs) - 1)
            t.uop = own.uop
        there = {id(whole(b)) for u in known if u in STORAGE for b in buffers_of(u)}
        there |= {id(whole(b)) for i in inputs for b in buffers_of(i.own.uop)}
        outside = [t for t in LIVE if not is_stored(t.uop)]
        capture.append(recording)
        with assignments() as assigned:
            out = fn(*args, **kwargs)
            gradients = Gradients(before_gradients, assigned)
            refuse_gradients_of_arguments(gradients, tensors)
            realize_all([out, [g for _, g in gradients.made]])
    finally:
        capture.clear()
        for _, t in tensors:
            t.uop = before[id(t)]
        join()
    has_computed = any(is_stored(t.uop) for t in outside)
    overwritten = {whole(b) for items, _ in recording.taken for item in items for b in item.written}
    written = {id(b) for b in overwritten}
    for i in inputs:
        i.written = i.twin is None and any(id(b) in written for b in buffers_of(i.own.uop))
    refuse_shared_memory(inputs, [t for _, t in tensors])
    for i, (_, t) in zip(inputs, tensors):
        if i.written:
            t.assign(i.own).realize()
    return Recorded(out, inputs, recording.taken, assigned, overwritten, known, gradients, there, has_computed)
