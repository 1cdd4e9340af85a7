"""Calls of the front end that were put off, captured as a TinyJit's function is: recorded once, then replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from manygrad.errors import JitError
from manygrad.runtime.current import current
from manygrad.runtime.jit.captured import Captured
from manygrad.runtime.jit.recording import Named, lazy_readers, read_from, record
from manygrad.runtime.storage import STORAGE
from manygrad.tensor.engine import MadeCalls
from manygrad.tensor.grad_mode import set_grad_enabled
from manygrad.tensor.storage import LIVE, PENDING, is_stored
from manygrad.tensor.stored import HISTORY, is_overwritten, was_written
from manygrad.tensor.tensor import Tensor
from manygrad.tensor.uop import Ops, UOp, toposort
from manygrad.tensor.uop.rewrite import substitute
from manygrad.tensor.uop.views import memory

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
        out = self.captured.make(inputs, {})  # (their key says what they are)
        note_over(out, self.over)
        return out


def capture_calls(
    fn: Callable[..., list[Tensor]], inputs: list[Tensor], state: list[Tensor], writes: bool, kept: list[Tensor]
) -> MadeCalls:
    """Calls `fn`, which gives what is stored of what lives on of its calls, and appends to `kept` what is not to be
    computed now."""
    _compute(inputs)
    early = lazy_readers(lambda u: u.op is Ops.BUFFER) if writes else []
    if early:
        with suppress(Exception):  # (what cannot be computed is lost where it is overwritten)
            early[0].realize(*early[1:])
    named = _named(inputs)
    known = {memory(t.uop) for t in LIVE if is_stored(t.uop)}
    recorded = record(fn, tuple(inputs), {}, named)
    own = [i.own.uop for i in recorded.inputs]
    stored = [k for k, t in enumerate(kept) if t.uop.op is Ops.BUFFER and t.uop not in known and t.uop not in own]
    stored = [k for k in stored if all(kept[k] is not t for t in recorded.out)]
    recorded.out += [kept[k] for k in stored]
    graphs, inner = graphs_of(kept, {*own, *known, *(t.uop for t in recorded.out), *current().faults.nodes.values()})
    recorded.out += [_as(recorded.out[0], u) for u in inner]
    stored += inner.values()
    histories = [history(t.uop) for t in recorded.out]
    over = [n for n, found in enumerate(histories) if found is OVERWRITTEN]
    given = recorded.given(inputs)
    state_flows = any(i.written and history(i.own.uop) is FLOWS for i in recorded.inputs)
    for u, node in given.items():
        if (entry := HISTORY.pop(u)) is not None:  # (a value that was read before, and goes on)
            HISTORY[node] = (None if entry[0] is None else substitute(entry[0], given), entry[1])
    captured: Captured[list[Tensor]] | None = None
    if not recorded.made_state(known):
        with suppress(JitError):
            captured = Captured(recorded, named, [], [], {}, donate=False)
    out = [read_from(t, given) for t in recorded.out]
    note_over(out, over)
    replay = None
    if captured is not None:
        captured.following.left = 0
        replay = CapturedCalls(captured, state, over)
    made = set() if captured is None else {slot.now.node for slot in captured.results.slots}
    used = set(toposort(graphs.values()))
    read = [n for n, t in enumerate(recorded.out) if t.uop in used or memory(t.uop) in used]
    lasts = all(n not in over and recorded.out[n].uop in made for n in read)
    lasts = lasts and not any(u.op in (Ops.AFTER, Ops.PARAM) or was_written(u) for u in used)
    flowing = [k for k, found in enumerate(histories) if found is FLOWS]
    return MadeCalls(out, replay, flowing, state_flows, own, graphs, stored, lasts)


def graphs_of(kept: list[Tensor], stable: set[UOp]) -> tuple[dict[int, UOp], dict[UOp, int]]:
    """(what each of these values was computed by: a lazy one is that graph, a stored one with a gradient has it beside
    it; the other memory than `stable` that they read, numbered -1, -2, ...). The graphs of that have its numbers."""
    graphs = {k: graph_of(t.uop) for k, t in enumerate(kept)}
    inner: dict[UOp, int] = {}
    todo = list(graphs.values())
    while todo:
        for u in todo.pop().toposort():
            if u.op is Ops.BUFFER and u not in stable and u not in inner:
                inner[u] = -1 - len(inner)
                if u in HISTORY:
                    graphs[inner[u]] = graph_of(u)
                    todo.append(graphs[inner[u]])
    return graphs, inner


def graph_of(u: UOp) -> UOp:
    graph, _ = HISTORY.get(u) or (None, 0)
    return u if graph is None or was_written(u) else graph


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


def _as(t: Tensor, u: UOp) -> Tensor:
    with set_grad_enabled(True):
        return t._new(u)


def _named(inputs: list[Tensor]) -> Named:
    return [(f"tensor {i}", t) for i, t in enumerate(inputs)]


def _compute(inputs: list[Tensor]) -> None:
    waiting = [t for t in inputs if t.uop.op is not Ops.BUFFER]
    if len(PENDING):
        waiting = [*PENDING, *waiting]
    if waiting:
        waiting[0].realize(*waiting[1:])


__all__ = ["CapturedCalls", "capture_calls"]
