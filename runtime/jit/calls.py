"""Calls of the front end that were put off, captured as a TinyJit's function is: recorded once, then replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from manygrad.errors import JitError
from manygrad.runtime.jit.captured import Captured
from manygrad.runtime.jit.recording import Named, record
from manygrad.runtime.storage import STORAGE
from manygrad.tensor.grad_mode import set_grad_enabled
from manygrad.tensor.storage import LIVE, PENDING, is_stored
from manygrad.tensor.stored import HISTORY, is_overwritten
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp, standing_on
from manygrad.tensor.uop.views import memory, rebased

NOTHING, FLOWS, OVERWRITTEN = range(3)  # of a gradient


class CapturedCalls:
    """A capture of calls."""

    def __init__(self, captured: Captured[list[Tensor]], state: list[Tensor], over: list[int]) -> None:
        """`state`: tensors that it reads where they lie; `over`: numbers of results that had a gradient, and have
        none any more."""
        self.captured, self.over = captured, over
        self.state = [(u, STORAGE.get(u)) for u in {memory(t.uop) for t in state}]
        self.nbytes = captured.nbytes

    def fits(self) -> bool:
        """Whether the gradients that it makes are not there yet, and state lies where it lay."""
        return self.captured.results.gradients.fit() and all(STORAGE.get(u) is b for u, b in self.state)

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        _compute(inputs)
        out = self.captured.replay(_named(inputs), [], [], {})
        note_over(out, self.over)
        return out


def capture_calls(
    fn: Callable[..., list[Tensor]], inputs: list[Tensor], state: list[Tensor], writes: bool
) -> tuple[list[Tensor], CapturedCalls | None, bool]:
    """Calls `fn`, which gives what lives on of its calls; (that, the capture of it where it can be one, whether a
    gradient flows on from what it gave)."""
    _compute(inputs)
    lazy = [t for t in LIVE if not is_stored(t.uop)] if writes else []
    readers = standing_on([t.uop for t in lazy], lambda u: u.op is Ops.BUFFER)
    early = [t for t in lazy if t.uop in readers]
    if early:
        with suppress(Exception):  # (what cannot be computed is lost where it is overwritten)
            early[0].realize(*early[1:])
    named = _named(inputs)
    known = {memory(t.uop) for t in LIVE if is_stored(t.uop)}
    recorded = record(fn, tuple(inputs), {}, named)
    histories = [history(t.uop) for t in recorded.out]
    over = [n for n, found in enumerate(histories) if found is OVERWRITTEN]
    given = {i.own.uop: t.uop for i, t in zip(recorded.inputs, inputs)}
    for own in given:
        HISTORY.pop(own)
    captured: Captured[list[Tensor]] | None = None
    if not recorded.made_state(known):
        with suppress(JitError):
            captured = Captured(recorded, named, [], [], {}, donate=False)
    out = [_in(t, given) for t in recorded.out]
    note_over(out, over)
    flows = FLOWS in histories
    if captured is None:
        return out, None, flows
    captured.following.left = 0
    return out, CapturedCalls(captured, state, over), flows


def history(u: UOp) -> int:
    """Whether a gradient flows on from a stored value, or would, but that it, or a stored value below it, was computed
    from what is overwritten now."""
    todo, seen, found = [memory(u)], {memory(u)}, NOTHING
    while todo:
        entry = HISTORY.get(todo.pop())
        if entry is None:
            continue
        graph, clock = entry
        if graph is None or is_overwritten(graph, clock):
            return OVERWRITTEN
        found = FLOWS
        below = {x for x in graph.toposort() if x in HISTORY} - seen
        seen |= below
        todo += below
    return found


def note_over(results: list[Tensor], numbers: list[int]) -> None:
    """backward() from these results says that what they were computed from is overwritten."""
    for n in numbers:
        HISTORY[memory(results[n].uop)] = (None, 0)


def _in(t: Tensor, given: dict[UOp, UOp]) -> Tensor:
    """What is a view of a capture's own input, as that of the tensor that was given."""
    base = memory(t.uop)
    if base not in given:
        return t
    with set_grad_enabled(True):
        return t._new(rebased(t.uop, base, given[base]))


def _named(inputs: list[Tensor]) -> Named:
    return [(f"tensor {i}", t) for i, t in enumerate(inputs)]


def _compute(inputs: list[Tensor]) -> None:
    waiting = [*PENDING, *[t for t in inputs if t.uop.op is not Ops.BUFFER]]
    if waiting:
        waiting[0].realize(*waiting[1:])


__all__ = ["CapturedCalls", "capture_calls"]
