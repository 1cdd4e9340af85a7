"""A stage as a list of passes: each has a name, what it does, and the spec of what it makes. `run_passes` runs them,
for every stage: it times and checks each (SPEC=1), prints its name, time and change in size (DEBUG=5), what the first
one was given and what each changes in it (DEBUG=6), and keeps its rewrites (TRACK_MATCH_STATS=1).

A pass goes by the name of its function and file. None runs inside another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any, Generic, NamedTuple, TypeVar

from manygrad.tensor.dtype import dtypes
from manygrad.tensor.environment import DEBUG, SPEC, TRACK_MATCH_STATS
from manygrad.tensor.uop.difference import Differences
from manygrad.tensor.uop.ops import Ops
from manygrad.tensor.uop.track import tracked, whole_pass
from manygrad.tensor.uop.uop import UOp

To = TypeVar("To")
# functions (stage, pass, what it made: a graph or a Form of its own), for docs, tests and viewers
observers: list[Callable[[str, str, Any], None]] = []
# functions (stage, pass, start, end, what it did), for profiles
timers: list[Callable[[str, str, float, float, dict[str, Any]], None]] = []


class Form(NamedTuple):
    """What passes make that is no graph: what its parts are called, how many it has, and its text."""

    parts: str
    count: Callable[[Any], int]
    text: Callable[[Any], str]


@dataclass(frozen=True)
class Pass(Generic[To]):
    """`run(graph or items, what it is told besides)`, and a `spec(what it made, name)` that raises AssertionError where
    that is not legal. An item is a call: `what` on `args`. `form`: of what it makes, if that is neither."""

    name: str
    run: Callable[[Any, To], Any]
    spec: Callable[[Any, str], None]
    form: Form | None = None


def run_passes(stage: str, passes: Sequence[Pass[To]], graph: Any, to: To, form: Form | None = None) -> Any:
    """What the last pass makes; `form`: of what the first one is given."""
    changes = _Changes() if DEBUG >= 6 else None
    if changes is not None:
        print(f"{stage}, before its passes:\n{changes.show(graph, form)}")
    for p in passes:
        start, before, form_before, form = time.perf_counter(), graph, form, p.form
        if TRACK_MATCH_STATS:
            with tracked(p.name):
                graph = p.run(before, to)
                whole_pass(_root(before), _root(graph))
        else:
            graph = p.run(before, to)
        if timers:
            timed(stage, p.name, start, **_counted(graph, form))
        if DEBUG >= 5:
            _print(p.name, time.perf_counter() - start, _counted(before, form_before), _counted(graph, form))
        if changes is not None and (text := changes.show(graph, form)):
            print(text)
        if SPEC:
            p.spec(graph, p.name)
        if isinstance(graph, UOp) or form is not None:
            for observe in observers:
                observe(stage, p.name, graph)
    return graph


def timed(stage: str, name: str, start: float, **did: Any) -> None:
    """Tells the timers of something that started at `start` and ends now."""
    if timers:
        now = time.perf_counter()
        for tell in timers:
            tell(stage, name, start, now, did)


class _Changes:
    """Prints what one pass after the other makes: as a whole where its form is new, then what changes in it."""

    def __init__(self) -> None:
        self.graphs = Differences()
        self.form: Form | None = None
        self.text = ""

    def show(self, made: Any, form: Form | None) -> str:
        if form is None:
            return self.graphs.show(_graph(made))
        is_new, before = form is not self.form, self.text
        self.form, self.text = form, form.text(made)
        if is_new:
            return self.text
        lines = list(unified_diff(before.split("\n"), self.text.split("\n"), lineterm="", n=0))[2:]
        return "\n".join(line for line in lines if not line.startswith("@@"))


def _print(name: str, seconds: float, before: dict[str, int], after: dict[str, int]) -> None:
    ((what, n),), (m,) = after.items(), before.values()
    print(f"pass {name:<18} {seconds * 1e3:8.2f} ms  {m:5d} -> {n:5d} {what}")


def _counted(made: Any, form: Form | None) -> dict[str, int]:
    if form is not None:
        return {form.parts: form.count(made)}
    return {"ops": len(made.toposort())} if isinstance(made, UOp) else {"calls": len(made)}


def _graph(made: Any) -> UOp:
    """As one graph; of items, with their arguments."""
    if isinstance(made, UOp):
        return made
    return UOp(Ops.LINEAR, dtypes.void, tuple(UOp(Ops.CALL, dtypes.void, (i.what, *i.args)) for i in made))


def _root(made: Any) -> Any:
    """What a rewrite of the whole is recorded with: a graph; of items, one of what they run."""
    is_items = isinstance(made, Sequence) and not isinstance(made, str)
    return UOp(Ops.LINEAR, dtypes.void, tuple(item.what for item in made)) if is_items else made
